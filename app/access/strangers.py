"""The running requests of strangers: a reload that withdraws the grants of a stranger ends its requests.

`app.access.tokens` does the same for callers with a token. Requests of a stranger whose grants only grow go on.
"""

from __future__ import annotations

import asyncio
from typing import Any

from app.access.callers import Caller, granted_to_strangers, unauthenticated
from app.server.settings import Settings


class Strangers:
    """What strangers may do now, and the tasks that work for them: as many as requests run."""

    def __init__(self, settings: Settings) -> None:
        self._granted = _granted(settings)
        self._running: dict[asyncio.Task[Any], Caller] = {}

    def configure(self, settings: Settings) -> None:
        """Take over the settings, and end the requests that they do not allow."""
        self._granted = _granted(settings)
        for task, caller in list(self._running.items()):
            if not caller.is_within(self._granted):
                del self._running[task]
                task.cancel("anonymous access was withdrawn")

    def begin(self, caller: Caller, task: asyncio.Task[Any]) -> None:
        """A task works for a stranger: a withdrawal cancels it until `end`.

        Raises Problem(UNAUTHENTICATED) if it came since the caller was identified.
        """
        if not caller.is_within(self._granted):
            raise unauthenticated("anonymous access was withdrawn; this needs an access token")
        self._running[task] = caller

    def end(self, task: asyncio.Task[Any]) -> None:
        """A task has ended its work for the caller of `begin`."""
        self._running.pop(task, None)


def _granted(settings: Settings) -> Caller:
    return granted_to_strangers(settings.anonymous_read, settings.anonymous_publish)
