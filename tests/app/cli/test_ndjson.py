"""Messages as lines of JSON: the same words mean the same in a file and over HTTP."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import httpx

from sdstore.sds.codec import encode
from sdstore.sds.jsonform import to_json
from sdstore.sds.model import waku_message_hash
from tests.support.cli import cli
from tests.support.federation import message

ENVELOPE = {"pubsub_topic": "/waku/2/rs/2/1", "content_topic": "/app/1/x/proto", "timestamp_ns": 5}


def line(number: int, channel: str, **members: object) -> str:
    """One message as a line of NDJSON."""
    return json.dumps({"message": to_json(message(number, channel)), **members})


def test_a_line_has_the_same_fate_in_a_file_and_over_http(node: str, tmp_path: Path) -> None:
    lines = [
        line(1, "same"),
        line(2, "same", meta={"digest": "00"}, retrieval_hints=["0a"], waku=ENVELOPE),
        line(3, "same", retrieval_hint=["0b"]),
        line(4, "same", retrieval_hints=["no hex"]),
        line(5, "same", retrieval_hints="0c"),
        line(6, "same", waku={**ENVELOPE, "timestamp_ns": 2**63}),
        line(7, "same", waku={"pubsub_topic": "p"}),
        '{"message": {"message_id": "m"}}',
        '{"message": {"message_id": "m", "no_such_field": 1}}',
        '{"message": NaN}',
        "not json",
        "[]",
    ]
    raw = "\n".join(lines).encode()
    answer = httpx.post(
        f"{node}/v1/messages/batch", content=raw, headers={"content-type": "application/x-ndjson"}
    )
    outcomes = answer.json()["outcomes"]
    wanted = [each.get("problem", {}).get("code", each["outcome"]) for each in outcomes]
    file = tmp_path / "same.ndjson"
    file.write_bytes(raw)
    published = cli("publish", file, "--node", node, "--json").lines
    # The node has the good ones by now.
    again = [code.replace("stored", "duplicate") for code in wanted]
    assert [each.get("code", each["outcome"]) for each in published] == again
    *refused, done = cli("import", file, "--data-dir", tmp_path, "--json").lines
    assert [each["code"] for each in refused] == wanted[2:]
    assert done["counts"] == {"stored": 2, "refused": 10}


def test_the_hint_of_an_envelope_is_computed_for_a_file_too(node: str) -> None:
    envelope = {**ENVELOPE, "meta": b64encode(b"meta").decode()}
    raw = line(1, "ndjson/waku", waku=envelope).encode()
    assert cli("publish", "-", "--node", node, stdin=raw).code == 0
    frame = encode(message(1, "ndjson/waku"))
    hint = waku_message_hash("/waku/2/rs/2/1", frame, "/app/1/x/proto", b"meta", 5)
    found = cli("hint", hint.hex(), "--node", node, "--json").json
    assert found["message"]["channel_id"] == "ndjson/waku"
