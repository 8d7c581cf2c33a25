"""The bounds of a session that its caller sets. Imports no numpy, because settings read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncLimits:
    """Bounds of one session that can be configured. Fixed ones are beside the code that uses them."""

    seconds_max: int = 3_600  # then the session ends as partial, and the next one continues
    whole_s: float = (
        86_400.0  # for so long (a day at most) a pair compares only news; then everything
    )
    answer_bytes_max: int = 1 << 20  # summaries and lists of one answer: 50 ms of the peer's time


DEFAULT_LIMITS = SyncLimits()
