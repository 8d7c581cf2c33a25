"""What a peer serves: items, checked against the elements that they name, and stored behind the transfer.

The names of arriving items show what is left to fetch, so they are read first (`names_in`); the content is
read once (`read_items`). Then items wait in a `WriteBehind` until there are enough for a transaction that
is worth its cost; one transaction is written while the next items arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from recon.elements import U8, U64
from recon.limits import ID_BYTES
from sdstore.sync.memory import LOST, RETIRED, AsideElement, LackedBy
from sdstore.sync.replica import Element, Prepared, Replica, Stored, columns
from sdstore.sync.report import SyncCode, SyncError, misbehaved
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import Item

HELD_BYTES_MAX = 4 << 20  # as much again is being written
HELD_S_MAX = 1.0  # so much later readers see a message, however slowly others come
PATIENCE_STEPS = 50  # retries when an ingest queue, ours or the peer's, is full
PATIENCE_STEP_S = 0.1


class Row(NamedTuple):
    """A received item, as prepared by the replica, the element that it proved to be, and the claims inside it."""

    prepared: Prepared
    element: Element
    claims: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Arrived:
    """Some items of one answer, in order; `content_bytes` in all.

    `rows` can be stored, `lone_claims` are claims whose entry is not here, `aside` are elements that this
    peer cannot provide.
    """

    content_bytes: int
    rows: list[Row] = field(default_factory=list)
    lone_claims: list[Row] = field(default_factory=list)
    aside: list[AsideElement] = field(default_factory=list)


class Named(NamedTuple):
    """The elements that the items of an answer name: item i is `ids[i]`, with the claims `claims[i]` inside."""

    orders: list[int]
    ids: list[bytes]
    claims: list[tuple[bytes, ...]]

    def columns(self) -> tuple[U64, U8]:
        """`orders` and `ids` as columns."""
        return columns(zip(self.orders, self.ids, strict=True))

    def elements(self) -> Iterator[Element]:
        """All of them, claims too."""
        for order, element_id, claims in zip(self.orders, self.ids, self.claims, strict=True):
            yield Element(order, element_id)
            for each in claims:
                yield Element(order, each)


def names_in(replica: Replica, items: Sequence[Item]) -> Named:
    """What items claim to be, before anything is decoded. Raises SyncError."""
    named = Named([], [], [])
    for item in items:
        kind = item.WhichOneof("item")
        if kind is None:
            raise misbehaved("a served item names no element")
        element_id = item.claim.digest if kind == "claim" else item.id
        if len(element_id) != ID_BYTES:
            raise misbehaved(f"a served item names no element: an ID must have {ID_BYTES} bytes")
        claims: tuple[bytes, ...] = ()
        if kind == "claim":
            element_id = replica.claim_id(element_id, item.claim.hint)
        else:
            claims = claims_in(replica, item, element_id)
        named.orders.append(item.order)
        named.ids.append(element_id)
        named.claims.append(claims)
    return named


def claims_in(replica: Replica, item: Item, entry_id: bytes) -> tuple[bytes, ...]:
    """The IDs of the claims inside an entry, or an absent one."""
    hints = item.entry.hints or item.absent.hints
    return tuple([replica.claim_id(entry_id, hint) for hint in hints]) if hints else ()


async def read_items(replica: Replica, items: Sequence[Item], named: Named) -> Arrived:
    """Check items against the elements that they name (`names_in`). Raises SyncError.

    The digest of its content identifies an item: another name is a fault of the peer. A frame that this
    side cannot decode has no digest, so it is set aside under its name.
    """
    with_content = [item for item in items if not item.HasField("absent")]
    prepared = iter(await replica.prepare(with_content))
    arrived = Arrived(sum(map(Item.ByteSize, items)))
    for item, element_id, claims in zip(items, named.ids, named.claims, strict=True):
        element = Element(item.order, element_id)
        if item.HasField("absent"):
            code = RETIRED if item.absent.reason == recon_pb2.RETIRED else LOST
            arrived.aside += aside_of(LackedBy.HERE, element, claims, code)
            continue
        content = next(prepared)
        row = Row(content, element, claims)
        if content.entry_id:
            if content.order not in (None, item.order):
                raise misbehaved("a claim was served with a wrong order value")
            (arrived.lone_claims if content.order is None else arrived.rows).append(row)
            continue
        if content.element_id and (content.order, content.element_id) != element:
            raise misbehaved(f"the frame served as {item.id.hex()} is another entry")
        if content.refusal:
            arrived.aside += aside_of(LackedBy.HERE, element, claims, content.refusal)
        else:
            arrived.rows.append(row)
    return arrived


def aside_of(
    lacked_by: LackedBy,
    element: Element,
    claims: Iterable[bytes],
    code: str,
    entry_id: bytes = b"",
) -> list[AsideElement]:
    """An element to set aside, with the claims on it. `entry_id`: for a claim, its entry."""
    order, element_id = element
    covered = (AsideElement(lacked_by, order, each, code, element_id) for each in claims)
    return [AsideElement(lacked_by, order, element_id, code, entry_id), *covered]


class WriteBehind:
    """Stores rows in the background, in the order in which they came, in large transactions.

    A transaction of 8,192 messages costs half of eight of 1,024, because it touches each page of an index
    once. There is one transaction at a time, and up to another one's worth of rows waits. If one fails, its
    rows are lost, and the next `add` or `flush` raises its error.
    """

    def __init__(self, replica: Replica, is_settled: Callable[[Row, Stored], bool]) -> None:
        """`is_settled` records the outcome of an item; False if there was no room for it yet."""
        self._replica = replica
        self._is_settled = is_settled
        self._held: list[Row] = []
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    async def add(self, rows: Sequence[Row], size: int) -> None:
        """Take over rows of `size` bytes. Raises SyncError, as does `Replica.commit`."""
        if not rows:
            return
        if self._replica.stored_at_once == 1:  # it has no writer that works meanwhile
            await self.store(rows)
            return
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HELD_S_MAX, self._write_old)
        self._held += rows
        self._held_bytes += size
        while self._is_enough:
            await self._written()
            # Another task may have begun with these rows while this one waited.
            if self._is_enough and self._writing is None:
                self._write()

    async def flush(self) -> None:
        """Wait until everything that was added is stored. Raises as `add`."""
        while self._held or self._writing is not None:
            await self._written()
            if self._held and self._writing is None:
                self._write()

    async def end(self) -> None:
        """Forget what is not stored."""
        self._held.clear()
        self._stop_timer()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None

    @property
    def _is_enough(self) -> bool:
        return bool(self._held) and (
            len(self._held) >= self._replica.stored_at_once or self._held_bytes >= HELD_BYTES_MAX
        )

    def _write(self) -> None:
        self._stop_timer()
        rows, self._held, self._held_bytes = self._held, [], 0
        self._writing = asyncio.create_task(self.store(rows))

    def _write_old(self) -> None:
        """Write rows that have waited for `HELD_S_MAX`. While a transaction runs, or failed, look again later."""
        self._timer = None
        if self._writing is None or (self._writing.done() and self._writing.exception() is None):
            self._write()
        else:
            self._timer = asyncio.get_running_loop().call_later(HELD_S_MAX, self._write_old)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _written(self) -> None:
        """Wait for the end of the transaction that is being written. Raises its error."""
        writing = self._writing
        if writing is None:
            return
        await asyncio.wait({writing})
        if self._writing is writing:  # else another task has its error
            self._writing = None
            writing.result()

    async def store(self, waiting: Sequence[Row]) -> None:
        """Commit at once; retry for a while if this side is overloaded. Raises SyncError."""
        for _ in range(PATIENCE_STEPS):
            if not waiting:
                return
            outcomes = await self._replica.commit([row.prepared for row in waiting])
            rows = zip(waiting, outcomes, strict=True)
            waiting = [row for row, stored in rows if not self._is_settled(row, stored)]
            if waiting:
                await asyncio.sleep(PATIENCE_STEP_S)
        raise SyncError(SyncCode.OVERLOADED, "this node's own ingest queue stays full")
