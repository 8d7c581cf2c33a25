"""A file of one channel's messages as the initiating side of a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from app.cli.existing import ExistingMessages, continued
from app.cli.frames import FileFormat, record_of
from app.entries import Claim, Entry, Outcome, OutcomeKind, Outline
from app.errors import Problem
from app.federation.address import parse_peer_url
from app.federation.local import LostElement
from app.federation.report import Progress, SyncReport
from app.federation.session import sync_with_peer
from app.federation.transport import open_http_transport
from app.ingest.prepare import Publication
from app.limits import DEFAULT_LIMITS, Limits
from recon.elements import U8, U64, Mask
from recon.index import RangeIndex
from recon.limits import ID_BYTES
from recon.session import Interest, SessionKey
from recon.view import View
from sdstore.sds.codec import decode
from sdstore.sds.digest import claim_id, entry_digest, order_value


async def backfill_file(
    node: str,
    channel_id: str,
    file: Path,
    file_format: FileFormat,
    progress: Progress,
    changed: Callable[[], None],
) -> SyncReport:
    """Append what the node has of the channel and the file lacks. Nothing is sent."""
    existing = ExistingMessages(file, file_format)
    side = FileSide(existing, file_format)
    interest = Interest.make(channels=frozenset([channel_id]))
    url = parse_peer_url(node)
    with continued(existing) as target:
        side.target = target
        async with open_http_transport(url, DEFAULT_LIMITS, private_allowed=True) as transport:
            return await sync_with_peer(
                side, transport, interest, fetch_only=True, progress=progress, changed=changed
            )


class FileSide:
    """`app.federation.local.LocalSide` over a file; it is its own store, door and index.

    Claims that come without their message have no place in the file and are let go.
    """

    def __init__(self, existing: ExistingMessages, file_format: FileFormat) -> None:
        self.limits: Limits = DEFAULT_LIMITS
        self.nonce_secret = os.urandom(16)
        self.elements = RangeIndex()
        self.target: IO[bytes] | None = None
        self._format = file_format
        for item in existing:
            self._insert(item)

    @property
    def store(self) -> FileSide:
        """Content is read here."""
        return self

    @property
    def door(self) -> FileSide:
        """Content enters here."""
        return self

    @property
    def index(self) -> FileSide:
        """Elements are compared here."""
        return self

    async def by_digest(self, digests: Sequence[bytes]) -> list[Entry]:  # noqa: ARG002
        """Nothing is sent from a file, so nothing is read."""
        return []

    async def outlines(self, digests: Sequence[bytes]) -> dict[bytes, Outline]:  # noqa: ARG002
        """See `by_digest`."""
        return {}

    async def hints_of(self, digests: Sequence[bytes]) -> dict[bytes, list[Claim]]:  # noqa: ARG002
        """See `by_digest`."""
        return {}

    async def claims_by_element(self, ids: Sequence[bytes]) -> list[tuple[bytes, bytes]]:  # noqa: ARG002
        """See `by_digest`."""
        return []

    async def publish_many(self, items: Sequence[Publication]) -> list[Outcome | Problem]:
        """Append messages."""
        return [self._append(item) for item in items]

    async def publish_claims(self, claims: Sequence[tuple[bytes, bytes]]) -> list[Problem | None]:
        """They have no place in the file."""
        return [None for _ in claims]

    async def catch_up(self) -> None:
        """The file has no other writer."""

    def view(self, key: SessionKey, interest: Interest) -> View:
        """What the file holds; all of it is of the one channel."""
        return self.elements.view(key, None, interest.window)

    def covers(self, interest: Interest, channel_no: int) -> bool:  # noqa: ARG002
        """All of the file is of the one channel."""
        return True

    def holds(self, orders: U64, ids: U8) -> Mask:
        """Which elements are in the file."""
        return self.elements.holds(orders, ids)

    def root_of_ids(
        self,
        interest: Interest,  # noqa: ARG002
        policy: int = 0,  # noqa: ARG002
        added: U8 | None = None,  # noqa: ARG002
        removed: U8 | None = None,  # noqa: ARG002
    ) -> bytes | None:
        """A file is compared once."""
        return None

    async def content_states(self, digests: Sequence[bytes]) -> dict[bytes, object]:  # noqa: ARG002
        """See `lost_count`."""
        return {}

    async def lost_count(self) -> int:
        """What is in the file can be read."""
        return 0

    async def lost_elements(self, limit: int, after: int = 0) -> list[LostElement]:  # noqa: ARG002
        """See `lost_count`."""
        return []

    def _append(self, item: Publication) -> Outcome:
        message, _ = decode(item.frame)
        if self.target is not None:
            self.target.write(record_of(item.frame, item.hints, self._format))
        return Outcome(
            OutcomeKind.STORED, message.message_id, message.channel_id, entry_digest(message)
        )

    def _insert(self, item: Publication) -> None:
        message, _ = decode(item.frame)
        if message.lamport_timestamp is None:
            return
        digest = entry_digest(message)
        ids = [digest, *(claim_id(digest, hint) for hint in item.hints)]
        self.elements.insert(
            np.full(len(ids), order_value(message.lamport_timestamp), np.uint64),
            np.frombuffer(b"".join(ids), np.uint8).reshape(-1, ID_BYTES),
            np.zeros(len(ids), np.uint32),
        )
