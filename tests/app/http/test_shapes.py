"""Lists and streams without bloom filters and with a short `meta`: the same messages, in fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdstore.client.clients import StoreClient
from sdstore.sds.codec import decode, encode, from_json
from sdstore.sds.model import HistoryEntry, Message, entry_digest
from sdstore.wire import store_pb2 as wire
from tests.app.http.test_live import live
from tests.support.server import RunningNode, running_node

FILTER = bytes(range(256)) * 64
CAUSES = (HistoryEntry("m0", b"", "ada"),)
WITH = Message("m1", "c", "ada", 1, causal_history=CAUSES, bloom_filter=FILTER, content=b"hi")
WITHOUT = Message("m2", "c", "ada", 2, content=b"hi")
PROTOBUF = {"accept": "application/x-protobuf"}
LOOKUP = {"message_ids": ["m1", "m2"], "channel_id": "c"}
LISTS = ("/v1/feed", "/v1/channels/c/messages", "/v1/hints/aa", "/v1/messages/lookup")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node")) as opened:
        for each in (WITH, WITHOUT):
            headers = {"content-type": PROTOBUF["accept"], "retrieval-hint": "aa"}
            opened.http.post("/v1/messages", content=encode(each), headers=headers)
        yield opened


def answer(
    node: RunningNode, path: str, headers: dict[str, str] | None = None, **query: str
) -> Any:
    if path.endswith("lookup"):
        return node.http.post(path, json=LOOKUP, params=query, headers=headers)
    return node.http.get(path, params=query, headers=headers)


def listed(node: RunningNode, path: str, **query: str) -> list[dict[str, Any]]:
    document = answer(node, path, **query).json()
    rows: list[dict[str, Any]] = document.get("messages") or document["found"]
    return rows


@pytest.mark.parametrize("path", LISTS)
def test_a_list_without_filters_has_the_same_entries_and_says_which_frames_are_cut(
    node: RunningNode, path: str
) -> None:
    whole, cut = listed(node, path), listed(node, path, filter="none")
    assert [from_json(each["message"]) for each in whole] == [WITH, WITHOUT]
    for full, bare, original in zip(whole, cut, (WITH, WITHOUT), strict=True):
        message = from_json(bare["message"])
        assert not message.bloom_filter
        assert entry_digest(message) == entry_digest(original)
        assert bare["meta"].get("filter_left_out", False) is bool(original.bloom_filter)
        hashes = None if original.bloom_filter else full["meta"]["frame_hash"]
        assert bare["meta"].get("frame_hash") == hashes


@pytest.mark.parametrize("path", LISTS)
def test_frames_in_protobuf_come_without_filters_and_are_marked(
    node: RunningNode, path: str
) -> None:
    reply = answer(node, path, PROTOBUF, filter="none")
    assert len(reply.content) < 1_000
    is_lookup = path.endswith("lookup")
    kind: Any = wire.LookupReply if is_lookup else wire.MessagePage
    page = kind.FromString(reply.content)
    found = [each.message for each in page.found] if is_lookup else page.messages
    assert [each.filter_left_out for each in found] == [True, False]
    for each in found:
        message, dialect = decode(each.frame)
        assert (entry_digest(message), dialect.label) == (each.digest, each.dialect)


@pytest.mark.parametrize("path", LISTS)
def test_a_short_meta_is_the_digest_and_the_sequence_number(node: RunningNode, path: str) -> None:
    first = listed(node, path, meta="short")[0]
    assert from_json(first["message"]) == WITH
    assert first["meta"] == {"digest": entry_digest(WITH).hex(), "seq": 1}


@pytest.mark.parametrize("path", [*LISTS, "/v1/live", "/v1/channels/c/live"])
@pytest.mark.parametrize("query", [{"filter": "no"}, {"meta": "none"}, {"filter": ""}])
def test_an_unknown_form_is_refused(node: RunningNode, path: str, query: dict[str, str]) -> None:
    reply = answer(node, path, **query)
    assert (reply.status_code, reply.json()["code"]) == (400, "invalid_parameter")


def test_live_readers_of_each_form_get_theirs(tmp_path: Path) -> None:
    sync = Message("s", "c", lamport_timestamp=3, bloom_filter=FILTER)
    with (
        running_node(tmp_path) as node,
        live(node) as whole,
        live(node, filter="none") as bare,
        live(node, "/v1/channels/c/live", filter="none", meta="short") as short,
    ):
        node.publish(WITH)
        stored, cut, least = next(whole).data, next(bare).data, next(short).data
        assert from_json(stored["message"]).bloom_filter == FILTER
        for each in (cut, least):
            assert not from_json(each["message"]).bloom_filter
        assert cut["meta"]["filter_left_out"]
        assert least["meta"] == {"digest": entry_digest(WITH).hex(), "seq": 1}
        node.publish(sync)
        stored, cut, least = next(whole).data, next(bare).data, next(short).data
        assert from_json(stored["message"]).bloom_filter == FILTER
        assert not from_json(cut["message"]).bloom_filter
        assert cut["meta"]["filter_left_out"]
        assert least["meta"] == {}


def test_one_event_in_sixteen_of_a_short_stream_has_an_id_to_resume_at(tmp_path: Path) -> None:
    sent = [replace(WITHOUT, message_id=f"m{n}") for n in range(40)]
    with running_node(tmp_path) as node:
        with live(node, meta="short") as events:
            for each in sent:
                node.publish(each)
            got = [next(events) for _ in sent]
        with_ids = [n for n, each in enumerate(got) if each.event_id]
        # Those that come in one part share its last event's.
        assert 1 <= len(with_ids) <= 2
        assert with_ids[0] >= 15
        last = with_ids[-1]
        with live(node, meta="short", after=str(got[last].event_id)) as events:
            assert next(events).message_id == f"m{last + 1}"


def test_the_client_takes_live_messages_without_filters_unless_asked(node: RunningNode) -> None:
    with StoreClient(node.url) as client:
        start = client.feed(limit=1).next
        assert all(not m.message.bloom_filter for m in client.feed(bloom_filter=False).messages)
        for bloom_filter in (False, True):
            with client.live(after=None, bloom_filter=bloom_filter) as stream:
                sent = Message(f"n{bloom_filter}", "c", "ada", 9, bloom_filter=FILTER, content=b"x")
                node.publish(sent)
                got = next(stream)
                assert got.digest == entry_digest(sent)
                assert got.message.bloom_filter == (FILTER if bloom_filter else b"")
        assert start is not None
