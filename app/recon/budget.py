"""What reconciliation costs its callers: budgets per minute, and the length of a reply."""

from __future__ import annotations

from app.limits import Limits
from app.rates import Budget

UNTRUSTED_REPLY_BYTES_BASE = 4_096
"""The largest reply to the shortest request of a caller without credentials."""


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
