"""`sdstore indexer` confirms the messages of people who write no votes: killed, and with other roles."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from sdstore.client import StoreClient
from sdstore.sds import Broadcast, Participant
from tests.support.cli import cli, command, free_port
from tests.support.server import running_node

SECONDS_MAX = 60.0


class Person:
    """A participant of the usual kind, which sends only."""

    def __init__(self, url: str) -> None:
        self.participant = Participant("plans", "pia")
        self.client = StoreClient(url)
        self.ids: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def say(self, text: bytes) -> None:
        effects = self.participant.send(text, time.time_ns() // 1_000_000)
        [sent] = [each for each in effects if isinstance(each, Broadcast)]
        self.client.publish(sent.frame)
        self.ids.append(sent.message_id)

    def until_confirmed(self, indexers: list[str], **more: Any) -> list[str]:
        """Wait until the node has confirmed all that was said; the prefix."""
        until_s = time.monotonic() + SECONDS_MAX
        while True:
            page = self.client.order("plans", indexers, **more)
            confirmed = [each.message_id for each in page.items if each.is_confirmed]
            if {*self.ids} <= {*confirmed}:
                return confirmed
            assert time.monotonic() < until_s, page
            time.sleep(0.1)


@contextmanager
def indexer(name: str, folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    arguments = command(
        "indexer", "plans", "--as", name, "--file", folder / f"{name}.db", "--json", *more
    )
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_an_indexer_confirms_what_people_say_over_kills_and_ends_as_other_verbs_do(
    tmp_path: Path,
) -> None:
    with running_node(tmp_path / "node") as node, ExitStack() as stack:
        person = stack.enter_context(Person(node.url))
        # Of two stores one is down.
        nodes = ("--node", f"http://127.0.0.1:{free_port()}", "--node", node.url)
        person.say(b"dig")
        with indexer("server", tmp_path, *nodes) as process:
            before = person.until_confirmed(["server"])
            shown = cli("order", "plans", "--indexer", "server", "--node", node.url).out
            assert "(vote)" in shown
            assert "sds-vote" not in shown
            assert (
                cli("indexer", "plans", "--as", "server", "--file", tmp_path / "server.db").code
                == 6
            )
            process.kill()
        person.say(b"plant")
        with indexer("server", tmp_path, *nodes) as process:
            assert person.until_confirmed(["server"])[: len(before)] == before
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate(timeout=30)
            assert (process.returncode, errors) == (0, b"")
        said = [json.loads(line) for line in output.splitlines()]
        assert any(each.get("state") == "online" and each["store"] == node.url for each in said)
        assert any(each.get("confirmed_count", 0) >= 3 for each in said)

        # It goes, and another one takes its place at a message that it confirmed.
        change = json.dumps({"after": before[0], "indexers": ["other"]})
        person.say(b"water")
        roles = ("--indexer", "server", "--change", change, "--node", node.url)
        with indexer("other", tmp_path, *roles) as process:
            shown = cli(
                "order", "plans", "--indexer", "server", "--change", change, "--node", node.url
            )
            assert shown.code == 0, shown.err
            until_s = time.monotonic() + SECONDS_MAX
            while "water" not in confirmed_rows(shown.out):
                assert time.monotonic() < until_s, shown.out
                shown = cli(
                    "order", "plans", "--indexer", "server", "--change", change, "--node", node.url
                )
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
            assert process.returncode == 130
        with indexer("other", tmp_path, *roles) as process:
            person.say(b"rest")
            until_s = time.monotonic() + SECONDS_MAX
            while "rest" not in confirmed_rows(shown.out):
                assert time.monotonic() < until_s, shown.out
                shown = cli(
                    "order", "plans", "--indexer", "server", "--change", change, "--node", node.url
                )


def confirmed_rows(table: str) -> str:
    return "\n".join(line for line in table.splitlines() if line.startswith("confirmed"))


def test_what_an_indexer_cannot_do_is_an_error_with_a_code(tmp_path: Path) -> None:
    base = ("indexer", "plans", "--as", "server", "--file", tmp_path / "x.db")
    for more, code in (
        (("--change", "{}"), "invalid_parameter"),
        (("--change", '{"after": "a", "indexers": ["b"], "relayed": ["c"]}'), "invalid_parameter"),
        (("--indexer", "a", "--indexer", "a"), "invalid_indexers"),
        (("--node", "ftp://x"), "invalid_parameter"),
    ):
        result = cli(*base, *more)
        assert (result.code, code in result.err) == (2, True), result.err
