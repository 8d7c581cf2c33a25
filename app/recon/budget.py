"""What reconciliation costs its callers: budgets per minute."""

from __future__ import annotations

from app.access.rates import Budget
from app.server.limits import Limits


class ReconBudgets:
    """The budgets of reconciliation: views (in elements hashed) and replies (in bytes)."""

    def __init__(self, limits: Limits) -> None:
        self.views = Budget(limits.recon_view_elements_per_minute, "elements hashed for sessions")
        self.replies = Budget(limits.recon_reply_bytes_per_minute, "bytes of replies")

    def check(self, caller: str) -> None:
        """Raise `recon_budget_spent` while the caller owes anything."""
        self.views.check(caller)
        self.replies.check(caller)
