"""A node answers the published vectors byte for byte."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from app import recon_endpoint
from app.entries import Entry
from app.store.store import Store
from sdstore.sds.digest import entry_digest
from sdstore.wire.recon_pb2 import ReconResponse
from tests.recon.vector_content import HELD, LOST, POLICY
from tests.recon.vectors import HEADER, PATH
from tests.support.federation import InProcessPeer, open_nodes, publish, run

EXCHANGES = json.loads(PATH.read_text())["content"]["exchanges"]


def test_a_node_says_what_the_vectors_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nonce = HEADER.responder_nonce
    monkeypatch.setattr(recon_endpoint, "responder_nonce", lambda *_: nonce)
    monkeypatch.setattr(recon_endpoint, "nonce_is_fresh", lambda given, *_: given == nonce)

    monkeypatch.setattr(recon_endpoint, "policy_of", lambda *_: POLICY)
    readable, gone = Store.by_digest, entry_digest(LOST.message)

    async def without_the_lost(store: Store, digests: Sequence[bytes]) -> list[Entry]:
        return [entry for entry in await readable(store, digests) if entry.digest != gone]

    monkeypatch.setattr(Store, "by_digest", without_the_lost)

    async def scenario() -> list[ReconResponse]:
        async with open_nodes(tmp_path, {}) as (node,):
            hints = {each.message.message_id: each.hints for each in (*HELD, LOST)}
            await publish(node, [each.message for each in (*HELD, LOST)], hints)
            peer = InProcessPeer(node)
            answers = [await peer.recon(bytes.fromhex(each["request"])) for each in EXCHANGES]
            return [ReconResponse.FromString(answer) for answer in answers]

    expected = [ReconResponse.FromString(bytes.fromhex(each["response"])) for each in EXCHANGES]
    assert run(scenario()) == expected
