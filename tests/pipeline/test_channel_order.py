"""`snapshot order` shows what a node shows, of messages that participants in ordered mode wrote."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from app.cli.output import Exit
from app.ingest.prepare import Publication
from app.orders import Wanted
from pipeline.export import export_snapshot
from pipeline.ordering import ChannelError, channel_order
from sdstore.sds import Dialect, HistoryEntry, Message, ParticipantOptions, decode, encode
from tests.support.cli import cli
from tests.support.participants import CHANNEL, Device
from tests.support.server import running_node
from tests.support.snapshots import fill_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verbs")]

ORDERED = ParticipantOptions(bloom=None, sync_ms=0, ordered=True)
INDEXERS = ("--indexer", "ada", "--indexer", "bob", "--indexer", "cyn")


def chat(seed: int) -> list[bytes]:
    """Frames of four participants, one of whom is no indexer; they hear each other now and then."""
    rng = random.Random(seed)
    members = [Device(name, ORDERED) for name in ("ada", "bob", "cyn", "dora")]
    frames: list[bytes] = []
    for number in range(120):
        member = rng.choice(members)
        member.hear(*rng.sample(frames, len(frames) * 2 // 3), *frames[:-3])
        frames.append(member.say(f"line {number}"))
    return frames


def by_hand(message_id: str, sender_id: str, *causes: str, channel_id: str = CHANNEL) -> bytes:
    history = tuple(HistoryEntry(cause) for cause in causes)
    message = Message(message_id, channel_id, sender_id, 5, history, content=message_id.encode())
    return encode(message, Dialect.V2)


def fill(path: Path, frames: list[bytes]) -> None:
    publications: Iterator[Publication] = (Publication(frame) for frame in frames)
    fill_store(f"sqlite:///{path}", publications, len(frames), days=3)


def both(spark: SparkSession, data: Path, *arguments: str) -> tuple[list[Any], list[Any]]:
    """The lines of `order` of a running node and of a snapshot of its store."""
    with running_node(data) as node:
        of_node = cli("order", *arguments, "--json", "--node", node.url).lines
    export_snapshot(spark, f"sqlite:///{data / 'sdstore.db'}", data / "snapshot", rows_max=50)
    of_snapshot = cli("snapshot", "order", data / "snapshot", *arguments, "--json").lines
    for lines in (of_node, of_snapshot):
        lines[-1]["order"].pop("next_confirmed")  # a cursor of the node
    return of_node, of_snapshot


def test_a_snapshot_orders_a_chat_as_the_node_does(spark: SparkSession, tmp_path: Path) -> None:
    frames = chat(seed=1)
    random.Random(2).shuffle(frames)
    fill(tmp_path / "sdstore.db", [*frames, by_hand("x", "ada", channel_id="elsewhere")])
    of_node, of_snapshot = both(spark, tmp_path, CHANNEL, *INDEXERS)
    assert of_snapshot == of_node
    *items, whole = of_snapshot
    assert len(items) == 120
    assert whole["order"]["confirmed_count"] > 60
    assert not whole["order"]["breaches"]
    result = cli("snapshot", "order", tmp_path / "snapshot", CHANNEL, *INDEXERS)
    assert f"{whole['order']['confirmed_count']} messages confirmed" in result.err
    assert result.out.count("confirmed") == whole["order"]["confirmed_count"]


def test_variants_missing_senderless_retired_and_lost_messages_are_shown_as_the_node_shows_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    frames = chat(seed=3)
    ids = [decode(frame)[0].message_id for frame in frames]
    frames.insert(0, by_hand(ids[7], "ada", "nowhere at all"))  # a copy that the ID disproves
    extra = [
        by_hand("nobody", "", ids[0]),
        by_hand("orphan", "dora", "nowhere"),
        by_hand(ids[4], "dora"),  # another one
        by_hand("twice", "ada"),
        by_hand("twice", "ada", "nobody"),  # another message with a known ID
        by_hand("retired", "dora"),
        by_hand("lost", "dora"),
        by_hand("after", "dora", "retired", "lost"),
    ]
    path = tmp_path / "sdstore.db"
    fill(path, [*frames, *extra])
    with closing(sqlite3.connect(path)) as database, database:
        retired, lost = (len(frames) + at for at in (6, 7))
        database.execute(f"UPDATE messages SET frame_bytes = 0 WHERE seq = {retired}")
        database.execute(f"DELETE FROM frames WHERE seq IN ({retired}, {lost})")
    of_node, of_snapshot = both(spark, tmp_path, CHANNEL, *INDEXERS, "--relayed", "dora")
    assert of_snapshot == of_node
    whole = of_snapshot[-1]["order"]
    assert {each["kind"] for each in whole["breaches"]} == {"fork", "variant"}
    assert whole["senderless_count"] == 1
    assert set(whole["missing"]) == {"nowhere", "retired", "lost"}
    assert len(whole["left_out"]) == 2
    assert whole["waiting_count"] == 2


@pytest.mark.parametrize("senders", [("--indexer", "ada", "--relayed", "ada"), ("--indexer", "")])
def test_senders_that_are_named_twice_or_empty_are_refused(
    tmp_path: Path, senders: tuple[str, ...]
) -> None:
    result = cli("snapshot", "order", tmp_path, CHANNEL, *senders)
    assert (result.code, result.out) == (Exit.USAGE, "")
    assert "invalid_parameter" in result.err


def test_a_channel_that_the_snapshot_lacks_is_not_found(
    spark: SparkSession, snapshot: Path
) -> None:
    with pytest.raises(ChannelError, match="no such channel"):
        channel_order(spark, snapshot, Wanted("no such channel", ("ada",), ()))
