"""Checks a store: the database's own check, every message and digest, and roots against the index."""

from __future__ import annotations

import logging
import shlex
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from app import roots
from app.cli.database import SQLITE_PREFIX
from app.cli.output import counted
from app.entries import Entry, group_of_entries
from app.errors import Problem
from app.recon.index import NodeIndex
from app.server.limits import DEFAULT_LIMITS
from app.server.settings import Settings
from app.store.channelpages import ChannelInfo
from app.store.database import StoreError, chunks
from app.store.entryrows import MARKS_REMEMBERED_MAX, ContentState, Position
from app.store.integrity import check_structure, message_or_fault
from app.store.recovery import Published, copy_rows, publish_rows
from app.store.sqlite import replace_file, writing_alone
from app.store.store import Store
from recon.agreement import SessionKey
from recon.elements import U8, U64, WHOLE, order_of_lamport
from recon.view import View
from sdstore.sds.model import Message

CHANNELS_PER_READ = 1_000
ENTRIES_PER_READ = 1_000
NAMES_REMEMBERED_MAX = 65_536  # names of a channel's histories that were looked up: some 10 MiB
FINDINGS_MAX = 1_000  # of a store that is damaged all over, not every message is listed
DAMAGED_SUFFIX = ".damaged"  # of the old file, if not all of it is in the new one
_ANY_KEY = SessionKey(bytes(16))


@dataclass(slots=True)
class Findings:
    """What was checked, what is wrong with it, what to do about that, and what was not checked.

    `without_filter` are sequence numbers of messages whose bloom filters cannot be read.
    `is_complete`: every channel was read, so that `channels` and `entries` count the whole store.
    """

    channels: int = 0
    entries: int = 0
    damages: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    lost_count: int = 0
    without_filter: list[int] = field(default_factory=list)
    is_complete: bool = False

    @property
    def mended_by_node_count(self) -> int:
        """How many of the damages a running node mends: lost content, and frames whose filters are gone."""
        return self.lost_count + len(self.without_filter)

    def add(self, text: str) -> None:
        """Note a damage."""
        if len(self.damages) < FINDINGS_MAX:
            self.damages.append(text)


async def check_database(settings: Settings, findings: Findings) -> bool:
    """Run the database's own check; False if it finds damage, after which messages are not read."""
    structure = await check_structure(settings.database_url)
    findings.unchecked += structure.unchecked
    for damage in structure.damages:
        findings.add(damage)
    if structure.damages:
        findings.unchecked.append("messages were not read, because indexes or tables are damaged")
    return not structure.damages


def advise(settings: Settings, findings: Findings) -> None:
    """Add what to do about the findings."""
    if findings.lost_count:
        findings.advice.append(
            "lost content comes back with a sync with a node that has it, an import, the restore of a "
            "snapshot, or when the messages are published again"
        )
    if len(findings.damages) > findings.mended_by_node_count:
        database = settings.shown_database_url
        findings.advice.append(
            f"stop the node, then run: sdstore reindex --database {shlex.quote(database)}"
        )
        findings.advice.append(
            "if that is refused, restore a backup or a snapshot, or let an empty store fetch "
            "everything from a peer: serve --data-dir NEW --peer URL"
        )


async def check_store(
    store: Store, findings: Findings, *, deep: bool, tick: Callable[[int], None]
) -> None:
    """Compare channels with the index; deep: read and hash every message too.

    Others may publish meanwhile. Counts are those of one snapshot, and messages that arrive after it
    are left to the next check. `tick` is called with the number of entries that were done since the
    last call.
    """
    async with store.snapshot() as frozen:
        last_seq, _ = await frozen.arrivals.watermark()
        index = NodeIndex(frozen, DEFAULT_LIMITS)
        await index.catch_up()
        async for channel in channels_of(frozen):
            findings.channels += 1
            findings.entries += channel.count
            _check_channel(index, channel, findings)
            if not deep:
                tick(channel.count)
        findings.lost_count = await frozen.frames.lost_count()
    if deep:
        await _check_content(store, index, last_seq, findings, tick)
    elif findings.lost_count:
        messages = counted(findings.lost_count, "message", "messages")
        findings.add(f"the content of {messages} is lost: check --deep names them")
    findings.is_complete = True


async def _check_content(
    store: Store,
    index: NodeIndex,
    last_seq: int,
    findings: Findings,
    tick: Callable[[int], None],
) -> None:
    """Read every message up to `last_seq`, and every row that holds a key."""
    lost: set[int] = set()
    async for channel in channels_of(store):
        await _check_messages(store, index, channel, last_seq, findings, lost, tick)
    findings.lost_count = len(lost)
    marked = {each.seq for each in await store.frames.lost_elements(MARKS_REMEMBERED_MAX)}
    _mark_lost(store, sorted(lost | marked | {*findings.without_filter}), findings)
    async for fault in store.row_check.faults():
        findings.add(fault)


def _mark_lost(store: Store, seqs: Sequence[int], findings: Findings) -> None:
    """Mark lost content in the database, and unmark content that is whole again."""
    if not seqs:
        return
    try:
        store.begin_writing()
        for part in chunks(seqs, ENTRIES_PER_READ):
            store.writer.recheck(part)
    except (StoreError, Problem) as error:
        findings.unchecked.append(
            f"lost content was not marked ({error}); a running node marks what it reads, and reads every "
            "frame once a day"
        )


async def channels_of(store: Store) -> AsyncIterator[ChannelInfo]:
    """Every channel of a store, by name."""
    after: str | None = None
    while found := await store.channels.after(after, CHANNELS_PER_READ):
        for channel in found:
            yield channel
        after = found[-1].channel_id


def _elements_of(index: NodeIndex, channel: ChannelInfo) -> tuple[U64, U8]:
    """Orders u64[n] and digests u8[n, 32] of a channel by the index."""
    view = View(index.elements, _ANY_KEY, frozenset((group_of_entries(channel.channel_no),)))
    return view.elements(WHOLE)


def _check_channel(index: NodeIndex, channel: ChannelInfo, findings: Findings) -> None:
    """Compare the count and the ends of a channel's row with the index."""
    orders, _ = _elements_of(index, channel)
    if len(orders) != channel.count:
        findings.add(
            f"channel {channel.channel_id!r}: {channel.count} messages by its row, "
            f"{len(orders)} in the index"
        )
    elif channel.count:
        ends = (order_of_lamport(channel.lamport_first), order_of_lamport(channel.lamport_last))
        if (int(orders.min()), int(orders.max())) != ends:
            findings.add(
                f"channel {channel.channel_id!r}: first or last Lamport timestamp is wrong"
            )


async def _check_messages(
    store: Store,
    index: NodeIndex,
    channel: ChannelInfo,
    last_seq: int,
    findings: Findings,
    lost: set[int],
    tick: Callable[[int], None],
) -> None:
    """Read the channel's log and check each entry against its frame, the order, and the root of all.

    Every message that a history names is stored or listed as missing.

    Entries above `last_seq` arrived after the index was read and are passed over. The sequence numbers
    of entries that cannot be read are added to `lost`.
    """
    _, ids = _elements_of(index, channel)
    digests: list[bytes] = []
    last: tuple[int, bytes, bytes] | None = None
    after: Position | None = None
    recorded: set[str] = set()
    while True:
        # Rows of messages change only when they are mended, so each page may be of another moment. One
        # snapshot for the whole log would keep the database's own log growing until the end.
        async with store.snapshot() as frozen:
            page = await frozen.channels.page(
                channel.channel_id,
                after=after,
                limit=ENTRIES_PER_READ,
                bytes_max=DEFAULT_LIMITS.reply_bytes_max,
            )
            sizes = await frozen.entries.frame_sizes([entry.digest for entry in page.entries])
            decoded = {entry.seq: message_or_fault(entry) for entry in page.entries}
            unrecorded = await _unrecorded(frozen, channel, decoded.values(), recorded)
        for name in unrecorded:
            findings.add(
                f"channel {channel.channel_id!r}: a history names {name!r}, which is neither stored nor "
                "listed as missing"
            )
        entries = [entry for entry in page.entries if entry.seq <= last_seq]
        left_out = [each for each in page.left_out if each.seq <= last_seq]
        for gone in left_out:
            if gone.state is ContentState.RETIRED:
                continue
            lost.add(gone.seq)
            digest = gone.digest.hex()
            findings.add(f"message {gone.message_id!r} ({digest}): its content is lost")
        for entry in entries:
            _check_length(entry, sizes.get(entry.digest), findings)
            if isinstance(fault := decoded[entry.seq], str):
                findings.add(f"message {entry.message_id!r} ({entry.digest.hex()}): {fault}")
            position = (entry.lamport_timestamp, entry.message_id.encode(), entry.digest)
            if last is not None and position <= last:
                findings.add(f"channel {channel.channel_id!r}: the log is out of order")
            last = position
        digests += [entry.digest for entry in entries] + [gone.digest for gone in left_out]
        tick(len(entries) + len(left_out))
        has_all = len(digests) >= len(ids) and not entries and not left_out
        if page.next is None or has_all:
            break
        after = page.next
    read = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)
    if len(read) != len(ids) or roots.root(read) != roots.root(ids):
        findings.add(f"channel {channel.channel_id!r}: messages and index have different roots")


def _check_length(entry: Entry, row_bytes: int | None, findings: Findings) -> None:
    if row_bytes == len(entry.frame):
        return
    if entry.filter_is_lost:
        # It is rechecked like lost content: from then on the row is that of the frame without it.
        findings.without_filter.append(entry.seq)
        digest = entry.digest.hex()
        findings.add(f"message {entry.message_id!r} ({digest}): its bloom filter cannot be read")
    else:
        findings.add(f"message {entry.message_id!r}: its row has another length")


async def _unrecorded(
    frozen: Store, channel: ChannelInfo, read: Iterable[Message | str], recorded: set[str]
) -> list[str]:
    """IDs in the histories of a channel's messages that are neither stored nor listed as missing.

    Histories overlap with those shortly before them in the log: `recorded` are IDs that were looked up.
    """
    messages = (each for each in read if isinstance(each, Message))
    named = {told.message_id: None for each in messages for told in each.causal_history}
    names = [each for each in named if each not in recorded]
    if len(recorded) > NAMES_REMEMBERED_MAX:
        recorded.clear()
    recorded.update(names)
    return await frozen.gaps.unrecorded(channel.channel_no, names)


# ---- rebuilding a SQLite file


class Rebuilt(NamedTuple):
    """What `publish_rows` made of a file whose tables are damaged, and where the old file is."""

    published: Published
    old_file: Path


async def rebuild_sqlite(settings: Settings) -> Rebuilt | None:
    """Replace a SQLite file by one with new indexes; None if it has every row of the old one.

    If more than indexes is damaged, the new file has the messages that can be read and match their digests
    (`app.store.recovery`). Raises UnusableFileError, StoreBusyError if the store has a writer, `Problem` if
    it has a reader.
    """
    path = Path(settings.database_url.removeprefix(SQLITE_PREFIX))
    with writing_alone(path), _scratch(path) as folder:
        copy, new = folder / "copy.db", folder / "new.db"
        logging.disable(logging.ERROR)  # each frame that cannot be read would be a line
        try:
            if not copy_rows(path, copy) and await _is_sound(copy):
                replace_file(path, copy)
                return None
            published = await publish_rows(copy, new, DEFAULT_LIMITS)
        finally:
            logging.disable(logging.NOTSET)
        old_file = path.with_name(f"{path.name}{DAMAGED_SUFFIX}")
        replace_file(path, new, old_file)
        return Rebuilt(published, old_file)


async def _is_sound(copy: Path) -> bool:
    """Whether a store has no damage but lost content, which a sync mends."""
    findings = Findings()
    try:
        store = await Store.open(f"{SQLITE_PREFIX}{copy}", DEFAULT_LIMITS)
        try:
            await check_store(store, findings, deep=True, tick=lambda _: None)
        finally:
            await store.close()
    except Exception:  # noqa: BLE001 - damaged rows fail in every way that values can
        return False
    return findings.mended_by_node_count == len(findings.damages)


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """A folder beside a file, on the same disk, that is empty at the start and gone at the end."""
    folder = path.with_name(f"{path.name}.rebuilding")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
