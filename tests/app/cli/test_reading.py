"""tail, gaps, channels and peers."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import pytest

from app.cli.demo import running_node
from app.cli.files import delimited
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from tests.support.cli import cli, command, http_server
from tests.support.federation import message


def publish(node: str, *messages: Message) -> None:
    frames = b"".join(delimited(encode(each)) for each in messages)
    assert cli("publish", "-", "--node", node, stdin=frames).code == 0


@contextmanager
def tailing(*arguments: str) -> Iterator[Iterator[dict[str, object]]]:
    """The documents that `sdstore tail` prints, as they come."""
    with subprocess.Popen(
        command("tail", *arguments, "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    ) as process:
        assert process.stdout is not None
        try:
            yield (json.loads(line) for line in process.stdout)
        finally:
            process.kill()


def message_id(document: dict[str, object]) -> object:
    shown = document["message"]
    assert isinstance(shown, dict)
    return shown["message_id"]


def test_tail_shows_older_messages_and_then_new_ones_as_they_come(node: str) -> None:
    publish(node, *(message(number, "tail/a") for number in range(5)))
    with tailing("tail/a", "-n", "2", "--node", node) as documents:
        assert [message_id(next(documents)) for _ in range(2)] == ["m3", "m4"]
        publish(node, message(1, "tail/other"), message(7, "tail/a"))
        assert message_id(next(documents)) == "m7"
        publish(node, Message("sync", "tail/a", lamport_timestamp=9))
        relayed = next(documents)
        assert (message_id(relayed), relayed["meta"]) == ("sync", {"kind": "sync", "dialect": "v2"})


@pytest.mark.parametrize("events_before", [0, 1])
def test_tail_goes_on_where_it_was_when_the_node_comes_back(
    tmp_path: Path, events_before: int
) -> None:
    """Also where the node goes away before the first event."""
    numbers = iter(range(1, 10))
    with ExitStack() as stack:
        with running_node(tmp_path) as node:
            port = node.rpartition(":")[2]
            publish(node, message(next(numbers)))
            documents = stack.enter_context(tailing("c", "--node", node))
            assert message_id(next(documents)) == "m1"
            for number in islice(numbers, events_before):
                publish(node, message(number))
                assert message_id(next(documents)) == f"m{number}"
        missed, fresh = islice(numbers, 2)
        publish_offline(tmp_path, message(missed))
        with running_node(tmp_path, "--port", port):
            publish(node, message(fresh))
            found = [message_id(next(documents)) for _ in range(2)]
        assert found == [f"m{missed}", f"m{fresh}"]


def publish_offline(data_dir: Path, *messages: Message) -> None:
    frames = b"".join(delimited(encode(each)) for each in messages)
    assert cli("import", "-", "--data-dir", data_dir, stdin=frames).code == 0


def test_control_characters_of_a_message_do_not_reach_the_terminal(node: str) -> None:
    publish(node, message(1, "tail/c", content=b"\x1b[2J\x07 boo\r\nfake line"))
    (line,) = cli("tail", "tail/c", "--no-follow", "--node", node).out.splitlines()
    assert "\x1b" not in line
    assert "\\u001b[2J" in line


def test_gaps_lists_what_histories_name_and_nobody_sent(node: str) -> None:
    history = (HistoryEntry("lost", b"\x01\x02", ""), HistoryEntry("m1"))
    publish(node, message(1, "gaps"), message(2, "gaps", causal_history=history))
    found = cli("gaps", "gaps", "--json", "--node", node).json
    assert found == {"message_id": "lost", "hints": ["0102"], "met_as_sync": False}
    assert "lost" in cli("gaps", "gaps", "--node", node).out
    publish(node, Message("lost", "gaps", lamport_timestamp=3))
    assert cli("gaps", "gaps", "--json", "--node", node).json == {**found, "met_as_sync": True}
    assert "a sync message had this ID" in cli("gaps", "gaps", "--node", node).out


def test_a_channel_that_nobody_knows_is_told_from_one_without_gaps(node: str) -> None:
    publish(node, message(1, "no gaps"))
    assert cli("gaps", "no gaps", "--node", node).code == 0
    for verb in (("gaps", "typo"), ("gaps", "typo", "--json"), ("tail", "typo", "--no-follow")):
        unknown = cli(*verb, "--node", node)
        assert (unknown.code, "not_found" in unknown.err, unknown.out) == (1, True, "")
        assert "no message of channel" in unknown.err


def test_peers_are_added_listed_and_removed(node: str, other_node: str) -> None:
    added = cli("peers", "add", other_node, "--json", "--node", node).json
    assert (added["url"], added["origin"]) == (other_node, "added")
    assert cli("peers", "list", "--json", "--node", node).json["id"] == added["id"]
    shown = cli("peers", "list", "--node", node).out
    assert all(each in shown for each in (added["id"], "state", "for", "failures"))
    removed = cli("peers", "remove", other_node, "--json", "--node", node).json
    assert removed == {"removed": added["id"], "url": other_node}
    assert cli("peers", "list", "--json", "--node", node).out == ""
    assert cli("peers", "remove", added["id"], "--node", node).code == 1


def test_tail_names_what_is_left_out_and_passes_over_events_it_does_not_know() -> None:
    shown = {"message": {"message_id": "m1"}, "meta": {"digest": "d1"}}
    events = [
        (b"left_out", {"channel_id": "c", "message_id": "m0", "digest": "abcd"}),
        (b"of a later version", {"what": "ever"}),
        (b"message", shown),
    ]
    stream = b": here\nid: start\n\n" + b"".join(
        b"event: %s\ndata: %s\n\n" % (name, json.dumps(data).encode()) for name, data in events
    )
    with (
        http_server(200, stream, {"content-type": "text/event-stream"}) as url,
        subprocess.Popen(
            command("tail", "c", "-n", "0", "--node", url, "--json"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        printed = [process.stdout.readline() for _ in range(2)]
        process.kill()
    assert printed[0] == "the node has lost the content of message 'm0'\n"
    assert json.loads(printed[1]) == shown


def sent(message_id: str, sender_id: str, *causes: str, channel: str = "order") -> Message:
    history = tuple(map(HistoryEntry, causes))
    content = f"{message_id} by {sender_id}".encode()
    return Message(message_id, channel, sender_id, 1, history, content=content)


BY_THREE = ("--indexer", "ada", "--indexer", "bob", "--indexer", "cyn")


def test_order_shows_the_confirmed_prefix_and_then_the_tail(node: str) -> None:
    publish(node, sent("a0", "ada"), sent("b0", "bob", "a0"), sent("c0", "cyn", "b0"))
    publish(node, sent("x", "", "nowhere"))
    result = cli("order", "order", *BY_THREE, "--node", node)
    _, *rows = (line.split() for line in result.out.splitlines())
    assert [row[:3] for row in rows] == [
        ["confirmed", "a0", "ada"],
        ["tentative", "b0", "bob"],
        ["tentative", "c0", "cyn"],
    ]
    assert "a0 by ada" in result.out
    assert "1 message confirmed, 2 tentative" in result.err
    assert "1 message is not ordered yet, because others are missing: nowhere" in result.err
    *items, whole = cli("order", "order", *BY_THREE, "--json", "--node", node).lines
    assert [(each["message_id"], each["confirmed"]) for each in items] == [
        ("a0", True),
        ("b0", False),
        ("c0", False),
    ]
    assert [message_id(each) for each in items] == ["a0", "b0", "c0"]
    assert (whole["order"]["tail_count"], whole["order"]["missing"]) == (2, ["nowhere"])


def test_a_list_of_channels_that_fails_at_once_has_no_head(node: str) -> None:
    result = cli("channels", "--node", f"{node}/v1")
    assert (result.code != 0, result.out) == (True, "")
    assert "no_such_route" in result.err


@pytest.mark.parametrize("option", ["--token-file", "--ca-file"])
def test_an_option_behind_the_verb_that_comes_before_it_is_refused_with_its_place(
    option: str,
) -> None:
    refused = cli("peers", "list", option, "FILE")
    assert refused.code == 2
    assert f"sdstore {option} FILE VERB" in refused.err
