"""Budgets of callers per minute: token buckets in a bounded table."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from app.errors import Code, Problem
from app.limits import Limits

UNTRUSTED_REPLY_BYTES_BASE = 4_096
"""The largest reply to the shortest request of a caller without credentials."""

CALLERS_MAX = 10_000
"""Callers remembered; the least recently seen one is forgotten and gets a full budget again."""

REFILL_S = 60


@dataclass(slots=True)
class _Bucket:
    level: float
    filled_at_s: float


class Budget:
    """One kind of cost: `units_max` per caller and minute, which can be spent at once."""

    def __init__(self, units_max: int, what: str, code: Code = Code.RECON_BUDGET_SPENT) -> None:
        """`code`: that of the refusal."""
        self._units_max = units_max
        self._what = what
        self._code = code
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def check(self, caller: str) -> None:
        """Raise the refusal, with Retry-After, while the caller is overdrawn."""
        level = self._filled(caller, time.monotonic()).level
        if level < 0:
            wait_s = 1 + int(-level * REFILL_S / self._units_max)
            raise Problem(
                self._code,
                f"more than {self._units_max} {self._what} a minute",
                headers={"Retry-After": str(wait_s)},
            )

    def spend(self, caller: str, units: int) -> None:
        """Take `units`. A large cost can overdraw the bucket; the caller then waits until it refills."""
        self._filled(caller, time.monotonic()).level -= units

    def _filled(self, caller: str, now_s: float) -> _Bucket:
        bucket = self._buckets.setdefault(caller, _Bucket(self._units_max, now_s))
        self._buckets.move_to_end(caller)
        if len(self._buckets) > CALLERS_MAX:
            self._buckets.popitem(last=False)
        refill = (now_s - bucket.filled_at_s) * self._units_max / REFILL_S
        bucket.level = min(self._units_max, bucket.level + refill)
        bucket.filled_at_s = now_s
        return bucket


class ReconBudgets:
    """The budgets of reconciliation: views (in elements hashed) and replies (in bytes)."""

    def __init__(self, limits: Limits) -> None:
        self.views = Budget(limits.recon_view_elements_per_minute, "elements hashed for sessions")
        self.replies = Budget(limits.recon_reply_bytes_per_minute, "bytes of replies")

    def check(self, caller: str) -> None:
        """Raise `recon_budget_spent` while the caller owes anything."""
        self.views.check(caller)
        self.replies.check(caller)


class Allowance:
    """Maximum reply length: the limit for known callers; proportional to the request for others."""

    def __init__(self, limits: Limits, untrusted_bytes: int | None = None) -> None:
        """`untrusted_bytes`: request bytes of a caller without credentials; None for any other."""
        self._factor = limits.recon_untrusted_reply_factor
        self._untrusted_bytes = untrusted_bytes
        self.is_strict = untrusted_bytes is not None
        self.reply_bytes_max = limits.recon_reply_bytes_max
        if untrusted_bytes is not None:
            earned = UNTRUSTED_REPLY_BYTES_BASE + self._factor * untrusted_bytes
            self.reply_bytes_max = min(self.reply_bytes_max, earned)

    def request_bytes_min(self, reply_bytes: int) -> int:
        """The request length that allows this reply; at least twice that of the last request."""
        needed = -(-(reply_bytes - UNTRUSTED_REPLY_BYTES_BASE) // self._factor)
        return max(needed, 2 * (self._untrusted_bytes or 0))
