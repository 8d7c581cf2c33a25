"""The application under a uvicorn that knows nothing of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[3]
CHANNEL = "%2Fgarden%2F1%2Fbees%2Fproto"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, list[str]]]:
    """A client of such a node, and what the server wrote before it served."""
    folder = tmp_path_factory.mktemp("node")
    command = [sys.executable, "-m", "uvicorn", "--factory", "app.main:create_app", "--port", "0"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"SDSTORE_DATA_DIR": str(folder)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            assert server.stderr is not None
            shown: list[str] = []
            for line in server.stderr:
                shown.append(line)
                found = re.search(r"running on (http://[\d.:]+)", line)
                if found:
                    with httpx.Client(base_url=found[1]) as http:
                        yield http, shown
                    break
        finally:
            server.terminate()
            server.communicate(timeout=30)


def test_it_does_the_readmes_minute_and_says_which_bounds_it_lacks(
    served: tuple[httpx.Client, list[str]],
) -> None:
    http, shown = served
    for number in (1, 2):
        message = {
            "message_id": f"m/{number}",
            "channel_id": "/garden/1/bees/proto",
            "sender_id": "ada",
            "lamport_timestamp": str(number),
            "content": "YnV6eg==",
        }
        stored = http.post(
            "/v1/messages", json={"message": message}, headers={"Retrieval-Hint": "aa"}
        )
        assert stored.json()["outcome"] == "stored"
    assert http.get("/v1/messages/m%2F1").json()["message"]["content"] == "YnV6eg=="
    assert len(http.get("/v1/hints/aa").json()["messages"]) == 2
    first = http.get(f"/v1/channels/{CHANNEL}/messages", params={"limit": 1})
    second = http.get(first.links["next"]["url"]).json()["messages"]
    assert [each["message"]["message_id"] for each in second] == ["m/2"]
    (line,) = [line for line in shown if "bounds on connections" in line]
    assert "slow clients" in line
    assert "headers" in line


@pytest.mark.parametrize(
    ("method", "target", "status", "code"),
    [
        ("GET", "/v1/messages/m/1", 404, "no_such_route"),
        ("GET", "/v1/feed/", 404, "no_such_route"),
        ("GET", "/v1/channels?limit=1&limit=2", 400, "invalid_parameter"),
        ("GET", "/v1/channels?limmit=1", 400, "invalid_parameter"),
        ("DELETE", "/v1/messages/batch", 405, "method_not_allowed"),
    ],
)
def test_refusals_are_those_of_our_own_server(
    served: tuple[httpx.Client, list[str]], method: str, target: str, status: int, code: str
) -> None:
    reply = served[0].request(method, target)
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert reply.headers.get("allow") == ("GET, HEAD, POST" if status == 405 else None)


def test_head_is_get_without_a_body(served: tuple[httpx.Client, list[str]]) -> None:
    head, got = served[0].head("/v1/channels"), served[0].get("/v1/channels")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]


def test_a_live_reader_that_leaves_frees_its_place(
    served: tuple[httpx.Client, list[str]],
) -> None:
    http, _ = served

    def readers() -> list[str]:
        return re.findall(r"^sdstore_live_readers (.*)$", http.get("/metrics").text, re.MULTILINE)

    with http.stream("GET", "/v1/live") as one, http.stream("GET", "/v1/channels/c/live") as other:
        assert (one.status_code, other.status_code) == (200, 200)
        assert readers() == ["2.0"]
    deadline = time.monotonic() + 10
    while readers() != ["0.0"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
