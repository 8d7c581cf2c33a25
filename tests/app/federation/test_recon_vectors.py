"""A node answers the published vectors byte for byte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.entries import Entry
from app.federation import interests
from app.recon import endpoint as recon_endpoint
from app.store.lookups import Lookups
from recon.agreement import Interest
from recon.errors import RemoteProtocolError
from recon.events import Need
from recon.fetch import FetchQueue, read_fetch
from recon.index import RangeIndex
from recon.initiator import Initiator
from recon.view import View
from sdstore.sds.model import entry_digest
from sdstore.sync.content import Books, Inbox, Shared, Steps, names_in
from sdstore.sync.differences import Ledger, SetAside
from sdstore.sync.memory import Aside, columns
from sdstore.sync.report import Counts, SyncError
from sdstore.sync.steps import Decoded, Read
from sdstore.wire import recon_pb2 as wire
from sdstore.wire.recon_pb2 import ReconResponse
from tests.recon.vector_content import HELD, LOST, POLICY
from tests.recon.vectors import HEADER, PATH
from tests.support.federation import InProcessPeer, local_of, open_nodes, publish, run

VECTORS = json.loads(PATH.read_text())
EXCHANGES = VECTORS["content"]["exchanges"]


def test_a_node_says_what_the_vectors_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nonce = HEADER.responder_nonce
    monkeypatch.setattr(recon_endpoint, "responder_nonce", lambda *_: nonce)
    monkeypatch.setattr(recon_endpoint, "nonce_is_fresh", lambda given, *_: given == nonce)

    monkeypatch.setattr(interests, "policy_of", lambda *_: POLICY)
    readable, gone = Lookups.by_digest, entry_digest(LOST.message)

    async def without_the_lost(entries: Lookups, digests: Sequence[bytes]) -> list[Entry]:
        return [entry for entry in await readable(entries, digests) if entry.digest != gone]

    monkeypatch.setattr(Lookups, "by_digest", without_the_lost)

    async def scenario() -> list[ReconResponse]:
        async with open_nodes(tmp_path, {}) as (node,):
            hints = {each.message.message_id: each.hints for each in (*HELD, LOST)}
            await publish(node, [each.message for each in (*HELD, LOST)], hints)
            peer = InProcessPeer(node)
            answers = [await peer.recon(bytes.fromhex(each["request"])) for each in EXCHANGES]
            return [ReconResponse.FromString(answer) for answer in answers]

    expected = [ReconResponse.FromString(bytes.fromhex(each["response"])) for each in EXCHANGES]
    assert run(scenario()) == expected


async def taken(folder: Path, response: bytes) -> list[bytes]:
    """The elements of an answer that an empty initiator sets aside; raises for a fault."""
    view = View(RangeIndex(), HEADER.key())
    fetch = wire.Fetch.FromString(bytes.fromhex(VECTORS["refused_items"]["fetch"]))
    wanted = read_fetch(fetch)
    batch = [Need(wanted.ranges[0], wanted.short_ids, len(wanted.short_ids))]
    async with open_nodes(folder, {}) as (node,):
        items = ReconResponse.FromString(response).items
        replica = local_of(node)
        named = names_in(replica.claim_id, items)
        orders, ids = columns(each.element for each in named)
        if not FetchQueue(view).accept(batch, orders, ids).all():
            raise SyncError("peer_misbehaved", "not asked for")
        aside = SetAside(Aside(b""))
        everything = Interest.make(everything=True)
        shared = Shared(Steps(), Counts(), Ledger(), aside, replica.claim_id, everything, 0.0)
        inbox = Inbox(shared, Books(shared), Initiator(view, HEADER))
        inbox.add(items, named, for_lost=False, paid_bytes=0)
        inbox.pump(more_comes=True)
        [(number, read)] = shared.steps.hand_out()
        assert isinstance(read, Read)
        _, taker = shared.steps.take(number)
        taker(Decoded(await replica.prepare(read.items), len(items) + 1))
    return [each.element_id for each in aside.value().elements]


@pytest.mark.parametrize(
    "row", VECTORS["refused_items"]["refused"], ids=lambda row: str(row["why"])
)
def test_an_initiator_refuses_items_that_it_must_not_take(
    tmp_path: Path, row: dict[str, str]
) -> None:
    with pytest.raises((SyncError, RemoteProtocolError)):
        run(taken(tmp_path, bytes.fromhex(row["response"])))


@pytest.mark.parametrize(
    "row", VECTORS["refused_items"]["set_aside"], ids=lambda row: str(row["why"])
)
def test_an_initiator_sets_aside_what_it_cannot_have(tmp_path: Path, row: dict[str, Any]) -> None:
    aside = run(taken(tmp_path, bytes.fromhex(row["response"])))
    assert [each.hex() for each in aside] == row["aside"]
