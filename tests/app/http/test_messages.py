"""Publishing and reading over a real socket: forms, IDs of any content, caching, look-ups."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest

from app.server.limits import DEFAULT_LIMITS
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, HistoryEntry, Message, entry_digest, frame_hash
from sdstore.wire import store_pb2 as wire
from tests.support.server import PROTOBUF, WANTS_PROTOBUF, RunningNode, running_node
from tests.support.stores import Stores

ODD_IDS = [
    "/myapp/1/chat/proto",
    "x/ancestors",
    "..",
    ".",
    "%",
    "%2F",
    "a b+c&d=e",
    "ü€😀",
    "?#",
    "m" * 1_024,
]
NDJSON = {"content-type": "application/x-ndjson"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, stores: Stores) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node"), database_url=stores.new_url()) as running:
        yield running


def content(message_id: str, channel_id: str = "c", **fields: Any) -> Message:
    return Message(message_id, channel_id, **{"lamport_timestamp": 1, "content": b"hi", **fields})


@pytest.mark.parametrize("message_id", ODD_IDS)
def test_a_message_is_served_under_any_id_in_both_forms(node: RunningNode, message_id: str) -> None:
    message = content(message_id, channel_id="odd")
    assert node.publish(message).status_code in (200, 201)
    by_query = node.http.get("/v1/messages", params={"message_id": message_id})
    assert by_query.json()["message"]["message_id"] == message_id
    if message_id not in (".", ".."):
        by_path = node.http.get(f"/v1/messages/{quote(message_id, safe='')}")
        assert by_path.content == by_query.content


@pytest.mark.parametrize("channel_id", ["", ".", "..", "a/b", "/", "messages", "%", "ü" * 128])
def test_a_channel_of_any_name_has_its_page(node: RunningNode, channel_id: str) -> None:
    node.publish(content("in odd channel", channel_id=channel_id))
    query = {"channel_id": channel_id}
    page = node.http.get("/v1/channels/messages", params=query).json()
    assert [m["message"].get("channel_id", "") for m in page["messages"]] == [channel_id]
    assert node.http.get("/v1/channels", params=query).json()["channel_id"] == channel_id
    if channel_id not in (".", ".."):
        path = f"/v1/channels/{quote(channel_id, safe='')}"
        assert node.http.get(f"{path}/messages").json() == page
        assert node.http.get(path).json()["count"] == 1


@pytest.mark.parametrize("dialect", Dialect)
def test_a_frame_is_served_byte_for_byte(node: RunningNode, dialect: Dialect) -> None:
    history = (HistoryEntry("before"),)
    message = content(f"bytes {dialect.label}", causal_history=history)
    frame = encode(message, dialect)
    assert node.http.post("/v1/messages", content=frame, headers=PROTOBUF).status_code == 201
    answer = node.http.get(f"/v1/messages/{quote(message.message_id)}", headers=WANTS_PROTOBUF)
    digest = entry_digest(message).hex()
    assert answer.content == frame
    assert answer.headers["content-type"] == "application/x-protobuf"
    assert answer.headers["etag"] == f'"{frame_hash(frame).hex()}"'
    assert answer.headers["sds-digest"] == digest
    assert answer.headers["sds-variants"] == "1"
    assert answer.headers["vary"] == "accept"
    by_digest = node.http.get(f"/v1/entries/{digest}", headers=WANTS_PROTOBUF)
    assert by_digest.content == frame
    assert "immutable" in by_digest.headers["cache-control"]


@pytest.mark.parametrize(
    ("message_id", "fields"),
    [("sync", {"content": b""}), ("ephemeral", {"lamport_timestamp": None})],
)
def test_sync_and_ephemeral_messages_are_relayed_and_not_stored(
    node: RunningNode, message_id: str, fields: dict[str, Any]
) -> None:
    answer = node.publish(content(message_id, **fields))
    assert (answer.status_code, answer.json()["outcome"]) == (202, "relayed")
    assert answer.json()["digest"] is None
    assert node.http.get(f"/v1/messages/{message_id}").status_code == 404


def test_what_a_get_gives_can_be_posted_back(node: RunningNode) -> None:
    history = (HistoryEntry("h-1", b"\x01\x02", "bob"),)
    message = content("round trip", causal_history=history, sender_id="alice", bloom_filter=b"\xff")
    node.publish(message, Dialect.NIM)
    document = node.http.get("/v1/messages/round%20trip").json()
    assert document["message"]["causal_history"] == [
        {
            "message_id": "h-1",
            "retrieval_hint": base64.b64encode(b"\x01\x02").decode(),
            "sender_id": "bob",
        }
    ]
    assert document["meta"]["dialect"] == "nim"
    again = node.http.post("/v1/messages", json=document)
    assert (again.status_code, again.json()["digest"]) == (200, entry_digest(message).hex())


def test_each_form_has_its_own_etag_and_if_none_match_gives_304(node: RunningNode) -> None:
    node.publish(content("tagged"))
    tags = set()
    for accept in ("application/json", "application/x-protobuf"):
        whole = node.http.get("/v1/messages/tagged", headers={"accept": accept})
        tags.add(etag := whole.headers["etag"])
        for known in (etag, f'"other", W/{etag}', "*"):
            headers = {"accept": accept, "if-none-match": known}
            again = node.http.get("/v1/messages/tagged", headers=headers)
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == etag
        changed = {"accept": accept, "if-none-match": '"other"'}
        assert node.http.get("/v1/messages/tagged", headers=changed).status_code == 200
    assert len(tags) == 2


def test_variants_are_listed_and_the_first_stays_served(node: RunningNode) -> None:
    first, second = (content("varied", content=text) for text in (b"one", b"two"))
    node.publish(first)
    node.publish(second)
    served = node.http.get("/v1/messages/varied").json()
    assert served["meta"]["digest"] == entry_digest(first).hex()
    assert served["meta"]["variants"] == [entry_digest(second).hex()]
    picked = {"digest": entry_digest(second).hex()}
    other = node.http.get("/v1/messages/varied", params=picked).json()
    assert other["meta"]["digest"] == picked["digest"]
    assert other["meta"]["variants"] == [entry_digest(first).hex()]
    assert node.http.get("/v1/messages/other", params=picked).status_code == 404
    header = node.http.get("/v1/messages/varied", headers=WANTS_PROTOBUF).headers["sds-variants"]
    assert header == "2"
    channel = {"channel_id": served["message"]["channel_id"], "limit": 1_000}
    page = node.http.get("/v1/channels/messages", params=channel).json()["messages"]
    variants = {each["meta"]["digest"]: each["meta"]["variants"] for each in page}
    assert variants[entry_digest(first).hex()] == [entry_digest(second).hex()]
    assert variants[entry_digest(second).hex()] == [entry_digest(first).hex()]
    assert sum(map(bool, variants.values())) == 2


def test_a_channel_narrows_a_look_up_by_id(node: RunningNode) -> None:
    for channel_id in ("one", "two"):
        node.publish(content("shared", channel_id=channel_id))
    for channel_id in ("one", "two"):
        query = {"message_id": "shared", "channel_id": channel_id}
        found = node.http.get("/v1/messages", params=query).json()
        assert found["message"]["channel_id"] == channel_id
    assert node.http.get("/v1/messages/shared?channel_id=three").status_code == 404


def test_hints_from_header_and_body_lead_to_the_message(node: RunningNode) -> None:
    frame = encode(content("hinted"))
    headers = [*PROTOBUF.items(), ("Retrieval-Hint", "A1a1"), ("Retrieval-Hint", "b2, c3")]
    node.http.post("/v1/messages", content=frame, headers=headers)
    for hint in ("a1a1", "B2", "c3"):
        page = node.http.get(f"/v1/hints/{hint}").json()
        assert [m["message"]["message_id"] for m in page["messages"]] == ["hinted"]
    assert node.http.get("/v1/messages/hinted").json()["meta"]["hints"] == ["a1a1", "b2", "c3"]
    page = node.http.get("/v1/hints/d4").json()
    assert page == {"messages": [], "next": None, "left_out": []}


def test_a_hint_in_base64_is_refused_with_its_hexadecimal_form(node: RunningNode) -> None:
    """As it stands in a history of a message in JSON."""
    message = {"message_id": "h", "channel_id": "c", "lamport_timestamp": "1", "content": "aGk="}
    answers = [
        node.http.get("/v1/hints/qrs="),
        node.http.post("/v1/messages/lookup", json={"retrieval_hints": ["qrs="]}),
        node.http.post("/v1/messages", json={"message": message, "retrieval_hints": ["qrs="]}),
        node.http.post(
            "/v1/messages", json={"message": message}, headers={"Retrieval-Hint": "qrs="}
        ),
    ]
    for answer in answers:
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (400, "invalid_hex")
        assert problem["detail"].endswith("; if this is base64, write aabb")
    no_base64 = node.http.get("/v1/hints/%25").json()["detail"]
    assert no_base64.endswith("hints are base64 only inside a message in JSON")


def test_one_bad_item_spoils_no_other_item_of_a_batch(node: RunningNode) -> None:
    batch = wire.PublishBatch()
    batch.items.add(frame=encode(content("batch-1")), retrieval_hints=[b"\x77"])
    batch.items.add(frame=b"\xff")
    batch.items.add(frame=encode(content("batch-2", content=b"")))
    batch.items.add(frame=encode(content("batch-1")))
    body = batch.SerializeToString()
    answer = node.http.post("/v1/messages/batch", content=body, headers=PROTOBUF | WANTS_PROTOBUF)
    outcomes = wire.PublishOutcomes.FromString(answer.content).outcomes
    assert [o.outcome for o in outcomes] == ["stored", "refused", "relayed", "duplicate"]
    assert outcomes[1].problem.code == "malformed_frame"
    assert node.http.get("/v1/hints/77").json()["messages"][0]["message"]["message_id"] == "batch-1"


def test_ndjson_lines_have_outcomes_in_order(node: RunningNode) -> None:
    lines = [
        '{"message": {"message_id": "line-1", "channel_id": "c", "lamport_timestamp": 1, "content": "aGk="}, "retrieval_hints": ["0e"]}',
        "not json",
        "",
        '{"message": {"message_id": "line-2"}}',
        '{"massage": {}}',
        '{"message": {"message_id": "line-3", "channel_id": "c", "content": "aGk="}}',
    ]
    answer = node.http.post("/v1/messages/batch", content="\r\n".join(lines), headers=NDJSON)
    outcomes = answer.json()["outcomes"]
    codes = [o.get("problem", {}).get("code", o["outcome"]) for o in outcomes]
    assert codes == [
        "stored",
        "invalid_body",
        "no_content_no_lamport",
        "invalid_json_message",
        "relayed",
    ]


def look_up(node: RunningNode, **wanted: Any) -> dict[str, Any]:
    answer = node.http.post("/v1/messages/lookup", json=wanted)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_a_look_up_says_what_is_here_and_what_is_missing(node: RunningNode) -> None:
    headers = {**PROTOBUF, "Retrieval-Hint": "5555"}
    node.http.post("/v1/messages", content=encode(content("wanted")), headers=headers)
    wanted = {"message_ids": ["wanted", "absent"], "retrieval_hints": ["5555", "6666"]}
    reply = look_up(node, **wanted)
    keys = [match["key"] for match in reply["found"]]
    assert keys == [{"message_id": "wanted"}, {"retrieval_hint": "5555"}]
    assert {m["message"]["message_id"] for m in reply["found"]} == {"wanted"}
    assert reply["missing"] == [{"message_id": "absent"}, {"retrieval_hint": "6666"}]
    assert reply["not_examined"] == []
    assert look_up(node, **wanted, channel_id="elsewhere")["found"] == []


def test_presence_only_answers_with_digests(node: RunningNode) -> None:
    message = content("present")
    node.publish(message)
    (match,) = look_up(node, message_ids=["present"], presence_only=True)["found"]
    assert match == {"key": {"message_id": "present"}, "digest": entry_digest(message).hex()}


def test_a_look_up_that_is_cut_says_how_to_go_on(tmp_path_factory: pytest.TempPathFactory) -> None:
    limits = replace(DEFAULT_LIMITS, reply_bytes_max=5_000)
    ids = [f"big-{n}" for n in range(10)]
    with running_node(tmp_path_factory.mktemp("small"), limits) as small:
        for message_id in ids:
            small.publish(content(message_id, content=bytes(1_000)))
        found, rest = [], ids
        while rest:
            reply = look_up(small, message_ids=rest)
            assert reply["found"]
            assert sum(len(m["message"]["content"]) for m in reply["found"]) < 10_000
            found += [match["key"]["message_id"] for match in reply["found"]]
            rest = [key["message_id"] for key in reply["not_examined"]]
    assert found == ids


def test_the_protobuf_form_of_a_look_up_says_the_same(node: RunningNode) -> None:
    node.publish(content("both forms"))
    request = wire.LookupRequest(message_ids=["both forms", "nope"])
    answer = node.http.post(
        "/v1/messages/lookup",
        content=request.SerializeToString(),
        headers=PROTOBUF | WANTS_PROTOBUF,
    )
    reply = wire.LookupReply.FromString(answer.content)
    assert [m.key.message_id for m in reply.found] == ["both forms"]
    assert reply.found[0].message.frame == encode(content("both forms"))
    assert [key.message_id for key in reply.missing] == ["nope"]


def batch(node: RunningNode, items: list[tuple[Message, bytes]]) -> None:
    """Publish messages, each with a hint or with nothing."""
    published = wire.PublishBatch(
        items=[
            wire.PublishItem(frame=encode(message), retrieval_hints=[hint] if hint else [])
            for message, hint in items
        ]
    )
    answer = node.http.post(
        "/v1/messages/batch", content=published.SerializeToString(), headers=PROTOBUF
    )
    assert {each["outcome"] for each in answer.json()["outcomes"]} == {"stored"}


@pytest.mark.parametrize("spam_from", ["publishers", "histories"])
def test_a_channel_finds_its_hint_however_many_others_claim_it(
    node: RunningNode, spam_from: str
) -> None:
    hint, good = spam_from.encode() * 3, f"good {spam_from}"
    if spam_from == "publishers":
        spam = [(content(f"spam {n}", f"spam {spam_from}"), hint) for n in range(1_000)]
    else:
        told = [HistoryEntry(f"nothing {n}", hint) for n in range(8 * 256)]
        spam = [
            (content(f"told {n}", f"spam {n}", causal_history=tuple(told[n : n + 256])), b"")
            for n in range(0, len(told), 256)
        ]
    batch(node, spam)
    reference = (HistoryEntry("wanted", hint),)
    own_hint = hint if spam_from == "publishers" else b""
    batch(
        node,
        [
            (content("wanted", good), own_hint),
            (content("next", good, causal_history=reference), b""),
        ],
    )
    body = {"retrieval_hints": [hint.hex()], "channel_id": good}
    for presence_only in (True, False):
        asked = {**body, "presence_only": presence_only}
        answer = node.http.post("/v1/messages/lookup", json=asked).json()
        assert (answer["missing"], answer["not_examined"]) == ([], [])
        wanted = entry_digest(content("wanted", good)).hex()
        assert [each["digest"] for each in answer["found"]] == [wanted]
    page = node.http.get(f"/v1/hints/{hint.hex()}", params={"channel_id": good, "limit": 1}).json()
    assert [each["message"]["message_id"] for each in page["messages"]] == ["wanted"]


def test_a_hint_whose_claims_were_not_all_examined_is_never_called_missing(
    node: RunningNode,
) -> None:
    hint = b"much told of"
    told = [HistoryEntry(f"nothing {n}", hint) for n in range(4 * 256)]
    spam = [
        (content(f"crowd {n}", "crowd", causal_history=tuple(told[n : n + 256])), b"")
        for n in range(0, len(told), 256)
    ]
    batch(node, spam)
    for body in ({}, {"channel_id": "crowd"}):
        asked = {**body, "retrieval_hints": [hint.hex(), b"nobody".hex()]}
        answer = node.http.post("/v1/messages/lookup", json=asked).json()
        assert answer["not_examined"] == [{"retrieval_hint": hint.hex()}]
        assert answer["missing"] == [{"retrieval_hint": b"nobody".hex()}]


def test_a_sync_message_with_the_id_of_a_missing_one_hides_no_gap(node: RunningNode) -> None:
    head = content("m1", "blinded", causal_history=(HistoryEntry("m0", b"hint"),))
    assert node.publish(head).status_code == 201
    url, ancestors = "/v1/channels/blinded/gaps", "/v1/messages/m1/ancestors?channel_id=blinded"
    before = node.http.get(url).json()["gaps"]
    assert node.publish(Message("m0", "blinded", lamport_timestamp=1)).status_code == 202
    # Also where the reference comes after the sync message.
    node.publish(content("m2", "blinded", causal_history=(HistoryEntry("m0"),)))
    after = node.http.get(url).json()["gaps"]
    assert [gap["message_id"] for gap in after] == [gap["message_id"] for gap in before] == ["m0"]
    assert [gap["met_as_sync"] for gap in (*before, *after)] == [False, True]
    assert after[0]["hints"] == [b"hint".hex()]
    walked = node.http.get(ancestors).json()
    assert (walked["missing"], walked["met_as_sync"]) == (["m0"], ["m0"])
    page = wire.GapPage.FromString(node.http.get(url, headers=WANTS_PROTOBUF).content)
    assert [(each.message_id, each.met_as_sync) for each in page.gaps] == [("m0", True)]
    walk = wire.AncestorsPage.FromString(node.http.get(ancestors, headers=WANTS_PROTOBUF).content)
    assert (list(walk.missing), list(walk.met_as_sync)) == (["m0"], ["m0"])
    assert node.publish(content("m0", "blinded")).status_code == 201
    assert node.http.get(url).json()["gaps"] == []


def test_a_message_in_json_with_too_many_brackets_is_refused_before_it_is_parsed(
    node: RunningNode,
) -> None:
    most = DEFAULT_LIMITS.json_brackets_max
    # Three brackets around the ID.
    good, bad = (
        b'{"message":{"message_id":"x","channel_id":"c","lamport_timestamp":"1","content":"aGk=",'
        b'"causal_history":[{"message_id":"%s"}]}}' % (b"[{" * (count // 2))
        for count in (1_000, most)
    )
    answers = [
        node.http.post("/v1/messages", content=each, headers={"content-type": "application/json"})
        for each in (good, bad)
    ]
    assert [answer.status_code for answer in answers] == [201, 413]
    assert answers[1].json()["code"] == "too_many_items"
    # A document that is not JSON shows that it was not parsed.
    lines = b"\n".join((good, bad, b"[" * (most + 1), b"[" * most))
    headers = {"content-type": "application/x-ndjson"}
    outcomes = node.http.post("/v1/messages/batch", content=lines, headers=headers).json()[
        "outcomes"
    ]
    assert outcomes[0]["outcome"] == "duplicate"
    codes = [outcome["problem"]["code"] for outcome in outcomes[1:]]
    assert codes == ["too_many_items", "too_many_items", "invalid_body"]
