"""Ctrl-C where Python alone would lose it or handle it late."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

EXIT_CODE = 130
"""128 + SIGINT, as in shells."""


@contextmanager
def loading() -> Iterator[None]:
    """While modules are imported, Ctrl-C ends the process at once.

    An import can swallow a KeyboardInterrupt (extension modules clear errors while they start), and
    there is nothing yet that needs an orderly end.
    """
    with _on_ctrl_c(_end):
        yield


@contextmanager
def waiting() -> Iterator[None]:
    """While a task itself reads a file or a pipe, Ctrl-C ends the read.

    The event loop's own handler cancels the task. That does not help a task that is inside a read: a
    pipe may be silent for hours.
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
        # A background job of a shell ignores Ctrl-C, which is meant for another process.
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
