"""Rate limits: token buckets of requests and bytes for each caller, in bounded tables.

A caller with a token has its own bucket; any other caller shares the one of its address, or /64 network.
Callers of this machine have none. Refused credentials cost a request of the address. A process counts by
itself, so a service with N workers lets through up to N times the rate.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from dataclasses import dataclass

from app.callers import Caller, Rate
from app.errors import Code, Problem
from app.limits import Limits
from app.settings import Settings

CALLERS_MAX = 16_384
"""Buckets of one kind: 4 MiB. The one that was filled longest ago is forgotten, and its caller gets a full
one again."""

REFILL_S = 60
"""In which an empty bucket becomes full. A caller can spend a full one at once."""


@dataclass(slots=True)
class Bucket:
    """What one caller has left: requests, and bytes of bodies and replies."""

    requests: float
    bytes: float
    filled_at_s: float
    live_count: int = 0

    def spend(self, bytes_count: int) -> None:
        """Take bytes that were sent. They can overdraw the bucket; then the caller waits."""
        self.bytes -= bytes_count


class _Table:
    """The buckets of one kind of callers."""

    def __init__(self, requests_max: int, bytes_max: int) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self.buckets: OrderedDict[str, Bucket] = OrderedDict()

    def configure(self, requests_max: int, bytes_max: int) -> None:
        """Change the limits. No caller keeps more than a full bucket of the new ones."""
        if (requests_max, bytes_max) == (self._requests_max, self._bytes_max):
            return
        self._requests_max, self._bytes_max = requests_max, bytes_max
        for bucket in self.buckets.values():
            bucket.requests = min(bucket.requests, requests_max)
            bucket.bytes = min(bucket.bytes, bytes_max)

    def filled(self, name: str, bucket: Bucket | None) -> Bucket:
        now_s = time.monotonic()
        if bucket is None:
            bucket = self.buckets[name] = Bucket(self._requests_max, self._bytes_max, now_s)
            if len(self.buckets) > CALLERS_MAX:
                self.buckets.popitem(last=False)
            return bucket
        self.buckets.move_to_end(name)
        part = (now_s - bucket.filled_at_s) / REFILL_S
        bucket.filled_at_s = now_s
        bucket.requests = min(self._requests_max, bucket.requests + part * self._requests_max)
        bucket.bytes = min(self._bytes_max, bucket.bytes + part * self._bytes_max)
        if bucket.requests < 1:
            raise _refusal(
                f"{self._requests_max:,} requests a minute",
                (1 - bucket.requests) * REFILL_S / self._requests_max,
            )
        if bucket.bytes < 0:
            raise _refusal(
                f"{self._bytes_max:,} bytes a minute", -bucket.bytes * REFILL_S / self._bytes_max
            )
        return bucket


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
        # Look at the clock only when something is spent: a bucket that is filled late never holds more.
        if bucket is None or bucket.requests < 1 or bucket.bytes < 0:
            bucket = table.filled(caller.name, bucket)
        bucket.requests -= 1
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
