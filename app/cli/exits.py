"""Exit codes, and which error ends with which."""

from __future__ import annotations

from enum import IntEnum

from app.cli import interrupts
from app.errors import Code, Problem
from sdstore.client.errors import StoreError
from sdstore.sync.report import SyncOutcome


class Exit(IntEnum):
    """What the shell is told; docs/cli.md explains each."""

    DONE = 0
    NO = 1
    USAGE = 2
    PARTIAL = 3
    REFUSED = 4
    PEER_FAULT = 5
    LOCAL_FAULT = 6
    INTERRUPTED = interrupts.EXIT_CODE


class CliError(Exception):
    """Ends a verb with one line on stderr. `code` is a stable word, as in problem documents."""

    def __init__(self, exit_code: Exit, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.exit_code = exit_code


_OF_SYNC = {
    SyncOutcome.IN_SYNC: Exit.DONE,
    SyncOutcome.DIFFERENT: Exit.NO,
    SyncOutcome.PARTIAL: Exit.PARTIAL,
    SyncOutcome.REFUSED: Exit.REFUSED,
    SyncOutcome.PEER_FAULT: Exit.PEER_FAULT,
    SyncOutcome.LOCAL_FAULT: Exit.LOCAL_FAULT,
}
_OF_CODE: dict[str, Exit] = {
    Code.NOT_FOUND: Exit.NO,
    Code.PEER_UNREACHABLE: Exit.PEER_FAULT,
    Code.PEER_MISBEHAVED: Exit.PEER_FAULT,
    Code.RECON_BUDGET_SPENT: Exit.PARTIAL,
    Code.SYNC_BUSY: Exit.PARTIAL,
    Code.OVERLOADED: Exit.PARTIAL,
    # The node answers, but not as a node does: what is behind --node is at fault, not the caller.
    "malformed_reply": Exit.PEER_FAULT,
    "reply_too_large": Exit.PEER_FAULT,
    "digest_mismatch": Exit.PEER_FAULT,
}


def exit_of_sync(outcome: str) -> Exit:
    """The exit code of a session's outcome."""
    return _OF_SYNC[SyncOutcome(outcome)]


def exit_of(error: StoreError | Problem) -> Exit:
    """The exit code of a refusal: by its code, else by its status (none: nobody answered)."""
    if error.code in _OF_CODE:
        return _OF_CODE[error.code]
    return Exit.REFUSED if 400 <= error.status < 500 else Exit.LOCAL_FAULT
