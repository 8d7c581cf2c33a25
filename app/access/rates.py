"""Rate limits and budgets: token buckets for each caller, in bounded tables.

**Rates** are of requests and bytes, **budgets** of work that is known only once it is done.
A caller with a token has its own bucket; any other caller shares the one of its address, or /64 network.
Callers of this machine have none. Refused credentials cost a request of the address. A process counts by
itself, so a service with N workers lets through up to N times the rate.
"""

from __future__ import annotations

import math
import time

from app.access.callers import Caller, Rate
from app.cache import Recent
from app.errors import Code, Problem
from app.server.limits import Limits
from app.server.settings import Settings

CALLERS_MAX = 16_384
"""Buckets of one kind: 4 MiB. The caller that was seen longest ago is forgotten, and gets a full one again."""

REFILL_S = 60
"""In which an empty bucket becomes full. A caller can spend a full one at once."""

ROUNDING_S = 1e-6
"""What sums of fractions of `REFILL_S` may be off: a full bucket has its last request too."""


class TokenBucket:
    """What was taken from one bucket: the time at which it is full again.

    It is empty when that is `REFILL_S` from now (the generic cell rate algorithm, ITU-T I.371). Costs are seconds
    of refilling.
    """

    __slots__ = ("full_at_s",)

    def __init__(self) -> None:
        self.full_at_s = 0.0

    def owed_s(self, now_s: float, cost_s: float = 0.0) -> float:
        """Seconds until `cost_s` can be taken without debt; not positive if it can be taken now."""
        return max(now_s, self.full_at_s) + cost_s - REFILL_S - now_s

    def take(self, now_s: float, cost_s: float) -> None:
        """Take so much, even if that is more than is left: then it is owed."""
        self.full_at_s = max(now_s, self.full_at_s) + cost_s


class _Table:
    """The buckets of one kind of callers, and what a request and a byte cost: seconds of refilling."""

    def __init__(self, requests_max: int, bytes_max: int) -> None:
        self.buckets: Recent[str, Bucket] = Recent(CALLERS_MAX)
        self.configure(requests_max, bytes_max)

    def configure(self, requests_max: int, bytes_max: int) -> None:
        """Change the limits. A caller that has spent a part of its bucket has spent that part of the new one."""
        self.requests_max, self.bytes_max = requests_max, bytes_max
        self.request_s, self.byte_s = REFILL_S / requests_max, REFILL_S / bytes_max

    def add(self, name: str) -> Bucket:
        """A full bucket for a new caller."""
        bucket = Bucket(self)
        self.buckets.put(name, bucket)
        return bucket


class Bucket:
    """What one caller has spent, of requests and of bytes."""

    __slots__ = ("bytes", "live_count", "requests", "table")

    def __init__(self, table: _Table) -> None:
        self.table = table
        self.requests, self.bytes = TokenBucket(), TokenBucket()
        self.live_count = 0

    def take(self) -> None:
        """Take one request. Raises Problem: `rate_limited` while the bucket is empty."""
        now_s, table = time.monotonic(), self.table
        if (wait_s := self.requests.owed_s(now_s, table.request_s)) > ROUNDING_S:
            raise _refusal(f"{table.requests_max:,} requests a minute", wait_s)
        if (wait_s := self.bytes.owed_s(now_s)) > ROUNDING_S:
            raise _refusal(f"{table.bytes_max:,} bytes a minute", wait_s)
        self.requests.take(now_s, table.request_s)

    def spend(self, bytes_count: int) -> None:
        """Take bytes that were sent. They can overdraw the bucket; then the caller waits."""
        self.bytes.take(time.monotonic(), bytes_count * self.table.byte_s)


class Rates:
    """The rate limits of one process."""

    def __init__(self, limits: Limits) -> None:
        self._callers = _Table(limits.caller_requests_per_minute, limits.caller_bytes_per_minute)
        self._anonymous = _Table(
            limits.anonymous_requests_per_minute, limits.anonymous_bytes_per_minute
        )
        self._limits = limits
        self._anonymous_live_count = 0

    def configure(self, settings: Settings) -> None:
        """Take over the rates of the settings; one that is unset is that of the limits."""
        limits = self._limits
        self._callers.configure(
            settings.caller_requests_per_minute or limits.caller_requests_per_minute,
            settings.caller_bytes_per_minute or limits.caller_bytes_per_minute,
        )
        self._anonymous.configure(
            settings.anonymous_requests_per_minute or limits.anonymous_requests_per_minute,
            settings.anonymous_bytes_per_minute or limits.anonymous_bytes_per_minute,
        )

    def admit(self, caller: Caller) -> Bucket:
        """Count a request of a caller that is not free; `rate_limited` while its bucket is empty."""
        table = self._anonymous if caller.rate is Rate.ANONYMOUS else self._callers
        bucket = table.buckets.get(caller.name)
        if bucket is None:
            bucket = table.add(caller.name)
        bucket.take()
        return bucket

    def begin_live(self, bucket: Bucket) -> None:
        """Count a live stream of an anonymous caller; `rate_limited` if it, or all of them, have too many."""
        limits = self._limits
        if (
            bucket.live_count >= limits.anonymous_live_readers_max
            or self._anonymous_live_count >= limits.live_readers_max // 2
        ):
            detail = f"{limits.anonymous_live_readers_max} live streams at a time"
            raise _refusal(detail, limits.live_heartbeat_s)
        bucket.live_count += 1
        self._anonymous_live_count += 1

    def end_live(self, bucket: Bucket) -> None:
        """A live stream of `begin_live` has ended."""
        bucket.live_count -= 1
        self._anonymous_live_count -= 1


class Budget:
    """One kind of work: `units_max` per caller and minute, which can be spent at once.

    Work is paid when it is done, so a large cost can overdraw a budget; then the caller waits. `code`: that of
    the refusal.
    """

    def __init__(self, units_max: int, what: str, code: Code = Code.RECON_BUDGET_SPENT) -> None:
        self._units_max = units_max
        self._what = what
        self._code = code
        self._buckets: Recent[str, TokenBucket] = Recent(CALLERS_MAX)

    def check(self, caller: str) -> None:
        """Raise the refusal, with Retry-After, while the caller is overdrawn."""
        if (wait_s := self._of(caller).owed_s(time.monotonic())) > ROUNDING_S:
            raise Problem(
                self._code,
                f"more than {self._units_max} {self._what} a minute",
                headers={"Retry-After": str(1 + int(wait_s))},
            )

    def spend(self, caller: str, units: int) -> None:
        """Take `units`."""
        self._of(caller).take(time.monotonic(), units * REFILL_S / self._units_max)

    def _of(self, caller: str) -> TokenBucket:
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = TokenBucket()
            self._buckets.put(caller, bucket)
        return bucket


def _refusal(what: str, wait_s: float) -> Problem:
    return Problem(
        Code.RATE_LIMITED,
        f"more than {what}",
        headers={"Retry-After": str(max(1, math.ceil(wait_s)))},
    )


class ReconBudgets:
    """The budgets of reconciliation: views (in elements hashed) and replies (in bytes)."""

    def __init__(self, limits: Limits) -> None:
        self.views = Budget(limits.recon_view_elements_per_minute, "elements hashed for sessions")
        self.replies = Budget(limits.recon_reply_bytes_per_minute, "bytes of replies")

    def check(self, caller: str) -> None:
        """Raise `recon_budget_spent` while the caller owes anything."""
        self.views.check(caller)
        self.replies.check(caller)
