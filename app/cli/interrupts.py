"""Ctrl-C where Python alone would lose it, or hear it late."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

EXIT_CODE = 130
"""128 + SIGINT, as shells say it."""


@contextmanager
def loading() -> Iterator[None]:
    """Modules are loaded: Ctrl-C ends the process at once.

    A KeyboardInterrupt that is raised within an import can be swallowed by what is being imported
    (extension modules clear errors while they start). Nothing is under way then that needs an
    orderly end.
    """
    with _on_ctrl_c(_end):
        yield


@contextmanager
def waiting() -> Iterator[None]:
    """A task reads a file or pipe itself: Ctrl-C ends the read.

    The event loop's own handler cancels the task, which does not help one that never comes back to
    the loop: a pipe may have nothing to say for hours.
    """
    import asyncio  # noqa: PLC0415 - the first lines of the program import this module

    with _on_ctrl_c(signal.default_int_handler):
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        yield


def _end(_number: int, _frame: object) -> NoReturn:
    os._exit(EXIT_CODE)


@contextmanager
def _on_ctrl_c(handler: signal._HANDLER) -> Iterator[None]:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background job: Ctrl-C is meant for others.
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
