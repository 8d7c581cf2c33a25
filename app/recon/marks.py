"""The node's marks (`recon.marks`), for both sides of a session: what arrived since, and since when.

A mark is verified against SQL and the index whenever it comes back, so any worker of the node can do
that. The elements after it are read from SQL by number, in time proportional to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from app.entries import Watermark
from app.recon.index import NodeIndex
from app.store.arrivals import arrived_rows
from app.store.store import Store
from recon.elements import ALL_ORDERS
from recon.marks import (
    NEWS_MAX,
    NOTHING_CAME,
    Arrived,
    Moment,
    Numbers,
    is_mark_of,
    mark_of,
    numbers_of,
)
from recon.session import Interest


@dataclass(frozen=True, slots=True)
class Between:
    """Elements of an interest: those after the mark `since` and up to `up_to`, and those after `up_to`."""

    news: Arrived
    later: Arrived


class Marks:
    """Makes and reads the marks of one database."""

    def __init__(self, store: Store, index: NodeIndex) -> None:
        self._store = store
        self._index = index
        self._secret = store.mark_secret

    def at_present(self, interest: Interest, policy: int) -> bytes:
        """The mark of all that the index has now."""
        moment = self._moment(interest, policy, self._index.read, NOTHING_CAME)
        return mark_of(self._secret, interest.encode(), moment)

    def claims_end(self, mark: bytes, interest: Interest) -> int | None:
        """The number of the last claim up to a mark; None if it is no mark of this interest."""
        numbers = numbers_of(mark, self._secret, interest.encode())
        return None if numbers is None else numbers.claim

    async def arrived_since(self, mark: bytes, interest: Interest, policy: int) -> Arrived | None:
        """The elements that arrived after a mark, up to what the index has when this returns.

        None if the mark fails, or if more than `NEWS_MAX` arrived.
        """
        between = await self.between(mark, b"", interest, policy)
        return None if between is None else between.news

    async def between(
        self,
        since: bytes,
        up_to: bytes,
        interest: Interest,
        policy: int,
        charge: Callable[[int], None] = lambda _: None,
    ) -> Between | None:
        """The elements between two marks and after them; an empty mark is the beginning, or the present.

        At least one mark is given. None if one fails, or if more than `NEWS_MAX` arrived after the first.
        `charge` is called with the number of elements that are about to be read, at most, and again with
        what was not read, as a negative number.
        """
        places: list[Watermark] = []
        for mark in filter(None, (since, up_to)):
            numbers = numbers_of(mark, self._secret, interest.encode())
            place = None if numbers is None else await self._store.arrivals.places(numbers)
            if place is None:
                return None
            places.append(place)
        # The older one: `since` can be newer than `up_to`, and nothing is between them then.
        start = (
            Numbers(*map(min, *map(_numbers, places))) if len(places) > 1 else _numbers(places[0])
        )
        there = _numbers(self._index.read)
        read_max = min(
            NEWS_MAX, max(0, there.entry - start.entry) + max(0, there.claim - start.claim)
        )
        charge(read_max)
        arrived = await self._read_after(start, interest)
        if arrived is None:
            return None
        charge(len(arrived) - read_max)
        # Nothing waits from here on: the index stays where the reading ended.
        for mark, place in zip(filter(None, (since, up_to)), places, strict=True):
            after = arrived.after(_numbers(place))
            moment = self._moment(interest, policy, place, after)
            if not is_mark_of(mark, self._secret, interest.encode(), moment):
                return None
        window = interest.window
        if window != ALL_ORDERS:
            upper = np.uint64(2**64 - 1 if window.upper is None else window.upper - 1)
            is_inside = (arrived.orders >= np.uint64(window.lower)) & (arrived.orders <= upper)
            arrived = arrived.take(is_inside)
        if not up_to:
            return Between(arrived, NOTHING_CAME)
        end = _numbers(places[-1])
        news = arrived.after(_numbers(places[0])).up_to(end) if since else NOTHING_CAME
        return Between(news, arrived.after(end))

    async def _read_after(self, start: Numbers, interest: Interest) -> Arrived | None:
        """What arrived after these numbers, in any window, up to the place of the index at the end.

        The index moves on while this reads, so it reads on until both are at one place.
        """
        arrived = NOTHING_CAME
        read = start
        arrivals = self._store.arrivals
        while read != (target := _numbers(self._index.read)):
            if target.entry < read.entry or target.claim < read.claim:
                return None  # the index was read again, from a database that was rolled back
            channels = self._index.channel_numbers(interest)
            limit = NEWS_MAX + 1
            entries = await arrivals.entries_between(read.entry, target.entry, channels, limit)
            claims = await arrivals.claims_between(read.claim, target.claim, channels, limit)
            arrived = arrived.beside(arrived_rows(entries, claims))
            if len(arrived) > NEWS_MAX:
                return None
            read = target
        return arrived

    def _moment(self, interest: Interest, policy: int, place: Watermark, after: Arrived) -> Moment:
        """What a mark at `place` authenticates, given all that arrived after it."""
        # Over all windows: the index has no sums of a window.
        count, sums = self._index.sums_of(interest, after.ids)
        contents = policy.to_bytes(4, "little") + count.to_bytes(8, "little", signed=True) + sums
        return Moment(_numbers(place), (place.entries.sum, place.claims.sum), contents)


def _numbers(place: Watermark) -> Numbers:
    return Numbers(place.entries.number, place.claims.number)
