"""docs/errors.md: every code is there with its status, and every line in it produces its code."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.access.operator import token_for
from app.errors import Code, Problem
from app.server.limits import DEFAULT_LIMITS
from tests.support.server import RunningNode, running_node

DOCUMENT = (Path(__file__).parents[3] / "docs" / "errors.md").read_text(encoding="utf-8")
SECTION = re.compile(
    r"^### (?P<code>\w+)\n(?:Status (?P<status>\d{3}))?(?P<text>.*?)(?=^##|\Z)",
    re.MULTILINE | re.DOTALL,
)
LINE = re.compile(r"^```sh\n(?P<line>.+?)\n```$", re.MULTILINE | re.DOTALL)
SECTIONS = {section["code"]: section for section in SECTION.finditer(DOCUMENT)}
LINES = {
    code: line["line"]
    for code, section in SECTIONS.items()
    if (line := LINE.search(section["text"])) is not None
}
# Codes that no single request answers with: they depend on the address, other requests, or the node's
# state, or are the outcome of an item alone.
NOT_BY_ONE_REQUEST = {
    Code.INVALID_SETTING,
    Code.TOKENS_UNAVAILABLE,
    Code.RATE_LIMITED,
    Code.POLICY_REFUSED,
    Code.QUARANTINED,
    Code.WITHHELD,
    Code.REFUSED,
    Code.POLICY_FAILED,
    Code.CURSOR_ROLLED_BACK,
    Code.CURSOR_REWOUND,
    Code.ORDER_TOO_LARGE,
    Code.ORDER_BUDGET_SPENT,
    Code.RECON_BUDGET_SPENT,
    Code.PEER_MISBEHAVED,
    Code.PEER_VERSION,
    Code.SYNC_BUSY,
    Code.NOT_RELAYED,
    Code.OVERLOADED,
    Code.NOT_READY,
    Code.DISK_FULL,
    Code.STORE_UNAVAILABLE,
    Code.CONTENT_LOST,
    Code.INTERNAL_ERROR,
}
BODY_TIMEOUT_S = 1


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    limits = replace(DEFAULT_LIMITS, body_read_timeout_s=BODY_TIMEOUT_S)
    with running_node(tmp_path_factory.mktemp("node"), limits) as running:
        yield running


def test_every_code_has_its_section_and_status() -> None:
    assert set(SECTIONS) == set(Code)
    documented = {code: section["status"] for code, section in SECTIONS.items()}
    assert documented == {code: str(Problem(code, "").status) for code in Code}


def test_every_code_that_one_request_produces_has_a_line() -> None:
    assert set(LINES) == set(Code) - NOT_BY_ONE_REQUEST


@pytest.mark.parametrize("code", sorted(LINES))
def test_the_documented_line_gives_the_code(node: RunningNode, code: str) -> None:
    line = LINES[code].replace("sleep 40", f"sleep {BODY_TIMEOUT_S + 1}")
    environment = {
        "NODE": node.url,
        "OPERATOR": f"authorization: Bearer {token_for(node.url)}",
        "JSON": "content-type: application/json",
        "PB": "content-type: application/x-protobuf",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
    }
    status_line = line.replace("curl -s", "curl -s -w '\\n%{http_code} %{content_type}'")
    ran = subprocess.run(
        ["sh", "-c", status_line], env=environment, capture_output=True, timeout=30, check=False
    )
    body, _, status = ran.stdout.decode().rpartition("\n")
    document = json.loads(body)
    expected = Problem(Code(code), "")
    assert status == f"{expected.status} application/problem+json", document
    assert document["code"] == code, document
    assert document["status"] == expected.status
    assert document["title"] == expected.title
    assert document["type"] == f"urn:sdstore:problem:{code}"
    assert document["detail"]
