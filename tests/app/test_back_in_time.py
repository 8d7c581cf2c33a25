"""A store that went back in time: a follower is refused or gets everything, and no cache is fooled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from blake3 import blake3

from app.access.operator import token_for
from app.server.node import INDEX_FILE
from sdstore.client import StoreClient
from sdstore.errors import StoreError
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from sdstore.wire.store_pb2 import PublishBatch, PublishItem
from tests.app.http.test_live import events_of, live
from tests.support.cli import cli
from tests.support.server import PROTOBUF, RunningNode, running_node
from tests.support.stores import Stores, taken_back

DATABASE = "sdstore.db"
CHANNEL = "c"


def publish(node: RunningNode, numbers: range, channel: str = CHANNEL) -> None:
    for number in numbers:
        message = Message(f"m{number}", channel, lamport_timestamp=number, content=b"x")
        assert node.publish(message).status_code == 201


def feed(
    node: RunningNode, after: str | None = None, path: str = "/v1/feed", **query: str
) -> httpx.Response:
    return node.http.get(path, params=query if after is None else {**query, "after": after})


def ids(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [each["message"]["message_id"] for each in answer.json()["messages"]]


def followed(node: RunningNode, after: str | None = None) -> list[str]:
    """Every ID of the feed after a cursor."""
    found: list[str] = []
    while page := ids(answer := feed(node, after)):
        found += page
        after = answer.json()["next"]
    return found


def names(numbers: range) -> list[str]:
    return [f"m{number}" for number in numbers]


def back_up(data_dir: Path, copy: Path) -> None:
    """`sdstore backup`."""
    assert cli("backup", copy, "--data-dir", data_dir).code == 0


def copy_by_hand(data_dir: Path, copy: Path) -> None:
    """As `cp` does while no node runs."""
    for each in data_dir.glob(f"{DATABASE}*"):
        shutil.copy(each, copy.with_name(each.name.replace(DATABASE, copy.name)))


def put_back(copy: Path, data_dir: Path) -> None:
    """The copy in place of the database; the rest of the folder stays."""
    for each in data_dir.glob(f"{DATABASE}*"):
        each.unlink()
    for each in copy.parent.glob(f"{copy.name}*"):
        shutil.copy(each, data_dir / each.name.replace(copy.name, DATABASE))


def code_of(answer: httpx.Response) -> tuple[int, Any]:
    return answer.status_code, answer.json().get("code")


ROLLED_BACK = (410, "cursor_rolled_back")


@pytest.mark.parametrize(
    ("path", "query"),
    [("/v1/feed", {}), (f"/v1/channels/{CHANNEL}/messages", {"order": "arrival"})],
)
@pytest.mark.parametrize("copied", [back_up, copy_by_hand])
@pytest.mark.parametrize("then", [0, 3, 5, 6])
def test_a_cursor_from_after_the_copy_is_refused_once_the_copy_serves(
    tmp_path: Path, path: str, query: dict[str, str], copied: Any, then: int
) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.db"
    with running_node(data) as node:
        publish(node, range(10))
    copied(data, copy)
    with running_node(data) as node:
        publish(node, range(10, 15))
        late = feed(node).json()["next"]
        middle = feed(node, limit="12").json()["next"]
        early = feed(node, limit="8").json()["next"]
    put_back(copy, data)
    with running_node(data) as node:
        publish(node, range(20, 20 + then))
        assert code_of(feed(node, late, path, **query)) == ROLLED_BACK
        assert code_of(feed(node, middle, path, **query)) == ROLLED_BACK
        # A cursor that is older than the fork goes on, and misses nothing.
        assert ids(feed(node, early, path, **query)) == names(range(8, 10)) + names(
            range(20, 20 + then)
        )


def root_of_feed(node: RunningNode) -> tuple[int, str]:
    """(count, root) of the channel as its own messages give them."""
    digests: list[bytes] = []
    after = None
    while page := (answer := feed(node, after)).json()["messages"]:
        digests += [bytes.fromhex(each["meta"]["digest"]) for each in page]
        after = answer.json()["next"]
    return len(digests), blake3(b"".join(sorted(digests))).hexdigest()


def told_root(node: RunningNode) -> tuple[int, str]:
    """(count, root) of the channel as the node tells them."""
    told = node.http.get(f"/v1/channels/{CHANNEL}").json()
    return told["count"], told["root"]


def test_the_index_file_of_a_copy_that_went_its_own_way_is_left_aside(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with running_node(one) as node:
        publish(node, range(10))
    shutil.copytree(one, two)
    for folder, first in ((one, 10), (two, 20)):
        with running_node(folder) as node:
            publish(node, range(first, first + 10))
            publish(node, range(99, 100))
    shutil.copy(one / INDEX_FILE, two / INDEX_FILE)
    with running_node(two) as node:
        assert told_root(node) == root_of_feed(node)
        assert told_root(node)[0] == 21


def test_a_live_reader_from_after_the_copy_is_refused_and_an_older_one_goes_on(
    tmp_path: Path,
) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy.db"
    with running_node(data) as node:
        publish(node, range(10))
        early = feed(node, limit="8").json()["next"]
        with live(node, after=early) as events:
            shown = [next(events) for _ in range(2)]
            assert [each.message_id for each in shown] == names(range(8, 10))
    back_up(data, copy)
    with running_node(data) as node:
        publish(node, range(10, 15))
        with node.http.stream("GET", "/v1/live") as stream:
            heartbeat = next(events_of(stream.iter_lines())).event_id
        with live(node) as events:
            publish(node, range(15, 16))
            late = next(events).event_id
    put_back(copy, data)
    with running_node(data) as node:
        publish(node, range(20, 27))
        for cursor in (heartbeat, late):
            for sent in ({"last-event-id": str(cursor)}, {}):
                query = {} if sent else {"after": str(cursor)}
                with node.http.stream("GET", "/v1/live", params=query, headers=sent) as answer:
                    assert answer.status_code == 410
                    answer.read()
                assert code_of(answer) == ROLLED_BACK
        for cursor in (early, shown[-1].event_id):
            with live(node, headers={"last-event-id": str(cursor)}) as events:
                first = 8 if cursor == early else 20
                assert next(events).message_id == f"m{first}"


def test_walks_that_hold_numbers_of_rows_are_refused_as_well(tmp_path: Path) -> None:
    """The pages of a hint and of ancestors: the numbers in their cursors mean other rows now."""
    data, copy = tmp_path / "data", tmp_path / "copy.db"
    hint = b"hint"

    def publish_chain(node: RunningNode, numbers: range) -> None:
        for number in numbers:
            history = (HistoryEntry(f"m{number - 1}"),) if number != numbers[0] else ()
            message = Message(
                f"m{number}",
                CHANNEL,
                lamport_timestamp=number,
                content=b"x",
                causal_history=history,
            )
            item = PublishItem(frame=encode(message), retrieval_hints=[hint])
            body = PublishBatch(items=[item]).SerializeToString()
            answer = node.http.post("/v1/messages/batch", content=body, headers=PROTOBUF)
            assert answer.status_code == 200, answer.text

    def walks(node: RunningNode, head: str, *after: str) -> list[httpx.Response]:
        cursors = [{"after": each} for each in after] or [{}, {}]
        ancestors = {"channel_id": CHANNEL, "limit": "2"}
        return [
            node.http.get(f"/v1/hints/{hint.hex()}", params={"limit": "2", **cursors[0]}),
            node.http.get(f"/v1/messages/{head}/ancestors", params={**ancestors, **cursors[1]}),
        ]

    with running_node(data) as node:
        publish_chain(node, range(8))
        early = [each.json()["next"] for each in walks(node, "m7")]
    back_up(data, copy)
    with running_node(data) as node:
        publish_chain(node, range(10, 15))
        late = [each.json()["next"] for each in walks(node, "m14")]
    put_back(copy, data)
    with running_node(data) as node:
        publish_chain(node, range(20, 26))
        assert [code_of(each) for each in walks(node, "m7", *late)] == [ROLLED_BACK] * 2
        assert [each.status_code for each in walks(node, "m7", *early)] == [200, 200]


def test_a_live_reader_gets_a_gap_when_the_database_goes_back_and_newer_cursors_are_refused(
    stores: Stores, tmp_path: Path
) -> None:
    url = stores.new_url()
    with (
        running_node(tmp_path, database_url=url) as node,
        StoreClient(node.url, token=token_for(node.url)) as client,
    ):
        publish(node, range(5))
        early = feed(node, limit="3").json()["next"]
        with live(node) as events, client.live() as stream:
            with taken_back(url):
                publish(node, range(5, 8))
                assert [next(events).message_id for _ in range(3)] == names(range(5, 8))
                assert [next(stream).message.message_id for _ in range(3)] == names(range(5, 8))
            publish(node, range(20, 22))
            gap = next(each for each in events if each.name != "comment")
            assert (gap.name, gap.event_id) == ("gap", None)
            late = gap.data["cursor"]
            for path in ("/v1/feed", "/v1/live"):
                assert code_of(feed(node, late, path)) == ROLLED_BACK
            # The client does not go on as if it had missed nothing.
            with pytest.raises(StoreError) as refused:
                next(stream)
            assert (refused.value.status, refused.value.code) == ROLLED_BACK
            publish(node, range(30, 31))
            last = next(each for each in events if each.name == "message")
        kept = [*names(range(5)), "m20", "m21", "m30"]
        assert last.message_id in kept
        assert followed(node) == kept
        assert followed(node, early) == kept[3:]
        assert followed(node, str(last.event_id)) == kept[kept.index(last.message_id) + 1 :]
