"""`sdstore sync` where there is nothing to compare, and where a sync is under way already."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.access.operator import token_for
from app.cli.files import delimited
from sdstore.client import StoreClient
from sdstore.sds.codec import encode
from tests.support.cli import cli, command
from tests.support.federation import message

WAIT_S_MAX = 60.0


@pytest.fixture
def stuck() -> Iterator[str]:
    """The URL of a peer that takes connections and does not answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_sync_names_each_channel_that_neither_side_knows(node: str, other_node: str) -> None:
    frame = encode(message(1, "sync/known"))
    assert cli("publish", "-", "--node", node, "--format", "frame", stdin=frame).code == 0
    flags = ("--node", node, "--channel", "sync/knwon", "--channel", "sync/known")
    result = cli("sync", other_node, *flags)
    assert (result.code, "received" in result.out or "sent 1 entry" in result.out) == (1, True)
    error = f"sdstore: not_found: neither {node} nor {other_node} has messages of channel"
    assert result.err == f"{error} 'sync/knwon'\n"
    as_json = cli("sync", other_node, *flags, "--json")
    assert (as_json.code, as_json.err, as_json.json["report"]["outcome"]) == (
        1,
        result.err,
        "in_sync",
    )
    assert cli("sync", other_node, "--node", node, "--channel", "sync/known").code == 0


def test_a_sync_of_unknown_channels_alone_is_not_called_in_sync(node: str, other_node: str) -> None:
    flags = ("--node", node, "--channel", "sync/typo", "--channel", "sync/other")
    result = cli("sync", other_node, *flags)
    error = f"sdstore: not_found: neither {node} nor {other_node} has messages of channel"
    assert (result.code, result.out) == (1, "")
    assert result.err == f"{error} 'sync/typo'\n{error} 'sync/other'\n"
    as_json = cli("sync", other_node, *flags, "--json")
    assert (as_json.code, as_json.err) == (1, result.err)
    assert as_json.json["report"]["outcome"] == "in_sync"


def test_ctrl_c_says_that_the_node_goes_on_and_the_next_sync_shows_the_same_session(
    node: str, stuck: str
) -> None:
    arguments = command("sync", stuck, "--node", node)
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as first:
        wait_for_sync(node, stuck)
        first.send_signal(signal.SIGINT)
        _, err = first.communicate(timeout=30)
    assert first.returncode == 130
    assert err == f"{node} goes on with the sync; the same command shows it again\n"

    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as second:
        assert second.stderr is not None
        line = second.stderr.readline()
        second.send_signal(signal.SIGINT)
        second.communicate(timeout=30)
    assert line == f"a sync with {stuck} is under way already; this is its progress\n"
    assert second.returncode == 130


def wait_for_sync(node: str, peer: str) -> None:
    """Until the node talks to the peer."""
    with StoreClient(node, token=token_for(node)) as client:
        wait_until(lambda: any(each.peer_url == peer for each in client.syncs()))


def test_a_publication_that_is_interrupted_says_what_was_stored_and_how_to_go_on(
    node: str, tmp_path: Path
) -> None:
    frames = b"".join(
        delimited(encode(message(number, "cut", content=bytes(200)))) for number in range(1_500)
    )
    arguments = command("publish", "-", "--node", node)
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe) as publishing:
        assert publishing.stdin is not None
        publishing.stdin.write(frames)
        publishing.stdin.flush()
        with StoreClient(node, token=token_for(node)) as client:
            wait_until(lambda: any(each.channel_id == "cut" for each in client.channels()))
        publishing.send_signal(signal.SIGINT)
        out, err = publishing.communicate(timeout=30)
    assert (publishing.returncode, out) == (130, b"")
    assert b"1,000 messages: 1,000 stored" in err
    assert b"Publishing the same again is safe" in err


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
