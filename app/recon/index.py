"""The node's range index: follows the store, and answers queries over all elements of a channel.

The index is a cache of SQL. It reads the store's sequence up to the watermark, so it misses no commit
of any process of this node; it catches up on demand. A restart reads it from a file, which is a cache
too: its stamp names the database and the places in the arrival chains where the index ends. If the
database has another history up to there (another database, a restored backup, a diverged copy), the
file is ignored and the index is read from SQL.

A channel has two groups in the index: one for its entries, one for the hint claims on them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from app import roots
from app.cache import Recent
from app.entries import (
    NOTHING_ARRIVED,
    Token,
    Watermark,
    channel_of_group,
    group_of_claims,
    group_of_entries,
)
from app.errors import Code, Problem
from app.server.limits import Limits
from app.store.store import Store
from recon.agreement import Interest, SessionKey
from recon.checkpoint import read_checkpoint, write_checkpoint
from recon.elements import ALL_ORDERS, U8, U32, WHOLE, Mask, OrderWindow
from recon.index import RangeIndex, Snapshot
from recon.marks import MOMENT_BYTES
from recon.view import View, ViewCache

_log = logging.getLogger(__name__)

ELEMENTS_PER_READ = 8_192
"""Elements of one read: a few milliseconds of the event loop."""

CHANNELS_PER_READ = 1_000
"""Names of one read."""

INTERESTS_MAX = 256
"""Interests whose channels are cached; a miss costs a look at each of its names."""

ROOTS_MAX = 4_096
"""Channels whose roots are cached; a miss costs a sort of the channel's digests."""

SMALL_ELEMENTS_MAX = 65_536
"""Elements of a view that is built on the event loop: hashed in 1 ms."""

VIEW_COST_MIN = 10_000
"""The cost of the smallest view, in hashed elements: 0.3 ms."""

BUILT_AT_ONCE = 1
"""Large views that are built at the same time: more would only share the core and hold memory."""

# Views that are read only for their elements can use any key.
_PLAIN_KEY = SessionKey(bytes(16))

_ROWS_AT_ONCE = 1 << 16  # 2 MiB of IDs
_LANES = 4  # 64-bit words of an ID


RETIRED_OVERLAP_MS = 10_000
"""Retired entries are read again so far back: a transaction can be that late, and so can the clock of a process."""

WITHOUT_COST = 1_000_000
"""The cost of a look for retired entries, in hashed elements: it reads the rows of all that are retired."""

Moments = tuple[bytes, bytes]
"""Two moments, as `sdstore.sync.memory.Cuts` has them. Each: the last entry's number, and this node's clock."""


class RetiredRows:
    """The rows of an index whose elements are retired, with their entries' numbers and the times; 20 bytes each."""

    def __init__(self) -> None:
        self.rows = np.zeros(0, np.uint32)
        self.seqs = self.times_ms = np.zeros(0, np.int64)

    def add(self, rows: U32, seqs: NDArray[np.int64], times_ms: NDArray[np.int64]) -> None:
        """Add rows, also some that are here already."""
        self.rows, first = np.unique(np.concatenate((self.rows, rows)), return_index=True)
        self.seqs = np.concatenate((self.seqs, seqs))[first]
        self.times_ms = np.concatenate((self.times_ms, times_ms))[first]

    def mask(self, pairs: Sequence[Moments], size: int) -> Mask:
        """bool[size]: the rows that arrived between the two moments of a pair, and were retired by the later one."""
        mask = np.zeros(size, bool)
        for after, until in pairs:
            first, (last, time_ms) = _moment(after)[0] if after else 0, _moment(until)
            inside = (self.seqs > first) & (self.seqs <= last) & (self.times_ms <= time_ms)
            mask[self.rows[inside]] = True
        return mask


def _moment(raw: bytes) -> tuple[int, int]:
    half = MOMENT_BYTES // 2
    # Whatever another node sends is within 63 bits.
    return tuple([int.from_bytes(each, "big") & (2**63 - 1) for each in (raw[:half], raw[half:])])  # type: ignore[return-value]


class NodeIndex:
    """Elements of all channels, the views of running sessions, roots."""

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits
        self._following = asyncio.Lock()
        self._building = asyncio.Semaphore(BUILT_AT_ONCE)
        self._begin()

    def _begin(self) -> None:
        """Start with an empty index."""
        self.elements = RangeIndex()
        self._channels = ChannelGroups(INTERESTS_MAX)
        self._forget_elements()
        self._read = NOTHING_ARRIVED
        self._saved_count = 0
        self._last_channel_number = 0
        self._roots: Recent[int, tuple[int, bytes]] = Recent(ROOTS_MAX)

    async def start(self, path: Path) -> None:
        """Read the index saved at `path` if it fits the database, and newer elements from SQL."""
        checkpoint = read_checkpoint(path)
        read = None if checkpoint is None else await self._place_of(checkpoint.stamp)
        if checkpoint is not None and read is not None:
            self.elements, self._read = checkpoint.index, read
            self._forget_elements()
            self._saved_count = len(self.elements)
            await self._learn_channels()
        elif await asyncio.to_thread(path.exists):
            why = "is damaged" if checkpoint is None else "does not fit the database"
            _log.warning("%s %s: the index is read from SQL", path.name, why)
        await self.catch_up()
        self._sums.follow()  # at the start, because the first session would pay for all rows

    async def _place_of(self, stamp: bytes) -> Watermark | None:
        """The place where a saved index ends; None if the database has another history."""
        try:
            database, entries, claims = json.loads(stamp)
            read = Watermark(Token(*entries), Token(*claims))
        except (ValueError, TypeError):
            return None
        is_ours = database == self._store.database_id and await self._store.arrivals.holds(*read)
        return read if is_ours else None

    def _forget_elements(self) -> None:
        """Start without what was derived from other elements."""
        self.views = ViewCache(self._limits.recon_views_bytes_max)
        self._newest: WeakValueDictionary[_Chosen, View]
        self._newest = WeakValueDictionary()
        self._sums = GroupSums(self.elements)
        self._retired = RetiredRows()

    async def save(self, path: Path, growth_min: int = 1) -> None:
        """Write the index to `path` if it grew by `growth_min` elements since the last write."""
        await self.catch_up()
        count = len(self.elements)
        if count - self._saved_count >= growth_min:
            stamp = json.dumps([self._store.database_id, *self._read]).encode()
            # Taken on the thread that inserts, so that the stamp matches the elements.
            snapshot = self.elements.state.snapshot
            await asyncio.to_thread(write_checkpoint, path, snapshot, stamp)
            self._saved_count = count

    async def catch_up(self) -> None:
        """Add all elements that are committed by now."""
        arrivals = self._store.arrivals
        is_same, end = await arrivals.follows(self._read)
        if is_same and self._has_read(end):
            return
        waits = self._following.locked()
        async with self._following:
            if waits or not is_same:  # another call may have read meanwhile
                is_same, end = await arrivals.follows(self._read)
            if not is_same:
                _log.warning(
                    "the database was rolled back to an older copy: reading the index again"
                )
                self._begin()
            while not self._has_read(end) and await self._read_more(*end):
                pass
            if not self._has_read(end):  # the last numbers can be without rows
                there = await arrivals.places(end)
                if there is not None:  # else it was rolled back just now, which the next call finds
                    self._read = Watermark(*map(max, self._read, there))

    def _has_read(self, end: tuple[int, int]) -> bool:
        pairs = zip(self._read, end, strict=True)
        return all(read.number >= number for read, number in pairs)

    def entries_count(self, channel_no: int) -> int:
        """The entries of a channel."""
        return self._sums.count(frozenset((group_of_entries(channel_no),)))

    @property
    def channels_count(self) -> int:
        """The channels that have elements."""
        return len(self._channels.numbers)

    def spaced_digests(self, channel_id: str, most: int) -> list[bytes]:
        """Digests of a channel's entries, evenly spaced: `most`, or all if there are fewer."""
        number = self.number_of(channel_id)
        if number is None:
            return []
        snapshot, rows = self.elements.rows_of((group_of_entries(number),))
        rows = rows[np.linspace(0, len(rows) - 1, min(most, len(rows)), dtype=np.int64)]
        return [each.tobytes() for each in snapshot.ids_of(rows)]

    def number_of(self, channel_id: str) -> int | None:
        """The number of a channel that has elements."""
        return self._channels.numbers.get(channel_id)

    def view(self, key: SessionKey, interest: Interest, without: Sequence[Moments] = ()) -> View:
        """The elements of an interest under a session key: cached, or built.

        `without`: moments; call `follow_retired` before.
        """
        return self._view(key, self._chosen(interest, without))

    def _chosen(self, interest: Interest, without: Sequence[Moments]) -> _Chosen:
        return _Chosen(self._channels.of(interest), interest.window, tuple(without))

    def _view(self, key: SessionKey, chosen: _Chosen) -> View:
        view = self.views.find((key, chosen))
        if view is None:
            # Of another session over this interest: choosing and sorting cost four times as much as hashing.
            like = self._newest.get(chosen)
            view = self._built(key, chosen) if like is None else like.under(key)
            view.refresh()
            self._keep(view, key, chosen)
        return view

    def _built(self, key: SessionKey, chosen: _Chosen) -> View:
        groups, window, pairs = chosen
        mask = self._retired.mask(pairs, len(self.elements)) if pairs else None
        return View(self.elements, key, groups, window, mask)

    def _keep(self, view: View, key: SessionKey, chosen: _Chosen) -> None:
        self.views.keep((key, chosen), view)
        self._newest[chosen] = view

    async def prepare_view(
        self, key: SessionKey, interest: Interest, without: Sequence[Moments] = ()
    ) -> None:
        """Build a large view on another thread, so that `view` costs little; at most `BUILT_AT_ONCE`.

        One of a million elements takes a quarter of a second if the interest names channels.
        """
        if self.elements_to_hash(key, interest, without) <= VIEW_COST_MIN + SMALL_ELEMENTS_MAX:
            return
        async with self._building:
            elements, chosen = self.elements, self._chosen(interest, without)
            # Another request of the session may have built it meanwhile.
            if (key, chosen) not in self.views:
                view = await asyncio.to_thread(self._built, key, chosen)
                if elements is self.elements:  # not read again meanwhile
                    self._keep(view, key, chosen)

    def elements_to_hash(
        self, key: SessionKey, interest: Interest, without: Sequence[Moments] = ()
    ) -> int:
        """The cost of `view`, and of `follow_retired` for it, in elements; 0 if it is cached."""
        chosen = self._chosen(interest, without)
        if (key, chosen) in self.views:
            return 0
        cost = VIEW_COST_MIN + self._sums.count(chosen.groups)
        return cost + (WITHOUT_COST if without else 0)

    async def follow_retired(self) -> None:
        """Learn which elements are retired by now."""
        async with self._building:
            elements, retired = self.elements, self._retired
            newest_ms = int(retired.times_ms.max(initial=0))
            found = await self._store.arrivals.retired_elements(newest_ms - RETIRED_OVERLAP_MS)
            if found is not None and elements is self.elements:
                orders, ids, seqs, times_ms = found
                rows, there = await asyncio.to_thread(elements.rows_of_elements, orders, ids)
                retired.add(rows[there], seqs[there], times_ms[there])

    @property
    def moment(self) -> bytes:
        """This moment, for `view`."""
        half = MOMENT_BYTES // 2
        now_ms = time.time_ns() // 1_000_000
        return b"".join(each.to_bytes(half, "big") for each in (self._read.entries.number, now_ms))

    @property
    def read(self) -> Watermark:
        """The places of the arrival chains up to which the index has all elements."""
        return self._read

    def channel_numbers(self, interest: Interest) -> list[int] | None:
        """The channels of an interest that have elements, ascending; None: all."""
        groups = self._channels.of(interest)
        return None if groups is None else sorted({channel_of_group(each) for each in groups})

    def covers(self, interest: Interest, channel_no: int) -> bool:
        """Whether the entries of a channel belong to an interest, but for its window."""
        groups = self._channels.of(interest)
        return groups is None or group_of_entries(channel_no) in groups

    async def outside(self, interest: Interest) -> tuple[int, int]:
        """The number of channels here that an interest does not name, and of entries outside it."""
        await self.catch_up()
        groups = self._channels.of(interest)
        numbers = self._channels.numbers.values()
        unnamed = (
            [] if groups is None else [n for n in numbers if group_of_entries(n) not in groups]
        )
        entries_count = self._sums.count(frozenset(map(group_of_entries, unnamed)))
        if interest.window != ALL_ORDERS:
            left_out = set(unnamed)
            named = [group_of_entries(n) for n in numbers if n not in left_out]
            snapshot, rows = self.elements.rows_of(named)
            entries_count += await asyncio.to_thread(
                _count_outside, snapshot, rows, interest.window
            )
        return len(unnamed), entries_count

    def sums_of(self, interest: Interest, without: U8) -> tuple[int, bytes]:
        """The number of an interest's elements in any window, and the sum of their IDs, word by word.

        `without`, u8[n, 32]: elements of it that do not count.
        """
        groups = self._channels.of(interest)
        sums = self._sums.sums(groups) - without.view("<u8").sum(axis=0, dtype=np.uint64)
        return self._sums.count(groups) - len(without), sums.astype("<u8").tobytes()

    def channel_elements(
        self, channel_id: str, window: OrderWindow
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
        """orders u64[n] and digests u8[n, 32] of a channel's entries in a window, sorted."""
        number = self._channels.numbers.get(channel_id)
        groups = frozenset() if number is None else frozenset((group_of_entries(number),))
        return self._view(_PLAIN_KEY, _Chosen(groups, window, ())).elements(WHOLE)

    async def root(self, channel_id: str, entries_count: int) -> tuple[int, bytes]:
        """(count, BLAKE3 over the sorted digests) of a channel with `entries_count` entries or more."""
        await self.catch_up()
        number = self._channels.numbers.get(channel_id)
        if number is None:
            raise Problem(Code.NOT_FOUND, "no such channel")
        counted = self._roots.get(number)
        if counted is None or counted[0] != entries_count:
            # Select the rows on the thread that inserts; another thread reads and hashes them.
            snapshot, rows = self.elements.rows_of((group_of_entries(number),))
            root = await asyncio.to_thread(lambda: roots.root(snapshot.ids_of(rows)))
            counted = len(rows), root
            self._roots.put(number, counted)
        return counted

    async def _read_more(self, entries_end: int, claims_end: int) -> bool:
        """Read the next elements; False at the end. The ends are as of `Arrivals.elements_after`."""
        seq, claim_no = (token.number for token in self._read)
        columns = await self._store.arrivals.elements_after(
            seq,
            claim_no,
            ELEMENTS_PER_READ,
            entries_end=entries_end,
            claims_end=claims_end,
        )
        if not len(columns.orders):
            return False
        if channel_of_group(int(columns.groups.max())) > self._last_channel_number:
            await self._learn_channels()
        self.elements.insert(columns.orders, columns.ids, columns.groups)
        self._sums.follow()
        self._read = columns.read_up_to(self._read)
        return True

    async def _learn_channels(self) -> None:
        while True:
            found = await self._store.channels.numbered_after(
                self._last_channel_number, CHANNELS_PER_READ
            )
            self._channels.add({info.channel_id: info.channel_no for info in found})
            if not found:
                return
            self._last_channel_number = found[-1].channel_no


class _Chosen(NamedTuple):
    """What a view has, but for its key."""

    groups: frozenset[int] | None
    window: OrderWindow
    without: tuple[Moments, ...]


def _count_outside(snapshot: Snapshot, rows: U32, window: OrderWindow) -> int:
    """How many of some rows have an order outside a window."""
    count = 0
    upper = np.uint64(2**64 - 1 if window.upper is None else window.upper - 1)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        orders = snapshot.take(rows[start : start + _ROWS_AT_ONCE]).orders
        count += int(((orders < np.uint64(window.lower)) | (orders > upper)).sum())
    return count


class ChannelGroups:
    """Numbers of channels by name, and the groups of elements that an interest covers."""

    def __init__(self, interests_max: int) -> None:
        self.numbers: dict[str, int] = {}
        self._ascending: list[str] = []
        self._found: Recent[Interest, tuple[int, frozenset[int]]] = Recent(interests_max)

    def add(self, numbers: Mapping[str, int]) -> None:
        """Add channels."""
        self._ascending = sorted([*self._ascending, *(numbers.keys() - self.numbers.keys())])
        self.numbers |= numbers

    def of(self, interest: Interest) -> frozenset[int] | None:
        """The groups of an interest's elements; None: all."""
        if interest.everything:
            return None
        found = self._found.get(interest)
        if found is not None and found[0] == len(self.numbers):
            return found[1]
        numbers = [self.numbers[name] for name in self._matching(interest)]
        groups = frozenset(
            group for n in numbers for group in (group_of_entries(n), group_of_claims(n))
        )
        self._found.put(interest, (len(self.numbers), groups))
        return groups

    def _matching(self, interest: Interest) -> Iterator[str]:
        yield from (name for name in interest.channels if name in self.numbers)
        for prefix in interest.prefixes:
            place = bisect_left(self._ascending, prefix)
            while place < len(self._ascending) and self._ascending[place].startswith(prefix):
                yield self._ascending[place]
                place += 1


class GroupSums:
    """The number of elements and the sum of their IDs for each group of an index."""

    def __init__(self, index: RangeIndex) -> None:
        self._index = index
        self._seen_count = 0
        self._counts = np.zeros(0, np.int64)
        self._sums = np.zeros((_LANES, 0), np.uint64)

    def count(self, groups: frozenset[int] | None) -> int:
        """Elements in some groups; None: in all."""
        self.follow()
        return int(self._counts[self._places(groups)].sum())

    def sums(self, groups: frozenset[int] | None) -> NDArray[np.uint64]:
        """The sum of the IDs of some groups (None: of all), word by word: u64[4]."""
        self.follow()
        sums: NDArray[np.uint64] = self._sums[:, self._places(groups)].sum(axis=1)
        return sums

    def _places(self, groups: frozenset[int] | None) -> slice | NDArray[np.int64]:
        if groups is None:
            return slice(None)
        places = np.fromiter(groups, np.int64, len(groups))
        return places[places < len(self._counts)]

    def follow(self) -> None:
        """Add the rows that were inserted since the last call."""
        snapshot = self._index.state.snapshot
        while self._seen_count < snapshot.size:
            stop = min(self._seen_count + _ROWS_AT_ONCE, snapshot.size)
            rows = snapshot.slice(self._seen_count, stop)
            self._make_room(int(rows.groups.max()) + 1)
            np.add.at(self._counts, rows.groups, 1)
            words = np.ascontiguousarray(rows.ids).view("<u8")
            for lane in range(_LANES):
                np.add.at(self._sums[lane], rows.groups, words[:, lane])
            self._seen_count = stop

    def _make_room(self, groups_count: int) -> None:
        missing = groups_count - len(self._counts)
        if missing > 0:
            grown = missing + len(self._counts)
            self._counts = np.pad(self._counts, (0, grown))
            self._sums = np.pad(self._sums, ((0, 0), (0, grown)))
