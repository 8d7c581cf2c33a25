"""A file of one channel's messages as the initiating side of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from app.cli.files import ExistingMessages, FileFormat, continued, record_of, write_through
from app.federation.transport import open_http_transport, parse_peer_url
from app.ingest.prepare import acceptable_hints
from app.limits import DEFAULT_LIMITS
from recon.elements import U8, U64, Mask, order_of_lamport
from recon.index import RangeIndex
from recon.session import Interest, SessionKey
from recon.view import View
from sdstore.sds.codec import decode
from sdstore.sds.digest import claim_id, entry_digest
from sdstore.sds.model import Kind, MessageError
from sdstore.sync.replica import (
    NOT_CONTENT,
    Element,
    Loaded,
    LostPage,
    Prepared,
    Stored,
    columns,
)
from sdstore.sync.report import Progress, SyncReport
from sdstore.sync.session import sync_with_peer
from sdstore.wire.recon_pb2 import NO_ENTRY, STORED, Item


async def backfill_file(
    node: str,
    channel_id: str,
    file: Path,
    file_format: FileFormat,
    changed: Callable[[Progress], None],
) -> SyncReport:
    """Append what the node has of the channel and the file lacks. Nothing is sent."""
    existing = ExistingMessages(file, file_format)
    replica = FileReplica(existing, file_format)
    interest = Interest.make(channels=frozenset([channel_id]))
    url = parse_peer_url(node)
    with continued(existing) as target:
        replica.target = target
        async with open_http_transport(url, DEFAULT_LIMITS, private_allowed=True) as transport:
            report, _ = await sync_with_peer(
                replica, transport, interest, fetch_only=True, changed=changed
            )
            return report


class FileReplica:
    """A `sdstore.sync.replica.Replica` that is appended to, and from which nothing is sent.

    Claims that come without their message have no place in the file: their entry is never here.
    """

    def __init__(self, existing: ExistingMessages, file_format: FileFormat) -> None:
        self.elements = RangeIndex()
        self.target: IO[bytes] | None = None
        self._format = file_format
        for item in existing:
            message, _ = decode(item.frame)
            if message.lamport_timestamp is not None:
                order = order_of_lamport(message.lamport_timestamp)
                self._insert(_elements_of(order, entry_digest(message), item.hints))

    def _insert(self, elements: Sequence[Element]) -> None:
        self.elements.insert(*columns(elements), np.zeros(len(elements), np.uint32))

    @property
    def arrived_count(self) -> int:
        """See `Replica`."""
        return len(self.elements)

    async def catch_up(self) -> None:
        """The file has no other writer."""

    def view(self, key: SessionKey, interest: Interest) -> View:
        """The elements of the file; all are of the one channel."""
        return self.elements.view(key, None, interest.window)

    def holds(self, orders: U64, ids: U8) -> Mask:
        """See `Replica`."""
        return self.elements.holds(orders, ids)

    def root(self, *_: object) -> None:
        """A file is compared once."""

    async def load(self, elements: Sequence[Element], _bytes_max: int) -> Loaded:
        """Nothing is sent."""
        return Loaded([], [], len(elements))

    async def claims_on(self, _entry_ids: Sequence[bytes]) -> dict[bytes, list[bytes]]:
        """See `load`."""
        return {}

    async def prepare(self, items: Sequence[Item]) -> list[Prepared]:
        """See `Replica`."""
        return [_prepared(item) for item in items]

    async def commit(self, prepared: Sequence[Prepared]) -> list[Stored]:
        """Append messages. They are elements from now on: a session that begins anew skips them."""
        stored, appended = [], list[Element]()
        for each in prepared:
            if each.entry_id:
                stored.append(Stored(NO_ENTRY))
                continue
            frame, hints = each.content
            if self.target is not None:
                self.target.write(record_of(frame, hints, self._format))
            appended += _elements_of(each.order or 0, each.element_id, hints)
            stored.append(Stored(STORED))
        if appended:
            if self.target is not None:
                write_through(self.target)
            self._insert(appended)
        return stored

    async def lost(self, *_: object) -> LostPage:
        """All that is in the file can be read."""
        return LostPage([], 0, 0)

    async def lost_among(self, _entry_ids: Sequence[bytes]) -> set[bytes]:
        """See `lost`."""
        return set()


def _prepared(item: Item) -> Prepared:
    if item.HasField("claim"):
        claim = item.claim
        return Prepared(element_id=claim_id(claim.digest, claim.hint), entry_id=claim.digest)
    hints = item.entry.hints
    try:
        message, _ = decode(item.entry.frame)
    except MessageError as error:
        claims = tuple([claim_id(item.id, hint) for hint in hints])
        return Prepared(claims=claims, refusal=error.code)
    digest = entry_digest(message)
    return Prepared(
        order=order_of_lamport(message.lamport_timestamp or 0),
        element_id=digest,
        claims=tuple([claim_id(digest, hint) for hint in hints]),
        refusal="" if message.kind is Kind.CONTENT else NOT_CONTENT,
        content=(item.entry.frame, acceptable_hints(hints, DEFAULT_LIMITS)),
    )


def _elements_of(order: int, digest: bytes, hints: Iterable[bytes]) -> list[Element]:
    """A message and the claims on it."""
    return [Element(order, each) for each in (digest, *(claim_id(digest, h) for h in hints))]
