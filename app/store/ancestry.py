"""Ancestors: what comes causally before some messages of a channel.

The walk goes from the heads back in time: of all known causes, it takes the last one in log order
next. Clocks grow from cause to effect, so the next page needs only the place where this page ends and
the causes that still wait. If clocks contradict the order of causes, a page can repeat a message of an
earlier one, once.

On a server each look-up costs a round trip, and a chain is a thousand look-ups deep. So the walk
reads the log ahead in windows that grow as long as they are useful, and looks up all IDs that a window
names at once. It looks up the rest when it gets there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple

from app.entries import Entry
from app.errors import Code, Problem
from app.server.limits import Limits
from app.store.channelpages import ChannelInfo, Channels
from app.store.database import Database
from app.store.entryrows import (
    EntryRow,
    FrameReader,
    Position,
    entries_by_seq,
    entries_numbered,
    entry_rows,
    fitting_count,
)
from app.store.gaps import Gaps
from app.store.keys import Keys
from sdstore.sds.codec import decode
from sdstore.sds.model import LAMPORT_MAX, LAMPORT_MIN

WINDOW_MIN, WINDOW_START, WINDOW_MAX = 1, 16, 256
"""Entries read ahead; the largest takes some 5 ms to decode, which other callers wait for."""

LogKey = tuple[int, bytes, bytes]
"""Lamport timestamp, message ID as UTF-8, digest: compares as the log order does."""

_SEQ_MAX = 2**63 - 1
_BEHIND_ALL: LogKey = (2**63 - 1, b"\xff", b"")


@dataclass(frozen=True, slots=True)
class AncestorPage:
    """Part of a causal closure, every message after its causes; `next` is None at the end.

    `missing`: IDs that the closure names, but whose messages are unknown, cannot be read (`left_out` has
    the digests of those), or did not fit into `next`: the causes of these are not followed. `met_as_sync`:
    those of them that are known IDs of sync messages.
    """

    entries: list[Entry]
    missing: list[str]
    next: Position | None
    left_out: tuple[bytes, ...] = ()
    met_as_sync: tuple[str, ...] = ()


class _Latest:
    """A waiting entry; the heap gives the last one in log order first."""

    __slots__ = ("key", "row")

    def __init__(self, row: EntryRow) -> None:
        self.key = row.lamport, row.message_id.encode(), row.digest
        self.row = row

    def __lt__(self, other: _Latest) -> bool:
        return self.key > other.key


class _Loaded(NamedTuple):
    entry: Entry
    causes: tuple[str, ...]


@dataclass(slots=True)
class _Walk:
    """One page of a walk.

    `seen`: IDs that are done, among them heads and known ones. `until`: the earliest log position taken.
    `late`: entries taken although they come after it in the log. `absent`: unknown IDs. `missing`: known
    IDs whose causes this walk does not follow. `left_out`: digests of lost content.
    """

    channel: ChannelInfo
    heads: frozenset[str]
    seen: set[str]
    limits: Limits
    until: LogKey = _BEHIND_ALL
    late: set[int] = field(default_factory=set)
    waiting: list[_Latest] = field(default_factory=list)
    taken: list[_Loaded] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    left_out: list[bytes] = field(default_factory=list)
    # Entries that were read ahead, and the rows that their IDs lead to.
    loaded: dict[int, _Loaded] = field(default_factory=dict)
    named: dict[str, list[EntryRow]] = field(default_factory=dict)
    window: int = WINDOW_START // 2
    used: int = WINDOW_START

    def follow(self, message_id: str) -> None:
        """Let the entries under an ID wait, unless an earlier page took them."""
        rows = self.named.pop(message_id, None)
        if not rows:
            self.absent.add(message_id)
            return
        for each in map(_Latest, rows):
            if each.key < self.until:
                heappush(self.waiting, each)
            elif each.row.seq not in self.late:
                self._follow_late(each)

    def _follow_late(self, each: _Latest) -> None:
        if len(self.late) >= self.limits.ancestors_frontier_max:
            self.missing.add(each.row.message_id)
            return
        self.late.add(each.row.seq)
        heappush(self.waiting, each)

    def take(self, each: _Latest, loaded: _Loaded) -> None:
        """Add an entry to the page, unless it is a head, and go on to its causes."""
        if each.row.message_id not in self.heads:
            self.taken.append(loaded)
            self.until = min(self.until, each.key)
        for message_id in loaded.causes:
            if message_id not in self.seen:
                self.seen.add(message_id)
                self.follow(message_id)

    def is_spent(self) -> bool:
        """Whether the next message could name more IDs than the bounds allow."""
        limits = self.limits
        return (
            len(self.waiting) + limits.history_entries_max > limits.ancestors_frontier_max
            or len(self.seen) + limits.history_entries_max > limits.ancestors_visited_max
        )

    def next(self) -> Position | None:
        """The place of the next page. Waiting entries that do not fit into it become missing."""
        self.waiting.sort()
        most = self.limits.ancestors_frontier_max
        self.missing.update(each.row.message_id for each in self.waiting[most:])
        if not self.waiting:
            return None
        lamport, message_id, digest = self.until
        waiting = _packed(each.row.seq for each in self.waiting[:most])
        place = message_id.decode(errors="replace")
        return lamport, place, digest.hex(), waiting, _packed(self.late)


class Ancestors:
    """Causal closures, page by page."""

    def __init__(
        self,
        database: Database,
        frame_reader: FrameReader,
        keys: Keys,
        channels: Channels,
        gaps: Gaps,
        limits: Limits,
    ) -> None:
        self._database = database
        self._sql = database.sql
        self._frames = frame_reader
        self._keys = keys
        self._channels = channels
        self._gaps = gaps
        self._limits = limits

    async def page(
        self,
        channel_id: str,
        heads: Sequence[str],
        known: Sequence[str] = (),
        *,
        limit: int,
        bytes_max: int,
        after: Position | None = None,
    ) -> AncestorPage:
        """Everything before `heads`, not passing through `known`, the latest first.

        Within a page every message comes after its causes. An empty page is not always the last.
        """
        starts = frozenset(heads) - frozenset(known)
        channel = await self._channels.named(channel_id)
        if channel is None:
            missing = sorted(starts, key=str.encode)
            return AncestorPage([], missing, None, (), await self._met(channel_id, missing))
        walk = _Walk(channel, starts, {*heads, *known}, self._limits)
        if after is None:
            await self._look_up(walk, sorted(starts))
            for message_id in starts:
                walk.follow(message_id)
        else:
            await self._resume(walk, after)
        await self._take(walk, limit, bytes_max)
        after = walk.next()
        missing = sorted(walk.missing | walk.absent, key=str.encode)
        entries = _in_causal_order(walk.taken)
        met = await self._met(channel_id, missing)
        return AncestorPage(entries, missing, after, tuple(walk.left_out), met)

    async def _met(self, channel_id: str, missing: Sequence[str]) -> tuple[str, ...]:
        met = await self._gaps.met(channel_id, missing)
        return tuple(each for each in missing if each in met)

    async def _take(self, walk: _Walk, limit: int, bytes_max: int) -> None:
        room, is_first = bytes_max, True
        while walk.waiting and len(walk.taken) < limit:
            row = walk.waiting[0].row
            if not is_first and (row.frame_bytes > room or walk.is_spent()):
                return
            is_first = False
            if row.seq not in walk.loaded:
                await self._read_ahead(walk, row, bytes_max)
            latest = heappop(walk.waiting)
            room -= row.frame_bytes
            walk.used += 1
            loaded = walk.loaded.pop(row.seq, None)
            if loaded is None:
                # Its content is lost, and with it the names of its causes.
                walk.missing.add(row.message_id)
                walk.left_out.append(row.digest)
            else:
                walk.take(latest, loaded)

    # ---- reading

    async def _read_ahead(self, walk: _Walk, row: EntryRow, bytes_max: int) -> None:
        """Load an entry and those before it in the log, and look up all IDs that they name."""
        is_useful = 2 * walk.used >= walk.window
        walk.window = min(2 * walk.window, WINDOW_MAX) if is_useful else WINDOW_MIN
        walk.used = 0
        place = (row.lamport, row.message_id, row.digest.hex())
        lamports = (LAMPORT_MIN, LAMPORT_MAX)
        before = await self._channels.log_rows(
            walk.channel.channel_id, None, place, lamports, walk.window - 1, is_descending=True
        )
        rows = [row, *before]
        walk.loaded = {each.seq: walk.loaded[each.seq] for each in rows if each.seq in walk.loaded}
        new = [each for each in rows if each.seq not in walk.loaded]
        entries = await self._frames.entries(new[: fitting_count(new, bytes_max)])
        walk.loaded.update((entry.seq, _Loaded(entry, _causes_of(entry))) for entry in entries)
        causes = [message_id for each in walk.loaded.values() for message_id in each.causes]
        walk.named = {each: walk.named[each] for each in causes if each in walk.named}
        await self._look_up(walk, [each for each in causes if each not in walk.seen])

    async def _look_up(self, walk: _Walk, message_ids: Iterable[str]) -> None:
        """Find the rows under IDs."""
        unknown = [each for each in dict.fromkeys(message_ids) if each not in walk.named]
        number = walk.channel.channel_no
        asked = [(self._keys.of_text(each), each, number) for each in unknown]
        walk.named.update((each, []) for each in unknown)
        query = entries_numbered(self._sql, self._limits.variants_listed_max)
        for which, *columns in await self._database.each(query, asked):
            walk.named[unknown[which]].append(EntryRow(*columns))

    async def _resume(self, walk: _Walk, after: Position) -> None:
        lamport, message_id, digest, waiting, late = map(str, after)
        try:
            walk.until = int(lamport), message_id.encode(), bytes.fromhex(digest)
        except ValueError:
            raise _not_ours() from None
        walk.late = set(_unpacked(late))
        asked = _unpacked(waiting)[: self._limits.ancestors_frontier_max]
        rows = entry_rows(await self._database.among(entries_by_seq(self._sql), asked))
        # Anybody can write a cursor: it must not lead out of its channel.
        here = [row for row in rows if row.channel_id == walk.channel.channel_id]
        walk.waiting = list(map(_Latest, here))
        heapify(walk.waiting)
        walk.seen.update(row.message_id for row in here)


def _causes_of(entry: Entry) -> tuple[str, ...]:
    message, _ = decode(entry.frame)
    return tuple(dict.fromkeys(told.message_id for told in message.causal_history))


def _in_causal_order(taken: Sequence[_Loaded]) -> list[Entry]:
    in_log_order = sorted(taken, key=lambda each: _log_key(each.entry))
    numbers: dict[str, list[int]] = {}
    for number, each in enumerate(in_log_order):
        numbers.setdefault(each.entry.message_id, []).append(number)
    causes = [
        [number for message_id in each.causes for number in numbers.get(message_id, ())]
        for each in in_log_order
    ]
    return [in_log_order[number].entry for number in causal_order(causes)]


def _log_key(entry: Entry) -> LogKey:
    return entry.lamport_timestamp, entry.message_id.encode(), entry.digest


def _packed(seqs: Iterable[int]) -> str:
    """Sequence numbers as differences: most fit into three digits."""
    ordered = sorted(seqs)
    return ".".join(f"{seq - before:x}" for before, seq in pairwise([0, *ordered]))


def _unpacked(text: str) -> list[int]:
    """The inverse of `_packed`. Raises `Problem` INVALID_CURSOR for other text."""
    try:
        seqs = list(accumulate(int(part, 16) for part in text.split(".") if part))
    except ValueError:
        seqs = [-1]
    if seqs and not 0 <= min(seqs) <= max(seqs) <= _SEQ_MAX:
        raise _not_ours()
    return seqs


def _not_ours() -> Problem:
    return Problem(Code.INVALID_CURSOR, "this token was not made by a store")


# ---- causal order


def causal_order(causes: Sequence[Sequence[int]]) -> list[int]:
    """The numbers 0 … n-1, each after its `causes`; of the candidates the lowest comes next.

    IDs are free strings, so causes can form cycles. A cycle is walked from its lowest number, and the
    reference that closes it is ignored. References outside cycles always count.
    """
    kept = _without_cycles(causes)
    effects: list[list[int]] = [[] for _ in causes]
    for number, its_causes in enumerate(kept):
        for cause in its_causes:
            effects[cause].append(number)
    open_causes = list(map(len, kept))
    ready = [number for number, count in enumerate(open_causes) if not count]
    ordered: list[int] = []
    while ready:
        cause = heappop(ready)
        ordered.append(cause)
        for number in effects[cause]:
            open_causes[number] -= 1
            if not open_causes[number]:
                heappush(ready, number)
    return ordered


def _without_cycles(causes: Sequence[Sequence[int]]) -> list[list[int]]:
    """The causes of each number, without those that close a cycle."""
    kept: list[list[int]] = [[] for _ in causes]
    is_walked = [False] * len(causes)
    for root in range(len(causes)):
        if is_walked[root]:
            continue
        is_walked[root] = True
        path: dict[int, Iterator[int]] = {root: iter(causes[root])}
        while path:
            number, rest = next(reversed(path.items()))
            cause = next(rest, None)
            if cause is None:
                del path[number]
            elif cause not in path:
                kept[number].append(cause)
                if not is_walked[cause]:
                    is_walked[cause] = True
                    path[cause] = iter(causes[cause])
    return kept
