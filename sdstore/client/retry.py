"""When a failed call is repeated, and after which pause."""

import random
from dataclasses import dataclass

from sdstore.client.errors import StoreError

_PASSING_CODES = frozenset({"unreachable", "timeout"})
_PASSING_STATUS = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class Retry:
    """Only repeatable calls are repeated, and only after transient errors.

    `attempts_max` counts the first attempt. Back-off doubles from `backoff_s` to `backoff_max_s`; the
    pause is drawn between half and all of it, so that clients do not return together. A pause that the
    node asks for is drawn between that and half as much again; if it asks for more than
    `retry_after_max_s`, its error is raised instead.
    """

    attempts_max: int = 4
    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    retry_after_max_s: float = 30.0

    def delay_s(self, attempt: int, error: StoreError) -> float | None:
        """The pause after failed attempt number `attempt` (from 1); None to give up."""
        if attempt >= self.attempts_max or not _passes(error):
            return None
        if error.retry_after_s is not None:
            if error.retry_after_s > self.retry_after_max_s:
                return None
            return error.retry_after_s * random.uniform(1.0, 1.5)
        backoff_s = min(self.backoff_max_s, self.backoff_s * 2.0 ** (attempt - 1))
        return backoff_s * random.uniform(0.5, 1.0)


def _passes(error: StoreError) -> bool:
    return error.code in _PASSING_CODES or error.status in _PASSING_STATUS
