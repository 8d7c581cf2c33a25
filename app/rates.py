"""Rate limits: token buckets of requests and bytes for each caller, in bounded tables.

A caller with a token has its own bucket; any other caller shares the one of its address, or /64 network.
Callers of this machine have none. Refused credentials cost a request of the address. A process counts by
itself, so a service with N workers lets through up to N times the rate.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict

from app.callers import Caller, Rate
from app.errors import Code, Problem
from app.limits import Limits
from app.settings import Settings

CALLERS_MAX = 16_384
"""Buckets of one kind: 4 MiB. The caller that was seen longest ago is forgotten, and gets a full one again."""

REFILL_S = 60
"""In which an empty bucket becomes full. A caller can spend a full one at once."""

ROUNDING_S = 1e-6
"""What sums of fractions of `REFILL_S` may be off: a full bucket has its last request too."""


class _Table:
    """The buckets of one kind of callers, and what a request and a byte cost: seconds of refilling."""

    def __init__(self, requests_max: int, bytes_max: int) -> None:
        self.buckets: OrderedDict[str, Bucket] = OrderedDict()
        self.configure(requests_max, bytes_max)

    def configure(self, requests_max: int, bytes_max: int) -> None:
        """Change the limits. A caller that has spent a part of its bucket has spent that part of the new one."""
        self.requests_max, self.bytes_max = requests_max, bytes_max
        self.request_s, self.byte_s = REFILL_S / requests_max, REFILL_S / bytes_max

    def add(self, name: str) -> Bucket:
        """A full bucket for a new caller."""
        bucket = self.buckets[name] = Bucket(self)
        if len(self.buckets) > CALLERS_MAX:
            self.buckets.popitem(last=False)
        return bucket


class Bucket:
    """What one caller has spent: the times at which its bucket is full again, of requests and of bytes.

    The bucket is empty when that is `REFILL_S` from now (the generic cell rate algorithm, ITU-T I.371).
    """

    __slots__ = ("bytes_full_at_s", "full_at_s", "live_count", "table")

    def __init__(self, table: _Table) -> None:
        self.table = table
        self.full_at_s = self.bytes_full_at_s = 0.0
        self.live_count = 0

    def take(self) -> None:
        """Take one request. Raises Problem: `rate_limited` while the bucket is empty."""
        now_s, table = time.monotonic(), self.table
        full_at_s = table.request_s + max(now_s, self.full_at_s)
        empty_until_s = full_at_s - REFILL_S
        if empty_until_s > now_s + ROUNDING_S:
            raise _refusal(f"{table.requests_max:,} requests a minute", empty_until_s - now_s)
        empty_until_s = self.bytes_full_at_s - REFILL_S
        if empty_until_s > now_s:
            raise _refusal(f"{table.bytes_max:,} bytes a minute", empty_until_s - now_s)
        self.full_at_s = full_at_s

    def spend(self, bytes_count: int) -> None:
        """Take bytes that were sent. They can overdraw the bucket; then the caller waits."""
        from_s = max(time.monotonic(), self.bytes_full_at_s)
        self.bytes_full_at_s = from_s + bytes_count * self.table.byte_s


class Rates:
    """The rate limits of one process."""

    def __init__(self, limits: Limits) -> None:
        self._callers = _Table(limits.caller_requests_per_minute, limits.caller_bytes_per_minute)
        self._strangers = _Table(
            limits.stranger_requests_per_minute, limits.stranger_bytes_per_minute
        )
        self._limits = limits
        self._strangers_live_count = 0

    def configure(self, settings: Settings) -> None:
        """Take over the rates of the settings; one that is unset is that of the limits."""
        limits = self._limits
        self._callers.configure(
            settings.caller_requests_per_minute or limits.caller_requests_per_minute,
            settings.caller_bytes_per_minute or limits.caller_bytes_per_minute,
        )
        self._strangers.configure(
            settings.stranger_requests_per_minute or limits.stranger_requests_per_minute,
            settings.stranger_bytes_per_minute or limits.stranger_bytes_per_minute,
        )

    def admit(self, caller: Caller) -> Bucket:
        """Count a request of a caller that is not free; `rate_limited` while its bucket is empty."""
        table = self._strangers if caller.rate is Rate.STRANGER else self._callers
        bucket = table.buckets.get(caller.name)
        if bucket is None:
            bucket = table.add(caller.name)
        else:
            table.buckets.move_to_end(caller.name)
        bucket.take()
        return bucket

    def begin_live(self, bucket: Bucket) -> None:
        """Count a live stream of a stranger; `rate_limited` if it or all strangers have too many."""
        limits = self._limits
        if (
            bucket.live_count >= limits.stranger_live_readers_max
            or self._strangers_live_count >= limits.live_readers_max // 2
        ):
            detail = f"{limits.stranger_live_readers_max} live streams at a time"
            raise _refusal(detail, limits.live_heartbeat_s)
        bucket.live_count += 1
        self._strangers_live_count += 1

    def end_live(self, bucket: Bucket) -> None:
        """A live stream of `begin_live` has ended."""
        bucket.live_count -= 1
        self._strangers_live_count -= 1


def _refusal(what: str, wait_s: float) -> Problem:
    return Problem(
        Code.RATE_LIMITED,
        f"more than {what}",
        headers={"Retry-After": str(max(1, math.ceil(wait_s)))},
    )
