"""A store that went back in time: a follower is refused or gets everything, and no cache is fooled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from sdstore.sds.model import Message
from tests.support.cli import cli
from tests.support.server import RunningNode, running_node

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


@pytest.mark.parametrize("path", ["/v1/feed", f"/v1/channels/{CHANNEL}/messages"])
@pytest.mark.parametrize("copied", [back_up, copy_by_hand])
@pytest.mark.parametrize("then", [0, 3, 5, 6])
def test_a_cursor_from_after_the_copy_is_refused_once_the_copy_serves(
    tmp_path: Path, path: str, copied: Any, then: int
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
        assert code_of(feed(node, late, path, order="arrival")) == ROLLED_BACK
        assert code_of(feed(node, middle, path, order="arrival")) == ROLLED_BACK
        # A cursor that is older than the fork goes on, and misses nothing.
        assert ids(feed(node, early, path, order="arrival")) == names(range(8, 10)) + names(
            range(20, 20 + then)
        )
