"""Messages between files and stores: import, which resumes, export, and a file that a backfill completes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from blake3 import blake3

from app.cli.checking import channels_of
from app.cli.database import existing_store, open_door
from app.cli.files import (
    BadItem,
    ExistingMessages,
    FileFormat,
    MessageFile,
    continued,
    format_of_input,
    is_stdout,
    open_input,
    record_of,
    write_through,
)
from app.cli.main import waiting
from app.cli.output import PATIENCE, CliError, Exit, access
from app.entries import NOTHING_ARRIVED, Entry, Outcome, Token, Watermark
from app.errors import Code, Problem
from app.ingest.door import Door
from app.ingest.prepare import Publication
from app.server.limits import DEFAULT_LIMITS
from app.server.settings import Settings
from app.store.entryrows import ContentState
from app.store.store import Store
from sdstore.client import AsyncStoreClient
from sdstore.participant.backfill import Fetched
from sdstore.sds.codec import decode
from sdstore.sds.log import ELEMENTS_PER_PIECE_MAX, Noted, Staged
from sdstore.sds.model import Message, claim_id, entry_digest
from sdstore.sync.report import Progress, SyncReport

if TYPE_CHECKING:
    from app.cli.files import Stream


# --- import --------------------------------------------------------------------------------------

BATCH_ITEMS = 2_000
BATCH_BYTES = 8 << 20
BATCHES_IN_FLIGHT = 3  # one being written, one waiting for the writer, one being read
PATIENCE_S = 0.2

_Item = Publication | BadItem


@dataclass(slots=True)
class ImportProgress:
    """How far a file has been imported. It is kept in the data directory until the import ends.

    The import begins anew if `identity` differs, because the file was changed, is read in another
    format or goes into another database, and if the database no longer has the history that it had at
    `arrived`, when the progress was saved.
    """

    path: Path | None = None
    identity: list[Any] = field(default_factory=list)
    position: int = 0
    items_count: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    arrived: Watermark = NOTHING_ARRIVED

    @classmethod
    def of(
        cls,
        data_dir: Path,
        file: Path,
        file_format: FileFormat,
        database_id: str,
        *,
        is_fresh: bool,
    ) -> ImportProgress:
        """The saved progress of a file, or a new one. The progress of a pipe is not saved."""
        if not file.is_file():
            return cls()
        whole = file.resolve()
        facts = whole.stat()
        identity = [str(whole), facts.st_size, facts.st_mtime_ns, file_format, database_id]
        name = blake3(str(whole).encode()).hexdigest(length=16)
        path = data_dir / "imports" / f"{name}.json"
        try:
            known = {} if is_fresh else json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = {}
        if known.get("identity") != identity or "arrived" not in known:
            return cls(path, identity)
        arrived = Watermark(*(Token(*each) for each in known["arrived"]))
        return cls(
            path, identity, known["position"], known["items_count"], known["counts"], arrived
        )

    def begin_anew(self) -> ImportProgress:
        """The progress of an import from the beginning of the same file."""
        return ImportProgress(self.path, self.identity)

    def save(self) -> None:
        """Save it; the saved file is whole at every moment."""
        if self.path is None:
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = self.path.with_suffix(".new")
        known = {name: value for name, value in asdict(self).items() if name != "path"}
        draft.write_text(json.dumps(known), encoding="utf-8")
        draft.replace(self.path)

    def forget(self) -> None:
        """Delete what was saved: the file is imported."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


Began = Callable[[ImportProgress], None]
Told = Callable[[ImportProgress, list[dict[str, Any]]], None]


@dataclass(slots=True)
class _Batch:
    first_number: int
    items: list[_Item]
    position: int
    outcomes: asyncio.Task[list[Outcome | Problem]]


class Import:
    """One import of a file, or of a pipe."""

    def __init__(self, stream: Stream, file: Path, file_format: FileFormat) -> None:
        self._stream = stream
        self._file = file
        self._format = file_format
        self._progress = ImportProgress()

    async def run(
        self, settings: Settings, began: Began, tell: Told, *, is_fresh: bool
    ) -> Counter[str]:
        """Import to the end, from where an earlier import was interrupted unless `is_fresh`.

        `began` is called with the place where it begins, `tell` with each batch that is on disk and
        its refusals. Returns the counts of outcomes, with those before the interruption.
        """
        async with open_door(settings) as door:
            with waiting():
                self._format = format_of_input(self._stream, self._file, self._format)
            self._progress = progress = ImportProgress.of(
                settings.data_dir,
                self._file,
                self._format,
                door.store.database_id,
                is_fresh=is_fresh,
            )
            if not await door.store.arrivals.holds(*progress.arrived):
                self._progress = progress = progress.begin_anew()
            began(progress)
            if progress.position:
                self._stream.seek(progress.position)
            under_way: deque[_Batch] = deque()
            for batch in self._batches(door):
                under_way.append(batch)
                if len(under_way) == BATCHES_IN_FLIGHT:
                    await self._finish(door, under_way.popleft(), tell)
            while under_way:
                await self._finish(door, under_way.popleft(), tell)
        progress.forget()
        return Counter(progress.counts)

    def _batches(self, door: Door) -> Iterator[_Batch]:
        file = MessageFile(self._stream, self._format, DEFAULT_LIMITS.frame_bytes_max)
        items = iter(file)
        number = self._progress.items_count + 1
        while batch := _take(items):
            outcomes = asyncio.create_task(_publish(door, batch))
            yield _Batch(number, batch, file.position, outcomes)
            number += len(batch)

    async def _finish(self, door: Door, batch: _Batch, tell: Told) -> None:
        outcomes = iter(await batch.outcomes)
        counts = Counter(self._progress.counts)
        refusals = []
        for number, item in enumerate(batch.items, batch.first_number):
            outcome = item if isinstance(item, BadItem) else next(outcomes)
            if isinstance(outcome, Outcome):
                counts[outcome.kind.value] += 1
                continue
            counts["refused"] += 1
            refusals.append(
                {
                    "item": number,
                    "outcome": "refused",
                    "code": str(outcome.code),
                    "detail": outcome.detail,
                }
            )
        self._progress.counts = dict(counts)
        self._progress.items_count += len(batch.items)
        self._progress.position = batch.position
        self._progress.arrived = await door.store.arrivals.arrived()
        self._progress.save()
        tell(self._progress, refusals)


def _take(items: Iterator[_Item]) -> list[_Item]:
    """The next items, up to a batch."""
    batch: list[_Item] = []
    size = 0
    with waiting():
        for item in items:
            batch.append(item)
            size += len(item.frame) if isinstance(item, Publication) else 0
            if len(batch) == BATCH_ITEMS or size >= BATCH_BYTES:
                break
    return batch


async def _publish(door: Door, items: list[_Item]) -> list[Outcome | Problem]:
    """Outcomes of the readable items. Raises Problem for a fault of the database."""
    publications = [item for item in items if isinstance(item, Publication)]
    while True:
        outcomes = await door.publish_many(publications)
        faults = [each for each in outcomes if isinstance(each, Problem) and each.status >= 500]
        if not faults:
            return outcomes
        if faults[0].code is not Code.OVERLOADED:
            raise faults[0]
        await asyncio.sleep(PATIENCE_S)


# --- export --------------------------------------------------------------------------------------

PAGE_ENTRIES = 1_000
_PAGE_BYTES = DEFAULT_LIMITS.reply_bytes_max
Tell = Callable[[int, int], None]


async def export_to(
    settings: Settings, file: Path, file_format: FileFormat, channels: frozenset[str], tell: Tell
) -> dict[str, Any]:
    """Write what the file lacks; counts of messages before and now, and bytes written.

    `damaged`: digests of the messages, of any channel, that are left out because their frames cannot be
    read. `lacking`: how many older messages the file lacks. `unknown`: which of `channels` the store has
    no messages of; raises CliError if it has none of any, before the file is opened. `tell` is called
    with the sequence number that has been read and the last one.
    """
    async with existing_store(settings) as store:
        wanted_count, unknown = 0, set(channels)
        async for channel in channels_of(store):
            if _is_wanted(channel.channel_id, channels):
                wanted_count += channel.count
                unknown.discard(channel.channel_id)
        if unknown and unknown == channels:
            raise CliError(Exit.NO, Code.NOT_FOUND, no_messages_of(settings, unknown))
        existing = ExistingMessages(file, file_format)
        before = held = seq = 0
        last: Message | None = None
        for item in existing:
            last, _ = decode(item.frame)
            before += 1
            held += _is_wanted(last.channel_id, channels)
        if last is not None:
            seq = await _seq_of(store, last, file)
        total, _ = await store.arrivals.watermark()
        written = messages = 0
        damaged: list[str] = []
        with continued(existing) as target:
            while (
                page := await store.channels.feed(seq, PAGE_ENTRIES, _PAGE_BYTES)
            ).last_seq is not None:
                wanted = [e for e in page.entries if _is_wanted(e.channel_id, channels)]
                written += target.write(await _records(store, wanted, file_format))
                messages += len(wanted)
                damaged += [
                    each.digest.hex()
                    for each in page.left_out
                    if each.state is not ContentState.RETIRED
                ]
                seq = page.last_seq
                tell(seq, total)
        lacking = max(0, wanted_count - held - messages - len(damaged)) if before else 0
        counts = {"messages": messages, "bytes": written, "before": before, "lacking": lacking}
        return {**counts, "damaged": damaged, "unknown": unknown}


def no_messages_of(settings: Settings, channels: Iterable[str]) -> str:
    """What an export says of channels that the store does not know."""
    names = " or ".join(map(repr, sorted(channels)))
    return f"{settings.shown_database_url} has no messages of channel {names}"


def _is_wanted(channel_id: str, channels: frozenset[str]) -> bool:
    return not channels or channel_id in channels


async def _seq_of(store: Store, message: Message, file: Path) -> int:
    """The sequence number of the file's last message. Raises CliError where the store lacks it."""
    entries = await store.entries.by_digest([entry_digest(message)])
    if not entries:
        detail = f"{file} ends with a message that this store does not have"
        raise CliError(Exit.REFUSED, "foreign_file", detail)
    return entries[0].seq


async def _records(store: Store, entries: list[Entry], file_format: FileFormat) -> bytes:
    claims = {}
    if file_format is FileFormat.NDJSON:
        claims = await store.claims.of_entries(entries)
    return b"".join(
        record_of(entry.frame, [c.hint for c in claims.get(entry.digest, ())], file_format)
        for entry in entries
    )


# ---- a file as a log

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
