"""A file of one channel's messages as a log that a backfill completes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from app.cli.access import access
from app.cli.files import (
    ExistingMessages,
    FileFormat,
    continued,
    is_stdout,
    open_input,
    record_of,
    write_through,
)
from app.cli.options import PATIENCE
from app.cli.output import CliError, Exit
from app.server.limits import DEFAULT_LIMITS
from sdstore.client import AsyncStoreClient
from sdstore.participant.backfill import Fetched
from sdstore.sds.codec import decode
from sdstore.sds.digest import claim_id, entry_digest
from sdstore.sds.log import ELEMENTS_PER_PIECE_MAX, Noted, Staged
from sdstore.sync.report import Progress, SyncReport

HINTS_MAX = DEFAULT_LIMITS.hints_per_publish_max
"""Of one message: an import takes no more."""

_SQLITE_BEGINNING = b"SQLite format 3\x00"


async def backfill_file(
    node: str,
    channel_id: str,
    file: Path,
    file_format: FileFormat,
    changed: Callable[[Progress], None],
) -> SyncReport:
    """Append what the node has of the channel and the file lacks. Nothing is sent.

    Raises CliError if the file is none that a backfill can continue; it is not changed then.
    """
    _require_a_file_of_messages(file)
    existing = ExistingMessages(file, file_format)
    log = FileLog(existing, file_format, channel_id)
    with continued(existing) as target:
        log.target = target
        async with AsyncStoreClient(
            node, token=access.token(node), tls=access.tls(), options=PATIENCE
        ) as client:
            return await client.backfill(channel_id, log, changed)


class FileLog:
    """A `sdstore.sds.log.BackfillLog` that is appended to, and from which nothing is sent.

    The file keeps every message with its hints, in NDJSON. Other names, such as those of claims that
    come without their message, have no place in it.
    """

    keeps_variants = True

    def __init__(
        self, existing: ExistingMessages, file_format: FileFormat, channel_id: str
    ) -> None:
        self.target: IO[bytes] | None = None
        self._format = file_format
        self._pieces = list(_pieces(existing, channel_id))

    def elements(self) -> Iterator[tuple[list[int], bytes]]:
        """See `BackfillLog`: what the file held when it was opened."""
        return iter(self._pieces)

    @property
    def noted_count(self) -> int:
        """See `BackfillLog`: names have no place in the file."""
        return 0

    def digests(self, _message_ids: Sequence[str]) -> dict[str, bytes]:
        """Nothing arrives in the file on another way."""
        return {}

    def frames(self, _digests: Sequence[bytes]) -> dict[bytes, tuple[bytes, bytes]]:
        """Nothing is sent."""
        return {}

    def stage(self, messages: Sequence[Staged], _noted: Sequence[Noted]) -> None:
        """See `BackfillLog`."""
        if self.target is None or not messages:
            return
        for each in messages:
            hints = each.retrieval_hints[:HINTS_MAX] if isinstance(each, Fetched) else ()
            self.target.write(record_of(each.frame, hints, self._format))
        write_through(self.target)


def _require_a_file_of_messages(file: Path) -> None:
    """Raises CliError for a named pipe, whose messages cannot be read again, for a database, and where
    no file can be."""
    if is_stdout(file):
        return
    if file.is_dir():
        detail = f"{str(file)!r} is a directory: give a file, or - for stdout"
        raise CliError(Exit.USAGE, "invalid_parameter", detail)
    if not file.parent.is_dir():
        detail = (
            f"the directory {str(file.parent)!r} does not exist: create it, or give another file"
        )
        raise CliError(Exit.USAGE, "invalid_parameter", detail)
    if file.is_fifo():
        detail = f"{file} is a named pipe: give a file, or - for stdout"
        raise CliError(Exit.USAGE, "invalid_parameter", detail)
    if not file.is_file():
        return
    with open_input(file) as stream:
        is_database = stream.read(len(_SQLITE_BEGINNING)) == _SQLITE_BEGINNING
    if is_database:
        detail = f"{file} is an SQLite database, such as a participant's: give a file of messages"
        raise CliError(Exit.USAGE, "invalid_parameter", detail)


def _pieces(existing: ExistingMessages, channel_id: str) -> Iterator[tuple[list[int], bytes]]:
    """The elements of a file, as `BackfillLog.elements` returns them.

    Raises CliError for a message of another channel.
    """
    lamports: list[int] = []
    ids: list[bytes] = []
    for item in existing:
        message, _ = decode(item.frame)
        if message.channel_id != channel_id:
            detail = (
                f"{existing.file} holds messages of channel {message.channel_id!r}: "
                f"give another file for channel {channel_id!r}"
            )
            raise CliError(Exit.REFUSED, "foreign_file", detail)
        if message.lamport_timestamp is None:
            continue
        names = _names(entry_digest(message), item.hints)
        if len(ids) + len(names) > ELEMENTS_PER_PIECE_MAX:
            yield lamports, b"".join(ids)
            lamports, ids = [], []
        lamports += [message.lamport_timestamp] * len(names)
        ids += names
    yield lamports, b"".join(ids)


def _names(digest: bytes, hints: Iterable[bytes]) -> list[bytes]:
    """A message and the claims on it."""
    return [digest, *(claim_id(digest, hint) for hint in hints)]
