"""examples/chat.py in two terminals, as two people use it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sdstore.sds.model import Message
from tests.support.cli import command, free_port
from tests.support.server import running_node
from tests.support.terminal import Terminal

CHAT = Path(__file__).parent.parent / "examples" / "chat.py"


@contextmanager
def node(port: int, data_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A node as a process, killed at the end of the block."""
    serve = command("serve", "--port", port, "--data-dir", data_dir)
    with subprocess.Popen(
        serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=CHAT.parent.parent
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def person(name: str, url: str, folder: Path, **terminal_options: Any) -> Iterator[Terminal]:
    """A chat, killed at the end of the block if it runs on."""
    command = [sys.executable, str(CHAT), name, "--store", url]
    terminal = Terminal(command, folder, **terminal_options)
    try:
        yield terminal
    finally:
        if terminal.process.poll() is None:
            terminal.kill()


def messages(terminal: Terminal) -> list[str]:
    """The rows of messages, without time and state."""
    rows = [line for line in terminal.screen.lines if line[2:3] == ":" and line[5:6] == " "]
    return [row[6:].partition("  (")[0] for row in rows]


@pytest.mark.slow
def test_two_people_chat_through_crashes_of_one_of_them_and_of_the_node(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with person("ada", url, tmp_path) as ada:
        # No node yet: what is typed is kept.
        ada.wait("is down")
        ada.type("is anybody there?\n")
        ada.wait(r"ada: is anybody there\?  \(sent\)")
        with node(port, tmp_path / "data") as first, person("bob", url, tmp_path) as bob:
            ada.wait(r"there\?  \(stored\)", "connected to")
            bob.wait("ada: is anybody there")
            bob.type("I zm\x7f\x7fam, she\x1b[A said\n")  # mistyped, and an arrow key
            ada.wait(r"bob: I am, she said", r"there\?  \(acknowledged\)")
            bob.kill()
            ada.type("where are you?\n")
            ada.wait(r"where are you\?  \(stored\)")
            first.kill()
            first.wait()
            ada.wait("is down")
            ada.type("now the node is gone too ✗\n")
            ada.wait(r"gone too ✗  \(sent\)")
        with person("bob", url, tmp_path) as bob:
            # Bob's own file has what he had; he writes without a node.
            bob.wait("lobby: 2 messages so far")
            assert messages(bob) == ["ada: is anybody there?", "bob: I am, she said"]
            bob.type("here again\n")
            bob.wait(r"here again  \(sent\)")
            with node(port, tmp_path / "data"):
                said = {
                    "ada: is anybody there?",
                    "bob: I am, she said",
                    "ada: where are you?",
                    "ada: now the node is gone too ✗",
                    "bob: here again",
                }
                for each in (ada, bob):
                    each.wait_until(lambda t=each: set(messages(t)) == said, 30, "all messages")
                    each.wait_until(lambda t=each: len(messages(t)) == 5, 5, "each message once")
                ada.wait(r"gone too ✗  \((stored|acknowledged)\)", "all synced.*connected to")
                bob.wait(r"here again  \((stored|acknowledged)\)", "all synced.*connected to")
                bob.type("bye\n")
                ada.wait("bob: bye")
                bob.wait(r"bye  \((stored|acknowledged)\)")
                bob.type("\x03")
                assert bob.ended() == 0
                ada.type("\x04")
                assert ada.ended() == 0
                for each in (ada, bob):
                    assert not any("Traceback" in line for line in each.screen.lines)
                    assert each.screen.lines[-1] == ""  # the two rows below are gone
                # Everything is there after a clean end, too.
                with person("ada", url, tmp_path) as ada_again:
                    ada_again.wait("lobby: 6 messages so far")
                    assert set(messages(ada_again)) == said | {"bob: bye"}


def test_a_chat_that_runs_already_and_text_that_would_control_the_terminal(tmp_path: Path) -> None:
    with running_node(tmp_path) as node, person("eve", node.url, tmp_path) as eve:
        hostile = Message("m", "lobby", "mal\x1b[2J", -5, content=b"\x1b[2J\r\nowned \xff")
        node.publish(hostile).raise_for_status()
        eve.wait(
            "connected to", "mal\ufffd\\[2J: \ufffd\\[2J\ufffd\ufffdowned \ufffd", "all synced"
        )
        with person("eve", node.url, tmp_path) as second:
            assert second.ended() == 1
            assert second.shows("in_use: another process has eve.chat.db open")
        eve.type("hi\n")
        eve.wait(r"eve: hi  \(stored\)")
        eve.type("\x04")
        assert eve.ended() == 0


def test_a_wrong_url_is_an_error_in_words(tmp_path: Path) -> None:
    with person("ada", "http://[::1", tmp_path) as ada:
        assert ada.ended() == 1
        assert ada.shows(r"chat.py: bad_argument: stores: http://\[::1 is not a URL")
        assert not ada.shows("Traceback")


def test_a_password_in_a_url_is_never_shown(tmp_path: Path) -> None:
    with running_node(tmp_path) as node, person("eve", with_password(node.url), tmp_path) as eve:
        eve.wait(f"connected to {node.url}")
        eve.type("\x04")
        assert eve.ended() == 0
        assert not eve.shows("secret")
    with person("ada", with_password("http://[::1"), tmp_path) as ada:
        assert ada.ended() == 1
        assert ada.shows(r"chat.py: bad_argument: stores: http://\[::1 is not a URL")
        assert not ada.shows("secret")


def with_password(url: str) -> str:
    return url.replace("//", "//ada:secret@")


def test_ctrl_c_during_the_imports_ends_the_program_without_a_traceback(tmp_path: Path) -> None:
    slow = tmp_path / "modules"
    slow.mkdir()
    (slow / "tty.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    environment = {"PYTHONPATH": str(slow)}
    with person("ada", "http://127.0.0.1:9", tmp_path, environment=environment) as ada:
        ada.wait("importing")
        ada.type("\x03")
        assert ada.ended() == -signal.SIGINT, "a shell calls this 130"
        assert not ada.shows("Traceback")
