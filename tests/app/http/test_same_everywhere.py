"""A message reads the same whether it was published as a frame, JSON, a batch or NDJSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdstore.sds.codec import MessageError, decode, encode, to_json
from sdstore.sds.model import Dialect, HistoryEntry, Kind, Message, entry_digest
from sdstore.wire import store_pb2 as wire
from tests.support.server import PROTOBUF, RunningNode, running_node
from tests.support.stores import Stores

NDJSON = {"content-type": "application/x-ndjson"}
CHANNELS = st.sampled_from(["a", "b/c", ""])
IDS = st.sampled_from(["m1", "m2", "m/3", "ü"])
GARBAGE = (b"\xff", b"\x08\x01", b"{}")
HINTS = st.lists(st.sampled_from([b"\x01", b"\x02\x03"]), max_size=2, unique=True).map(tuple)
HISTORY = st.lists(
    st.builds(HistoryEntry, IDS, st.sampled_from([b"", b"\x04", b"\x01"]), st.just("")), max_size=2
).map(tuple)
MESSAGES = st.builds(
    Message,
    IDS,
    CHANNELS,
    lamport_timestamp=st.sampled_from([None, -5, 0, 1, 2**63 - 1]),
    causal_history=HISTORY,
    content=st.sampled_from([b"x", b"y", b""]),
).filter(lambda m: bool(m.content) or m.lamport_timestamp is not None)


@dataclass(frozen=True)
class Item:
    """A message with hints as its publisher has it, or bytes that are no message."""

    message: Message | None
    hints: tuple[bytes, ...] = ()
    garbage: bytes = field(default=b"\xff")


ITEMS = st.one_of(
    st.builds(Item, MESSAGES, HINTS),
    st.builds(Item, st.none(), garbage=st.sampled_from(GARBAGE)),
)


@dataclass
class Oracle:
    """The expected contents of a store, as plain dictionaries."""

    entries: dict[bytes, Message] = field(default_factory=dict)
    hints: dict[bytes, set[bytes]] = field(default_factory=dict)

    def take(self, item: Item) -> str:
        if item.message is None:
            return "refused"
        if item.message.kind is not Kind.CONTENT:
            return "relayed"
        message, _ = decode(encode(item.message))
        digest = entry_digest(message)
        outcome = "duplicate" if digest in self.entries else "stored"
        self.entries[digest] = message
        for hint in item.hints:
            self.hints.setdefault(hint, set()).add(digest)
        return outcome


def send_frames(node: RunningNode, items: list[Item]) -> list[str]:
    return [_one(node, PROTOBUF, _frame(item), item) for item in items]


def send_json(node: RunningNode, items: list[Item]) -> list[str]:
    headers = {"content-type": "application/json"}
    return [_one(node, headers, _document(item), item) for item in items]


def send_batch(node: RunningNode, items: list[Item]) -> list[str]:
    batch = wire.PublishBatch(
        items=[wire.PublishItem(frame=_frame(i), retrieval_hints=i.hints) for i in items]
    )
    return _many(node, PROTOBUF, batch.SerializeToString())


def send_ndjson(node: RunningNode, items: list[Item]) -> list[str]:
    return _many(node, NDJSON, b"\n".join(map(_document, items)))


WAYS: list[Callable[[RunningNode, list[Item]], list[str]]] = [
    send_frames,
    send_json,
    send_batch,
    send_ndjson,
]
PLAN = st.lists(
    st.tuples(st.sampled_from(WAYS), st.lists(ITEMS, min_size=1, max_size=6)), max_size=5
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, stores: Stores) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node"), database_url=stores.new_url()) as running:
        yield running


SERIAL = count()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(plan=PLAN)
def test_any_batching_by_any_way_gives_what_a_plain_oracle_gives(
    node: RunningNode, plan: list[tuple[Callable[..., list[str]], list[Item]]]
) -> None:
    suffix = f" run {next(SERIAL)}"
    oracle = Oracle()
    for send, items in plan:
        own = [_in_run(item, suffix) for item in items]
        assert send(node, own) == [oracle.take(item) for item in own]
    _compare_pages(node, oracle, suffix)
    _compare_hints(node, oracle, suffix)


def _in_run(item: Item, suffix: str) -> Item:
    """Every example has channels of its own, so that one node serves them all."""
    if item.message is None:
        return item
    fields = {name: getattr(item.message, name) for name in Message.__slots__}
    fields["channel_id"] += suffix
    return Item(Message(**fields), item.hints)


def _compare_pages(node: RunningNode, oracle: Oracle, suffix: str) -> None:
    for name in ("a", "b/c", ""):
        query = {"channel_id": name + suffix, "limit": 1_000}
        page = node.http.get("/v1/channels/messages", params=query).json()["messages"]
        found = [bytes.fromhex(m["meta"]["digest"]) for m in page]
        held = {d: m for d, m in oracle.entries.items() if m.channel_id == name + suffix}
        assert found == sorted(
            held, key=lambda d: (held[d].lamport_timestamp, held[d].message_id.encode(), d)
        )
        assert [m["message"] for m in page] == [to_json(held[d]) for d in found]


def _compare_hints(node: RunningNode, oracle: Oracle, suffix: str) -> None:
    for hint in (b"\x01", b"\x02\x03"):
        for name in ("a", "b/c", ""):
            query = {"channel_id": name + suffix}
            page = node.http.get(f"/v1/hints/{hint.hex()}", params=query).json()["messages"]
            found = {bytes.fromhex(m["meta"]["digest"]) for m in page}
            published = _of_channel(oracle.hints.get(hint, set()), oracle, name + suffix)
            from_history = _named_by_histories(hint, oracle, name + suffix)
            assert found == published | from_history


def _of_channel(digests: set[bytes], oracle: Oracle, channel_id: str) -> set[bytes]:
    return {digest for digest in digests if oracle.entries[digest].channel_id == channel_id}


def _named_by_histories(hint: bytes, oracle: Oracle, channel_id: str) -> set[bytes]:
    named = {
        entry.message_id
        for message in oracle.entries.values()
        if message.channel_id == channel_id
        for entry in message.causal_history
        if entry.retrieval_hint == hint
    }
    return {
        digest
        for digest, message in oracle.entries.items()
        if message.channel_id == channel_id and message.message_id in named
    }


def _frame(item: Item) -> bytes:
    return item.garbage if item.message is None else encode(item.message)


def _document(item: Item) -> bytes:
    if item.message is None:
        return item.garbage.replace(b"\n", b"")
    hints = [hint.hex() for hint in item.hints]
    return json.dumps({"message": to_json(item.message), "retrieval_hints": hints}).encode()


def _one(node: RunningNode, headers: dict[str, str], body: bytes, item: Item) -> str:
    hints = {"retrieval-hint": ",".join(hint.hex() for hint in item.hints)} if item.hints else {}
    answer = node.http.post("/v1/messages", content=body, headers={**headers, **hints})
    return _outcome(answer.json(), answer.status_code)


def _many(node: RunningNode, headers: dict[str, str], body: bytes) -> list[str]:
    answer = node.http.post("/v1/messages/batch", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return [outcome["outcome"] for outcome in answer.json()["outcomes"]]


def _outcome(document: dict[str, Any], status: int) -> str:
    assert status in (200, 201, 202) or document["status"] == status
    return str(document.get("outcome", "refused"))


def test_the_oracle_refuses_what_the_decoder_refuses() -> None:
    oracle = Oracle()
    for garbage in GARBAGE:
        with pytest.raises(MessageError):
            decode(garbage)
        assert oracle.take(Item(None, garbage=garbage)) == "refused"
    message, _ = decode(encode(Message("m", "c", lamport_timestamp=1, content=b"x")))
    assert [oracle.take(Item(message)) for _ in range(2)] == ["stored", "duplicate"]
    assert list(oracle.entries.values()) == [message]


def test_every_dialect_of_one_message_is_one_entry(node: RunningNode) -> None:
    message = Message("one entry", "dialects", lamport_timestamp=5, content=b"x")
    outcomes = [node.publish(message, dialect).json()["outcome"] for dialect in Dialect]
    assert outcomes == ["stored", "duplicate", "duplicate", "duplicate"]
