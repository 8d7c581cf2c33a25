"""Retention retires what is beyond the bounds of a channel, oldest arrival first, and nothing else."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.access.operator import token_for
from app.server.limits import DEFAULT_LIMITS
from app.server.settings import RetentionRule
from sdstore.client import StoreClient
from sdstore.sds.codec import encode
from tests.support.cli import cli, command
from tests.support.federation import message
from tests.support.server import RunningNode, running_node
from tests.support.stores import PostgresStores

LIMITS = replace(DEFAULT_LIMITS, retention_interval_s=1)
SECONDS_MAX = 60


def until(is_so: Callable[[], object]) -> None:
    ends_s = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < ends_s
        time.sleep(0.02)


def publish(node: RunningNode, channel: str, numbers: range, **parts: Any) -> None:
    for each in numbers:
        node.publish(message(each, channel, sender_id="s", **parts)).raise_for_status()


def kept(node: RunningNode, channel: str) -> list[str]:
    page = node.http.get(f"/v1/channels/{channel}/messages", params={"limit": 1000}).json()
    return [each["message"]["message_id"] for each in page["messages"]]


def retired(node: RunningNode) -> int:
    found: int = node.http.get("/v1/retirements").json()["retired"]
    return found


def ids(*numbers: int) -> list[str]:
    return [f"m{each}" for each in numbers]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_first_rule_that_covers_a_channel_says_how_much_of_it_is_kept(
    tmp_path: Path, kind: str, postgres_stores: PostgresStores
) -> None:
    database: dict[str, Any] = (
        {"database_url": postgres_stores.new_url()} if kind == "postgresql" else {}
    )
    size = len(encode(message(5, "bytes", sender_id="s", content=b"x" * 100)))
    rules = [
        RetentionRule(channels=["whole"]),
        RetentionRule(channel_prefixes=["by"], max_bytes=3 * size),
        RetentionRule(max_count=2),
    ]
    with running_node(tmp_path, LIMITS, retention=rules, **database) as node:
        publish(node, "whole", range(1, 6))
        publish(node, "bytes", range(1, 6), content=b"x" * 100)
        # The sender's clock says that the first is the newest; only arrival counts.
        publish(node, "count", range(9, 10), lamport_timestamp=2**40)
        publish(node, "count", range(1, 4))
        until(lambda: retired(node) == 4)
        assert kept(node, "whole") == ids(1, 2, 3, 4, 5)
        assert kept(node, "bytes") == ids(3, 4, 5)
        assert kept(node, "count") == ids(2, 3)
        publish(node, "count", range(4, 5))
        until(lambda: kept(node, "count") == ids(3, 4))
        assert "sdstore_retention_entries_total 5.0" in node.http.get("/metrics").text
        assert node.publish(message(1, "count", sender_id="s")).json()["code"] == "retired"


def test_messages_that_arrived_too_long_ago_go_and_a_wrong_clock_makes_none_old(
    tmp_path: Path,
) -> None:
    with running_node(tmp_path) as node:
        publish(node, "c", range(1, 8))
    now_ms = int(time.time() * 1000)
    times = {
        1: now_ms - 90_000,
        2: now_ms + 10**12,  # the node's clock was ahead
        3: now_ms - 80_000,
        4: now_ms - 10_000,
        5: 0,  # the clock was behind: it arrived after m4
        6: now_ms + 10**12,
    }
    with closing(sqlite3.connect(tmp_path / "sdstore.db")) as store, store:
        update = "UPDATE messages SET received_at_ms = ? WHERE seq = ?"
        store.executemany(update, [(at_ms, seq) for seq, at_ms in times.items()])
    rules = [RetentionRule(max_age_s=60)]
    with running_node(tmp_path, LIMITS, retention=rules) as node:
        until(lambda: retired(node) == 3)
        assert kept(node, "c") == ids(4, 5, 6, 7)


def test_an_entry_goes_when_it_comes_of_age_though_nothing_else_arrives(tmp_path: Path) -> None:
    rules = [RetentionRule(max_age_s=1.5)]
    with running_node(tmp_path, LIMITS, retention=rules) as node:
        publish(node, "c", range(1, 3))
        assert len(kept(node, "c")) == 2
        until(lambda: not kept(node, "c"))


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`sdstore serve` with the settings FOLDER/node.toml: its process, which ends with the block, and its URL."""
    flags = ("--port", 0, "--data-dir", folder / "d", "--json", "--config", folder / "node.toml")
    with (
        (folder / "log").open("ab") as log,
        subprocess.Popen(command("serve", *flags), stdout=subprocess.PIPE, stderr=log) as process,
    ):
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS_MAX)


def publish_many(client: StoreClient, count: int) -> None:
    client.publish_batch(message(n, "c", sender_id="s") for n in range(1, count + 1))


def test_a_dry_run_says_what_rules_would_retire_and_reload_takes_them_over(
    tmp_path: Path,
) -> None:
    file, log = tmp_path / "node.toml", tmp_path / "log"
    file.write_text("")
    with serving(tmp_path) as (_, url):
        with StoreClient(url, token=token_for(url)) as client:
            publish_many(client, 20)
        assert cli("retention", "--node", url).out == "everything is kept\n"
        file.write_text('[[retention]]\nchannels = ["c"]\nmax_count = 15\n')
        tried = cli("retention", "--dry-run", file, "--node", url, "--json")
        [due] = json.loads(tried.out)["channels"]
        assert (due["rule"], due["bound"], due["entries"]) == (0, "max_count", 5)
        assert due["oldest_at"] <= due["newest_at"]
        result = cli("retention", "--dry-run", file, "--node", url)
        assert "5 messages would be retired" in result.err
        assert cli("retention", "--node", url).out == "everything is kept\n"
        assert cli("reload", "--node", url).out == "changed: retention\n"
        until(lambda: "retired 5 messages of channel 'c' (max_count" in log.read_text())
        assert "at most 15 messages" in cli("retention", "--node", url).out
        assert cli("retention", "--dry-run", file, "--node", url, "--json").out == (
            '{"channels": []}\n'
        )
        file.write_text("[[retention]]\nmax_count = -1\n")
        assert re.search(
            r"retention\.0\.max_count .*greater than", cli("reload", "--node", url).err
        )


COUNT = 3_000


def test_a_kill_in_the_middle_leaves_no_entry_half_gone_and_retention_goes_on(
    tmp_path: Path,
) -> None:
    file, data = tmp_path / "node.toml", tmp_path / "d"
    file.write_text("")
    with serving(tmp_path) as (process, url), StoreClient(url, token=token_for(url)) as client:
        publish_many(client, COUNT)
        root = client.channel("c").root
        file.write_text("[[retention]]\nmax_count = 0\n")
        process.send_signal(signal.SIGHUP)
        until(lambda: client.retirements()["retired"] > COUNT / 10)
        process.kill()
        process.wait()
    with closing(sqlite3.connect(data / "sdstore.db")) as store:
        counts = store.execute(
            "SELECT count(*) FILTER (WHERE frame_bytes = 0), count(*) FILTER (WHERE codec = 5), "
            "count(r.seq) FROM messages m LEFT JOIN frames f USING (seq) LEFT JOIN retired_content r USING (seq)"
        ).fetchone()
    assert 0 < counts[0] < COUNT
    assert len(set(counts)) == 1
    assert cli("check", "--deep", "--database", f"sqlite:///{data / 'sdstore.db'}").code == 0
    with serving(tmp_path) as (_, url), StoreClient(url, token=token_for(url)) as client:
        until(lambda: client.retirements() == {"retired": COUNT, "erasure": "done"})
        assert client.channel("c").root == root
