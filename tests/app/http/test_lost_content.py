"""A store whose content rots says so wherever it is read, and is mended by whatever brings it back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.proto import parse_length_prefixed
from sqlalchemy import Connection, text

from app.cli.files import delimited
from app.entries import NewEntry
from app.server.limits import DEFAULT_LIMITS, Limits
from sdstore.client import StoreClient
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, frame_hash
from sdstore.wire import store_pb2 as wire
from tests.app.http.test_grants import ByHeader
from tests.app.http.test_live import live
from tests.app.store.test_frames import (
    conversation,
    cut,
    delete,
    flip,
    in_database,
    spoil,
    users_of,
)
from tests.support.cli import cli
from tests.support.federation import message
from tests.support.server import PROTOBUF, WANTS_PROTOBUF, RunningNode, running_node
from tests.support.stores import Stores, entry_of

pytestmark = pytest.mark.anyio

CHANNEL = "channel"
HINT = bytes(range(32))
BAD, HEAD, COUNT = 3, 5, 6
"""The message that rots, the last one, and how many there are: each is the cause of the next."""


@contextmanager
def node_over(folder: Path, url: str, limits: Limits = DEFAULT_LIMITS) -> Iterator[RunningNode]:
    with running_node(folder, limits, database_url=url) as running:
        yield running


def small() -> list[NewEntry]:
    """Small messages, each the cause of the next."""
    return [
        entry_of(
            encode(
                message(
                    number, CHANNEL, causal_history=(HistoryEntry(f"m{number - 1}"),) * (number > 0)
                )
            ),
            *([HINT] if number == BAD else []),
        )
        for number in range(COUNT)
    ]


def publish_batch(node: RunningNode, entries: list[NewEntry]) -> list[str]:
    body = wire.PublishBatch(
        items=[
            wire.PublishItem(frame=e.frame, retrieval_hints=[c.hint for c in e.claims])
            for e in entries
        ]
    )
    answer = node.http.post(
        "/v1/messages/batch", content=body.SerializeToString(), headers=PROTOBUF
    )
    return [each["outcome"] for each in answer.json()["outcomes"]]


def publish(node: RunningNode, entry: NewEntry) -> tuple[int, str]:
    answer = node.http.post("/v1/messages", content=entry.frame, headers=PROTOBUF)
    return answer.status_code, answer.json()["outcome"]


def get(node: RunningNode, entry: NewEntry) -> tuple[int, str | bytes]:
    """The status, and the frame or the code of the problem."""
    query = {"message_id": entry.message.message_id, "channel_id": CHANNEL}
    answer = node.http.get("/v1/messages", params=query, headers=WANTS_PROTOBUF)
    return answer.status_code, answer.content if answer.is_success else answer.json()["code"]


def gauge(node: RunningNode, name: str) -> float:
    lines = node.http.get("/metrics").text.splitlines()
    (value,) = [line.split()[-1] for line in lines if line.split()[0] == f"sdstore_{name}"]
    return float(value)


def harm_frame(url: str, seq: int, harm: Callable[[Connection, str, int], None]) -> None:
    in_database(url, lambda connection: harm(connection, "frames", seq))


def seq_of(node: RunningNode, entry: NewEntry) -> int:
    return int(node.http.get(f"/v1/entries/{entry.digest.hex()}").json()["meta"]["seq"])


@pytest.mark.parametrize("harm", [spoil, cut, delete])
@pytest.mark.parametrize("batch", [False, True])
def test_lost_content_is_a_503_and_publishing_it_again_stores_it(
    stores: Stores,
    tmp_path: Path,
    harm: Callable[[Connection, str, int], None],
    batch: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, entries = stores.new_url(), small()
    bad = entries[BAD]
    with node_over(tmp_path, url) as node:
        assert publish_batch(node, entries) == ["stored"] * COUNT
        harm_frame(url, seq_of(node, bad), harm)
    with node_over(tmp_path, url) as node:
        caplog.clear()
        assert get(node, bad) == (503, "content_lost")
        named = f"message {bad.message.message_id!r} of channel {CHANNEL!r} is lost"
        assert sum(named in each.getMessage() for each in caplog.records) == 1
        assert node.http.get(f"/v1/entries/{bad.digest.hex()}").json()["code"] == "content_lost"
        assert node.http.get("/readyz").status_code == 200
        assert gauge(node, "content_lost") == 1
        assert node.http.get("/v1/info").json()["content"]["lost"] == 1
        if batch:
            outcomes = publish_batch(node, entries)
            assert outcomes == ["stored" if e is bad else "duplicate" for e in entries]
        else:
            assert publish(node, bad) == (201, "stored")
        assert publish(node, bad) == (200, "duplicate")
        assert get(node, bad) == (200, bad.frame)
        assert gauge(node, "content_lost") == 0
        feed = node.http.get("/v1/feed").json()
        assert (
            len({m["meta"]["digest"] for m in feed["messages"]}) == len(feed["messages"]) == COUNT
        )


def test_a_publication_is_no_duplicate_of_content_that_nobody_can_read(
    stores: Stores, tmp_path: Path
) -> None:
    url, entries = stores.new_url(), small()
    with node_over(tmp_path, url) as node:
        publish_batch(node, entries)
        harm_frame(url, BAD + 1, cut)
        # Nobody has read it since.
        assert publish(node, entries[BAD]) == (201, "stored")
        assert get(node, entries[BAD]) == (200, entries[BAD].frame)


def test_a_lost_filter_is_told_and_costs_no_content(stores: Stores, tmp_path: Path) -> None:
    url, entries = stores.new_url(), conversation(40, known=500)
    with node_over(tmp_path, url) as node:
        publish_batch(node, entries)
    in_database(url, lambda c: flip(c, "filter_references", 1))
    users = in_database(url, lambda c: users_of(c, 1))
    assert len(users) > 10
    with node_over(tmp_path, url) as node:
        for _ in range(2):  # as it is found, and as it is stored from then on
            for seq, entry in enumerate(entries, 1):
                path = f"/v1/entries/{entry.digest.hex()}"
                answer = node.http.get(path, headers=WANTS_PROTOBUF)
                shown = node.http.get(path).json()
                is_lost = seq in users
                assert answer.headers.get("sds-filter") == ("lost" if is_lost else None)
                assert shown["meta"].get("filter_lost") == (True if is_lost else None)
                assert answer.headers["etag"] == f'"{frame_hash(answer.content).hex()}"'
                assert shown["meta"]["frame_hash"] == frame_hash(answer.content).hex()
                assert entry_of(answer.content).digest == entry.digest
                assert (answer.content == entry.frame) is not is_lost
        assert gauge(node, "content_lost") == 0
        page = node.http.get("/v1/feed", params={"limit": 1_000}, headers=WANTS_PROTOBUF)
        told = wire.MessagePage.FromString(page.content).messages
        assert [each.seq for each in told if each.filter_lost] == users
        assert set(publish_batch(node, entries)) == {"duplicate"}


def test_lost_content_is_never_replaced_by_another_variant(stores: Stores, tmp_path: Path) -> None:
    url = stores.new_url()
    first = entry_of(encode(message(1, CHANNEL)))
    second = entry_of(encode(message(1, CHANNEL, content=b"other")))
    with node_over(tmp_path, url) as node:
        publish_batch(node, [first, second])
        harm_frame(url, 1, flip)
    with node_over(tmp_path, url) as node:
        for _ in range(2):
            assert get(node, first) == (503, "content_lost")
        # The other one is served to those who name it.
        assert node.http.get("/v1/entries/" + second.digest.hex()).status_code == 200
        variant = {"message_id": "m1", "digest": second.digest.hex()}
        answer = node.http.get("/v1/messages", params=variant)
        assert answer.json()["meta"]["digest"] == second.digest.hex()
        assert answer.json()["meta"]["variants"] == [first.digest.hex()]


def test_a_limited_caller_does_not_learn_what_is_lost_in_other_channels(tmp_path: Path) -> None:
    url, entries = f"sqlite:///{tmp_path}/store.db", small()
    bad = entries[BAD].digest
    with running_node(tmp_path, authorizer=ByHeader(), database_url=url) as node:
        publish_batch(node, entries)
        harm_frame(url, BAD + 1, cut)
    with running_node(tmp_path, authorizer=ByHeader(), database_url=url) as node:
        limited, everybody = {"x-caller": "limited"}, {"x-caller": "all"}
        for path, status in [
            (f"/v1/entries/{bad.hex()}", 503),
            (f"/v1/messages/m{BAD}", 503),
            ("/v1/feed", 200),
            (f"/v1/hints/{HINT.hex()}", 200),
        ]:
            assert node.http.get(path, headers=everybody).status_code == status
            answer = node.http.get(path, headers=limited)
            assert answer.status_code == (404 if status == 503 else 200), path
            assert bad.hex() not in answer.text
        body = {"digests": [bad.hex()]}
        answer = node.http.post("/v1/entries", json=body, headers=limited)
        assert answer.json() == {"missing": bad.hex()}


def test_every_answer_that_leaves_lost_content_out_says_so(stores: Stores, tmp_path: Path) -> None:
    url, entries = stores.new_url(), small()
    bad = entries[BAD].digest
    with node_over(tmp_path, url) as node:
        publish_batch(node, entries)
        harm_frame(url, BAD + 1, cut)
    with node_over(tmp_path, url) as node:
        in_channel = {"channel_id": CHANNEL}
        for path, query in [
            ("/v1/feed", {}),
            ("/v1/channels/messages", in_channel),
            ("/v1/channels/messages", {**in_channel, "order": "arrival", "direction": "desc"}),
            (f"/v1/hints/{HINT.hex()}", {}),
        ]:
            page = node.http.get(path, params=query)
            assert page.json().get("left_out") == [bad.hex()], path
            raw = node.http.get(path, params=query, headers=WANTS_PROTOBUF).content
            assert list(wire.MessagePage.FromString(raw).left_out) == [bad], path
        check_look_ups(node, bad)
        check_ancestors(node, bad)
        check_entries(node, bad, entries[0])
        check_live(node, bad)
        check_client(node, bad)


def check_look_ups(node: RunningNode, bad: bytes) -> None:
    body = {"message_ids": [f"m{BAD}", "m0"], "retrieval_hints": [HINT.hex()]}
    for presence_only in (False, True):
        asked = {**body, "presence_only": presence_only}
        found = node.http.post("/v1/messages/lookup", json=asked).json()
        assert [each["key"] for each in found["found"]] == [{"message_id": "m0"}]
        assert found["missing"] == []
        assert found["left_out"] == [
            {"key": {"message_id": f"m{BAD}"}, "digest": bad.hex()},
            {"key": {"retrieval_hint": HINT.hex()}, "digest": bad.hex()},
        ]


def check_ancestors(node: RunningNode, bad: bytes) -> None:
    body = {"channel_id": CHANNEL, "heads": [f"m{HEAD}"]}
    page = node.http.post("/v1/messages/ancestors", json=body).json()
    assert (page["missing"], page["left_out"]) == ([f"m{BAD}"], [bad.hex()])
    assert [each["message"]["message_id"] for each in page["messages"]] == ["m4"]


def check_entries(node: RunningNode, bad: bytes, whole: NewEntry) -> None:
    digests = [bytes(32), bad, whole.digest]
    body = {"digests": [digest.hex() for digest in digests]}
    lines = node.http.post("/v1/entries", json=body).text.splitlines()
    assert json.loads(lines[0]) == {"missing": bytes(32).hex()}
    assert json.loads(lines[1]) == {"lost": bad.hex()}
    request = wire.EntriesRequest(digests=digests).SerializeToString()
    headers = {**PROTOBUF, **WANTS_PROTOBUF}
    stream = BytesIO(node.http.post("/v1/entries", content=request, headers=headers).content)
    items = [parse_length_prefixed(wire.EntryItem, stream) for _ in digests]
    assert [item.WhichOneof("item") for item in items if item] == ["missing", "lost", "entry"]


def check_live(node: RunningNode, bad: bytes) -> None:
    cursor = node.http.get("/v1/feed", params={"limit": 1}).json()["next"]
    with live(node, after=cursor) as events:
        shown = [event for event in (next(events) for _ in range(COUNT - 1)) if event.data]
    assert [event.name for event in shown] == [
        "message",
        "message",
        "left_out",
        "message",
        "message",
    ]
    left_out = shown[BAD - 1]
    assert left_out.data == {"channel_id": CHANNEL, "message_id": f"m{BAD}", "digest": bad.hex()}
    with live(node, after=left_out.event_id) as events:
        assert next(events).message_id == f"m{BAD + 1}"


def check_client(node: RunningNode, bad: bytes) -> None:
    left_out: list[bytes] = []
    with StoreClient(node.url) as client:
        assert client.feed().left_out == (bad,)
        assert client.hint(HINT).left_out == (bad,)
        assert client.ancestors(CHANNEL, [f"m{HEAD}"]).left_out == (bad,)
        assert [m.digest for m in client.lookup([f"m{BAD}"]).left_out] == [bad]
        shown = list(client.messages(CHANNEL, page_size=2, on_left_out=left_out.extend))
    assert (len(shown), left_out) == (COUNT - 1, [bad])
    with StoreClient(node.url) as client:
        cursor = node.http.get("/v1/feed", params={"limit": 1}).json()["next"]
        with client.live(after=cursor, on_left_out=left_out.extend) as stream:
            assert [next(stream).message.message_id for _ in range(4)] == ["m1", "m2", "m4", "m5"]
    assert left_out == [bad, bad]


def test_a_fault_of_the_database_marks_nothing(stores: Stores, tmp_path: Path) -> None:
    url, entries = stores.new_url(), small()
    with node_over(tmp_path, url) as node:
        publish_batch(node, entries)
        in_database(url, lambda c: c.execute(text("ALTER TABLE frames RENAME TO elsewhere")))
        for entry in entries:
            assert get(node, entry)[0] >= 500
        in_database(url, lambda c: c.execute(text("ALTER TABLE elsewhere RENAME TO frames")))
        assert [get(node, entry) for entry in entries] == [(200, e.frame) for e in entries]
        assert gauge(node, "content_lost") == 0


@pytest.mark.parametrize("first", [0, BAD, COUNT])
def test_rot_that_nobody_reads_is_found_wherever_a_pass_begins(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr("app.store.recovery.random.randrange", lambda _: first)
    monkeypatch.setattr("app.store.recovery.FIRST_PASS_S", 0.0)
    limits = replace(DEFAULT_LIMITS, frames_read_interval_s=1, frames_read_percent_max=50)
    url, entries = stores.new_url(), small()
    with node_over(tmp_path, url, limits) as node:
        publish_batch(node, entries)
        harm_frame(url, BAD + 1, flip)
        until(lambda: gauge(node, "content_lost") == 1)
        assert node.http.get("/v1/info").json()["content"] == {"lost": 1}
        until(lambda: gauge(node, "verified_frames_total") >= 2 * COUNT)
        assert abs(gauge(node, "verification_pass_ended_seconds") - time.time()) < 60
        # The row is repaired: nobody asks for the message, and it is unmarked.
        harm_frame(url, BAD + 1, flip)
        until(lambda: gauge(node, "content_lost") == 0)
        assert get(node, entries[BAD]) == (200, entries[BAD].frame)


def test_an_import_mends_what_it_holds(stores: Stores, tmp_path: Path) -> None:
    url, entries = stores.new_url(), small()
    with node_over(tmp_path, url) as node:
        publish_batch(node, entries)
    harm_frame(url, BAD + 1, cut)
    file = tmp_path / "all.ldp"
    file.write_bytes(b"".join(delimited(entry.frame) for entry in entries))
    done = cli("import", file, "--database", url, "--json")
    assert done.json["counts"] == {"duplicate": COUNT - 1, "stored": 1}
    with node_over(tmp_path, url) as node:
        assert get(node, entries[BAD]) == (200, entries[BAD].frame)


def test_a_deep_check_names_and_marks_lost_content(stores: Stores, tmp_path: Path) -> None:
    url, entries = stores.new_url(), small()
    with node_over(tmp_path, url) as node:
        publish_batch(node, entries)
        harm_frame(url, BAD + 1, cut)
    deep = cli("check", "--deep", "--database", url, "--json")
    assert deep.code == 1
    assert deep.json["lost"] == 1
    assert any(entries[BAD].digest.hex() in damage for damage in deep.json["damages"])
    # The quick check counts the entries that the deep check marked.
    assert cli("check", "--database", url, "--json").json["lost"] == 1
    with node_over(tmp_path, url) as node:
        assert gauge(node, "content_lost") == 1
        assert publish(node, entries[BAD]) == (201, "stored")
    assert cli("check", "--deep", "--database", url, "--json").code == 0


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
