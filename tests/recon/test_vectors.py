"""The published vectors are what the engine speaks, and what the document says."""

from __future__ import annotations

import json

import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from recon.initiator import Initiator, Options
from recon.responder import respond
from sdstore.wire.recon_pb2 import ReconResponse
from tests.recon.vectors import PATH, vectors
from tests.support.recon_talk import HEADER, view_of

VECTORS = json.loads(PATH.read_text())


def test_the_file_holds_what_the_engine_speaks() -> None:
    assert vectors() == VECTORS


def test_the_key_follows_the_document() -> None:
    session, interest = VECTORS["session"], VECTORS["interest"]
    material = "".join((session["initiator_nonce"], session["responder_nonce"], interest["hash"]))
    hasher = blake3.blake3(
        bytes.fromhex(material), derive_key_context="sdstore recon v1 session key"
    )
    assert hasher.digest(length=16).hex() == session["key"]
    digest = blake3.blake3(bytes.fromhex(interest["bytes"])).digest(length=16)
    assert digest.hex() == interest["hash"]


def test_element_hashes_are_a_cbc_mac_with_the_order_in_the_second_block() -> None:
    key = bytes.fromhex(VECTORS["session"]["key"])
    for row in VECTORS["elements"]:
        raw = bytes.fromhex(row["id"])
        order = int(row["order"]).to_bytes(16, "little")
        second = bytes(a ^ b for a, b in zip(raw[16:], order, strict=True))
        encryptor = Cipher(algorithms.AES(key), modes.CBC(bytes(16))).encryptor()
        mac = encryptor.update(raw[:16] + second)[16:]
        assert int.from_bytes(mac[:8], "little") == int(row["low"])
        assert int.from_bytes(mac[8:], "little") == int(row["high"])
        assert mac[:6].hex() == row["short_id"]


def test_the_summary_mixes_the_sums_and_the_count_as_the_document_says() -> None:
    word, rows = 2**64, VECTORS["elements"]
    low, high = (sum(int(row[lane]) for row in rows) % word for lane in ("low", "high"))
    a, b, c = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
    mixed = (low ^ low >> 32) * a % word
    mixed ^= (high ^ high >> 32) * b % word
    mixed = (mixed + len(rows) * c) % word
    mixed = (mixed ^ mixed >> 32) * b % word
    mixed ^= mixed >> 32
    assert mixed.to_bytes(8, "little")[:6].hex() == VECTORS["summary_of_the_elements"]["hash"]


def test_the_worked_example_of_the_document_is_what_is_said() -> None:
    everything = [(order, bytes([96 + order]) * 32) for order in range(1, 9)]
    initiator = Initiator(view_of(everything[:1]), HEADER, options=Options(parts=2, list_max=2))
    initiator._phase = lambda: 64  # type: ignore[method-assign]
    theirs, said = view_of(everything), []
    while (request := initiator.next_request()) is not None:
        ranges, answers = request.message.ranges, respond(theirs, request.message).answers
        said.append(
            [ranges.runs.hex(), ranges.bounds.hex(), ranges.asks.hex(), ranges.counts.hex()]
        )
        said.append([answers.kinds.hex(), answers.counts.hex(), answers.bounds.hex()])
        initiator.receive(request.request_id, ReconResponse(version=1, answers=answers))
    assert said == [
        ["07", "", "", "02"],
        ["01", "10", "000500"],
        ["05", "000500", "01", ""],
        ["02", "08", ""],
    ]
