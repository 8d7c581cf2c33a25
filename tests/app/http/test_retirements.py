"""Retired messages lose their content for good and stay elements: nothing brings them back."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message, entry_digest
from tests.support.cli import cli
from tests.support.federation import message
from tests.support.server import PROTOBUF, RunningNode, running_node
from tests.support.stores import PostgresStores

CHANNEL, HINT = "channel", b"a hint of m2".hex()
NEEDLE = random.Random(5).randbytes(300)
"""Content that no encoding of the store makes shorter."""

Start = Callable[..., Any]


def conversation() -> list[Message]:
    """m1 … m4, each the cause of the next; m2 has the needle."""
    return [
        message(
            number,
            CHANNEL,
            causal_history=(HistoryEntry(f"m{number - 1}"),) if number > 1 else (),
            content=NEEDLE if number == 2 else b"content %d" % number,
            sender_id="s",
        )
        for number in range(1, 5)
    ]


def publish_all(node: RunningNode) -> None:
    for each in conversation():
        headers = {**PROTOBUF, "retrieval-hint": HINT} if each.message_id == "m2" else PROTOBUF
        node.http.post("/v1/messages", content=encode(each), headers=headers).raise_for_status()


def retire(node: RunningNode, **body: object) -> dict[str, Any]:
    answer = node.http.post("/v1/retirements", json={"reason": "a test", **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def digest_of(message_id: str) -> str:
    return next(entry_digest(m).hex() for m in conversation() if m.message_id == message_id)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    with running_node(tmp_path / "a") as running:
        publish_all(running)
        yield running


def order_of(node: RunningNode) -> Any:
    query = {"channel_id": CHANNEL, "indexer": "s"}
    return node.http.get("/v1/channels/order", params=query).json()


def ids_of(order: dict[str, Any]) -> list[str]:
    return [each["message_id"] for each in order["items"] if each["confirmed"]]


def test_a_retired_message_is_410_wherever_it_is_asked_for_and_its_causes_stay_known(
    node: RunningNode,
) -> None:
    http, digest = node.http, digest_of("m2")
    before, root = order_of(node), http.get(f"/v1/channels/{CHANNEL}").json()["root"]
    assert retire(node, message_id="m2") | {"erasure": ""} == {
        "retired": 1,
        "ahead": 0,
        "already": 0,
        "erasure": "",
    }
    assert retire(node, message_id="m2")["already"] == 1
    for path in ("/v1/messages/m2", f"/v1/messages/m2?digest={digest}", f"/v1/entries/{digest}"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()["code"]) == (410, "retired"), path
    assert http.post("/v1/entries", json={"digests": [digest]}).json() == {"retired": digest}
    for path in (f"/v1/channels/{CHANNEL}/messages", "/v1/feed", "/v1/messages/m4/ancestors"):
        page = http.get(path).json()
        assert page["left_out"] == [digest], path
        assert "m2" not in [each["message"]["message_id"] for each in page["messages"]], path
    assert http.get("/v1/messages/m4/ancestors").json()["missing"] == []
    assert http.get(f"/v1/hints/{HINT}").json()["messages"] == []
    assert http.get(f"/v1/channels/{CHANNEL}/gaps").json()["gaps"] == []
    found = http.post("/v1/messages/lookup", json={"message_ids": ["m2"], "presence_only": True})
    assert found.json()["missing"] == [{"message_id": "m2", "state": "retired"}]
    assert found.json()["left_out"] == []
    assert http.get(f"/v1/channels/{CHANNEL}").json()["root"] == root
    assert ids_of(order_of(node)) == ids_of(before) == ["m1", "m2", "m3", "m4"]


@pytest.mark.parametrize("is_ahead", [False, True], ids=["retired", "retired before it came"])
def test_a_retired_message_does_not_come_back_by_publishing(tmp_path: Path, is_ahead: bool) -> None:
    whole, digest = conversation()[1], digest_of("m2")
    with running_node(tmp_path / "a") as node:
        if not is_ahead:
            publish_all(node)
        found = retire(node, digest=digest)
        assert (found["retired"], found["ahead"]) == (int(not is_ahead), int(is_ahead))
        answer = node.publish(whole)
        assert (answer.status_code, answer.json()["code"]) == (410, "retired")
    with running_node(tmp_path / "a") as node:  # a restart changes nothing
        assert node.publish(whole).json()["code"] == "retired"
        assert node.http.get("/v1/messages/m2").json()["code"] == "retired"
        feed = node.http.get("/v1/feed").json()
        assert feed["left_out"] == [digest]
    result = cli("check", "--deep", "--database", f"sqlite:///{tmp_path / 'a' / 'sdstore.db'}")
    assert result.code == 0, result.out + result.err


def test_a_peer_neither_gets_nor_brings_back_what_is_retired(tmp_path: Path) -> None:
    with (
        running_node(tmp_path / "a") as one,
        running_node(tmp_path / "b") as empty,
        running_node(tmp_path / "c") as full,
    ):
        publish_all(one)
        publish_all(full)
        retire(one, message_id="m2")
        session = sync(empty, one)
        assert (session["outcome"], session["entries_received"]) == ("in_sync", 3)
        assert {each["code"] for each in session["set_aside"]} == {"retired"}
        again = sync(empty, one)
        assert (again["outcome"], again["entries_received"], again["proved"]) == (
            "in_sync",
            0,
            True,
        )
        assert again["requests"] <= 2
        # The retiring side says the same of it, and asks a peer that has the content for nothing.
        assert {each["code"] for each in sync(one, empty)["set_aside"]} == {"retired"}
        with_content = sync(one, full)
        assert (with_content["entries_received"], with_content["set_aside_count"]) == (0, 0)
        assert one.http.get("/v1/messages/m2").status_code == 410
        assert full.http.get("/v1/messages/m2").status_code == 200
        # The content comes from elsewhere.
        assert sync(empty, full)["entries_received"] == 1
        assert empty.http.get("/v1/messages/m2").status_code == 200


def sync(node: RunningNode, peer: RunningNode) -> dict[str, Any]:
    started = node.http.post("/v1/syncs", json={"peer_url": peer.url}).json()
    until_s = time.monotonic() + 30
    while (found := node.http.get(f"/v1/syncs/{started['id']}").json())["state"] != "finished":
        assert time.monotonic() < until_s
        time.sleep(0.05)
    report: dict[str, Any] = found["report"]
    return report


def test_no_file_contains_the_content_once_the_erasure_is_done(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    with running_node(folder) as node:
        publish_all(node)
        assert files_with(folder, NEEDLE[:200])
        assert files_with(folder, bytes.fromhex(HINT))
        found = retire(node, message_id="m2")
        until_s = time.monotonic() + 10
        while found["erasure"] != "done":
            assert time.monotonic() < until_s, found
            time.sleep(0.1)
            found = node.http.get("/v1/retirements").json()
        assert files_with(folder, NEEDLE[:200]) == files_with(folder, bytes.fromhex(HINT)) == []


def files_with(folder: Path, needle: bytes) -> list[str]:
    return [
        each.name for each in folder.rglob("*") if each.is_file() and needle in each.read_bytes()
    ]


def test_postgresql_forgets_the_content_when_its_tables_are_written_anew(
    tmp_path: Path, postgres_stores: PostgresStores
) -> None:
    url = postgres_stores.new_url()
    with (
        running_node(tmp_path / "a", database_url=url) as node,
        closing(psycopg.connect(url, autocommit=True)) as store,
    ):
        publish_all(node)
        assert retire(node, message_id="m2")["erasure"] == "rewrite_needed"
        assert node.http.get("/v1/messages/m2").status_code == 410
        store.execute("CHECKPOINT")
        before = tables_of(store)
        assert any(NEEDLE[:200] in each.read_bytes() for each in before)
        for statement in ("VACUUM FULL frames", "VACUUM FULL published_claims", "CHECKPOINT"):
            store.execute(statement)
        for each in {*before, *tables_of(store)}:
            assert not each.exists() or NEEDLE[:200] not in each.read_bytes()
        assert node.http.get("/v1/messages/m3").status_code == 200


def tables_of(store: psycopg.Connection[Any]) -> list[Path]:
    """The files of the tables that had the content or its hints."""
    query = (
        "SELECT current_setting('data_directory') || '/' || pg_relation_filepath(c.oid) FROM pg_class c "
        "WHERE relname IN ('frames', 'published_claims')"
    )
    return [Path(each) for (each,) in store.execute(query)]


def test_a_retired_message_whose_tombstone_rots_stays_retired(tmp_path: Path) -> None:
    path = tmp_path / "a" / "sdstore.db"
    with running_node(tmp_path / "a") as node:
        publish_all(node)
        retire(node, message_id="m2")
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute("DELETE FROM frames WHERE seq = 2").rowcount == 1
    with running_node(tmp_path / "a") as node, running_node(tmp_path / "b") as peer:
        publish_all(peer)
        node.http.get("/v1/messages/m2")  # notices it
        assert node.http.get("/v1/messages/m2").json()["code"] == "retired"
        report = sync(node, peer)
        assert (report["entries_received"], report["lost_here"]) == (0, 0)
        assert node.http.get("/v1/messages/m2").json()["code"] == "retired"
    assert cli("check", "--deep", "--database", f"sqlite:///{path}").code == 0


def test_the_command_retires_and_says_what_is_left(node: RunningNode) -> None:
    result = cli("retire", "m2", "--reason", "asked for", "--node", node.url)
    assert (result.code, result.out) == (0, "1 message retired\n")
    assert "no longer contain the content" in result.err
    result = cli("retire", "--digest", "ab" * 32, "--reason", "known elsewhere", "--node", node.url)
    assert (result.code, "stored without content on arrival" in result.out) == (0, True)
    for arguments in (
        ("retire", "m2"),
        ("retire", "--reason", "x"),
        ("retire", "m", "--digest", "a"),
    ):
        assert cli(*arguments, "--node", node.url).code == 2
    assert cli("retire", "nobody", "--reason", "x", "--node", node.url).code == 1


def test_the_history_goes_too_where_that_is_asked_for(node: RunningNode) -> None:
    retire(node, message_id="m3", with_history=True)
    ancestors = node.http.get("/v1/messages/m4/ancestors").json()
    assert (ancestors["messages"], ancestors["missing"]) == ([], ["m3"])
    assert order_of(node)["left_out"] == [digest_of("m3")]
