"""Compares the range index of a running process with SQL, a few elements at a time.

Each element in SQL must be in the index with its group, and both must have as many: then both are the
same set, in all channels, and so are all roots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from app.entries import NOTHING_ARRIVED, Watermark
from app.recon.index import NodeIndex
from app.store.channelpages import ChannelInfo
from app.store.store import Store

FINDINGS_PER_STEP = 8
"""An index that is wrong is read again as a whole: a few places are enough to say so."""

ARRIVED_MAX = 4_096
"""Entries that arrive during one step of the channels; after more of them the step is repeated."""

RESTARTS_MAX = 3
"""Times that the elements are begun again in one pass, because the database went back in time; then the
pass leaves them out. A counter that is too low has the same effect, and a stage of its own."""


class IndexStep(NamedTuple):
    """Elements or channels that were compared, whether all were, and where the index is wrong (`faults`)
    or the row of a channel (`channel_faults`)."""

    checked_count: int
    is_last: bool
    faults: list[str]
    channel_faults: list[str]


class IndexAudit:
    """Compares one index with the store that it caches. Both can grow meanwhile."""

    def __init__(self, store: Store, index: NodeIndex) -> None:
        self._store = store
        self._index = index
        self.begin()

    def begin(self) -> None:
        """Start again at the first element and the first channel."""
        self._channel_no = 0
        self._restarts_count = 0
        self._begin_elements()

    def _begin_elements(self) -> None:
        self._elements = self._index.elements
        self._place: Watermark = NOTHING_ARRIVED
        self._count = 0

    async def elements_step(self, most: int) -> IndexStep:
        """Compare the next elements in arrival order, up to `most` entries and hint claims each."""
        if self._elements is not self._index.elements:  # it was read again meanwhile
            self._begin_elements()
            self._restarts_count += 1
            if self._restarts_count > RESTARTS_MAX:
                return IndexStep(0, True, [], [])
        seq, claim_no = (token.number for token in self._place)
        columns = await self._store.arrivals.elements_after(seq, claim_no, most)
        # Whatever SQL had at that moment, the index has now.
        await self._index.catch_up()
        if self._elements is not self._index.elements:
            return IndexStep(0, False, [], [])
        found = self._index.elements.groups_of(columns.orders, columns.ids)
        wrong = np.flatnonzero(found != columns.groups.astype(np.int64))
        faults = [
            f"element {columns.ids[at].tobytes().hex()} is "
            + ("not in the index" if found[at] < 0 else f"in group {found[at]} of the index")
            + f", and in group {columns.groups[at]} of the database"
            for at in wrong[:FINDINGS_PER_STEP].tolist()
        ]
        self._place = columns.read_up_to(self._place)
        self._count += len(columns.orders)
        has_all = self._has_all
        if has_all and len(self._index.elements) != self._count:
            counts = f"{len(self._index.elements)} elements, the database has {self._count}"
            faults.append(f"the index has {counts}")
        return IndexStep(len(columns.orders), has_all or not len(columns.orders), faults, [])

    @property
    def _has_all(self) -> bool:
        """Whether everything that the index has was compared. The last numbers can be without rows."""
        read, place = self._index.read, self._place
        return (read.entries.sum, read.claims.sum) == (place.entries.sum, place.claims.sum)

    async def channels_step(self, most: int) -> IndexStep:
        """Compare the next channels: their numbers and counts by their rows, in the index and in SQL."""
        async with self._store.snapshot() as frozen:
            seq, _ = await frozen.arrivals.watermark()
            channels = await frozen.channels.numbered_after(self._channel_no, most)
            ends = await frozen.channels.ends_of([each.channel_no for each in channels])
            await self._index.catch_up()
            counts = [self._index.entries_count(each.channel_no) for each in channels]
            # Nothing waited in between: the counts are as of this place.
            arrived = await self._arrived_since(seq, self._index.read.entries.number, channels)
            if arrived is None:
                return IndexStep(0, False, [], [])
            faults: list[str] = []
            channel_faults: list[str] = []
            for channel, count, lamports in zip(channels, counts, ends, strict=True):
                name = f"channel {channel.channel_id!r}"
                numbered = self._index.number_of(channel.channel_id)
                if numbered != channel.channel_no:
                    faults.append(f"{name} has number {numbered} in the index")
                in_index = count - arrived.count(channel.channel_no)
                if in_index != channel.count:
                    # One of them is wrong: count the rows.
                    rows_count = await frozen.channels.count_rows(channel.channel_no)
                    if in_index != rows_count:
                        faults.append(
                            f"{name} has {in_index} messages in the index, not {rows_count}"
                        )
                    if channel.count != rows_count:
                        channel_faults.append(
                            f"{name} has {rows_count} messages, and {channel.count} by its row"
                        )
                if lamports != (channel.lamport_first, channel.lamport_last):
                    channel_faults.append(f"{name}: its first or last Lamport timestamp is wrong")
        if channels:
            self._channel_no = channels[-1].channel_no
        return IndexStep(len(channels), not channels, faults, channel_faults)

    async def _arrived_since(
        self, seq: int, read: int, channels: Sequence[ChannelInfo]
    ) -> list[int] | None:
        """The channel number of each entry in these channels that came after `seq` and up to `read`.

        None if too many came to be counted.
        """
        if read < seq:
            return None  # the database was rolled back
        numbers = [each.channel_no for each in channels]
        rows = await self._store.arrivals.entries_between(seq, read, numbers, ARRIVED_MAX)
        return None if len(rows) >= ARRIVED_MAX else [row[1] for row in rows]
