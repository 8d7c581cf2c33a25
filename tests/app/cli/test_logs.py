"""The log of a node: times with their zone, one line an event, JSON on request."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from tests.support.cli import command
from tests.support.server import AS_OPERATOR

DEAD = "http://127.0.0.1:1"
SECONDS_MAX = 60


def logged(data_dir: Path, *flags: object) -> list[str]:
    """The log of a node whose only peer is dead, once it has said so."""
    with subprocess.Popen(
        command(
            *("serve", "--port", 0, "--data-dir", data_dir, "--json", "--peer", DEAD),
            *("--sync-interval", 0.05, *flags),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        try:
            assert running.stdout is not None
            first = running.stdout.readline()
            assert first, running.communicate()[1].decode()
            url = json.loads(first)["url"]
            deadline = time.monotonic() + SECONDS_MAX
            while True:
                (peer,) = httpx.get(f"{url}/v1/peers", trust_env=False, auth=AS_OPERATOR).json()[
                    "peers"
                ]
                if peer["failures"] > 2:
                    break
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            running.terminate()
            _, err = running.communicate()
    return [line for line in err.decode().splitlines() if DEAD in line]


def text(line: str) -> tuple[str, str, str]:
    moment, level, rest = line.split(" ", 2)
    return moment, level.lower(), rest


def from_json(line: str) -> tuple[str, str, str]:
    document = json.loads(line)
    return document["time"], document["level"], f"{document['logger']}: {document['message']}"


@pytest.mark.parametrize(("flags", "read"), [((), text), (("--log-format", "json"), from_json)])
def test_a_change_of_state_is_one_line_with_the_time_and_its_zone(
    flags: tuple[str, ...], read: Callable[[str], tuple[str, str, str]], tmp_path: Path
) -> None:
    # One line, however many syncs have failed since.
    lines = logged(tmp_path, *flags)
    assert len(lines) == 1, lines
    moment, level, rest = read(lines[0])
    at = datetime.fromisoformat(moment)
    assert at.utcoffset() is not None
    assert abs(datetime.now(UTC) - at) < timedelta(seconds=SECONDS_MAX)
    assert level == "warning"
    assert rest.startswith(f"app.federation.peer: peer {DEAD} is unreachable: peer_unreachable:")


def test_a_hundred_thousand_refusals_leave_next_to_nothing_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        log.open("wb") as err,
        subprocess.Popen(
            command(*("serve", "--port", 0, "--data-dir", tmp_path / "node", "--json")),
            stdout=subprocess.PIPE,
            stderr=err,
        ) as running,
    ):
        try:
            assert running.stdout is not None
            url = json.loads(running.stdout.readline())["url"]
            with httpx.Client(
                base_url=url, trust_env=False, timeout=SECONDS_MAX, auth=AS_OPERATOR
            ) as client:
                ndjson = {"content-type": "application/x-ndjson"}
                for _ in range(20):
                    batch = client.post(
                        "/v1/messages/batch", content=b"{}\n" * 5_000, headers=ndjson
                    )
                    assert batch.text.count("refused") >= 5_000
                for number in range(300):
                    long_name = f"{number}-" + "n" * 3_000
                    assert client.get(f"/v1/messages/{long_name}").status_code >= 400
                    assert client.post("/v1/messages", content=long_name).status_code >= 400
                    assert client.post("/v1/recon", content=b"\xff" * 100).status_code >= 400
                    assert client.get(f"/{long_name}").status_code == 404
        finally:
            running.terminate()
            running.communicate()
    assert log.stat().st_size < 10_000
