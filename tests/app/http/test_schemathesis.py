"""Requests generated from the OpenAPI document: none makes the node fail, all answers are as it says.

They come from this machine without a token, and with tokens that cover everything, only reading, or nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.access.callers import Scope
from app.access.tokens import GRANTED_SCOPES, TokenFile
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.routes import ROUTES
from tests.support.server import WANTS_PROTOBUF, RunningNode, running_node

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "missing_required_header",
    "credentials_decide",
)
ROOT = Path(__file__).parents[3]
MARK = Message("there before", "c", lamport_timestamp=1, content=b"hi")


NO_LIMIT = 10**12
"""More than all generated requests of a minute: each token is one caller."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    with running_node(
        tmp_path / "node",
        caller_requests_per_minute=NO_LIMIT,
        caller_bytes_per_minute=NO_LIMIT,
        anonymous_requests_per_minute=NO_LIMIT,
    ) as running:
        running.publish(MARK)
        yield running


def callers_of(folder: Path) -> str:
    """The callers of the generated requests, as their environment variable."""
    file = TokenFile(folder / "node" / "tokens.json")
    revoked, text = file.create(scopes=GRANTED_SCOPES)
    file.revoke(revoked.token_id)
    tokens = {
        "read": file.create(scopes=[Scope.READ])[1],
        "admin": file.create(scopes=GRANTED_SCOPES)[1],
        "revoked": text,
    }
    return json.dumps(
        {
            "tokens": {name: f"Bearer {token}" for name, token in tokens.items()},
            "scopes": {f"{each.method} {each.template}": each.scope for each in ROUTES},
        }
    )


def fuzz(node: RunningNode, folder: Path, cases_per_operation: int, *options: str) -> str:
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{node.url}/openapi.json",
        f"--checks={','.join(CHECKS)}",
        f"--max-examples={cases_per_operation}",
        # Streams of live and relayed messages end when the reader does.
        "--exclude-path-regex=/(live|relay)$",
        "--phases=coverage,fuzzing",
        "--warnings=off",
        "--no-color",
        *options,
    ]
    hooks = {
        "SCHEMATHESIS_HOOKS": "tests.support.schemathesis_hooks",
        "PYTHONPATH": str(ROOT),
        "FUZZ_CALLERS": callers_of(folder),
    }
    ran = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | hooks,
        capture_output=True,
        text=True,
        timeout=1_500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8_000:] + ran.stderr[-2_000:]
    return ran.stdout


def assert_unharmed(node: RunningNode) -> None:
    assert node.http.get("/readyz").status_code == 200
    served = node.http.get("/v1/messages/there%20before", headers=WANTS_PROTOBUF)
    assert served.content == encode(MARK)


def test_some_hundreds_of_generated_requests_get_answers_as_documented(
    node: RunningNode, tmp_path: Path
) -> None:
    report = fuzz(node, tmp_path, 12, "--generation-deterministic")
    assert_unharmed(node)
    assert "passed" in report


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_ten_thousand_generated_requests_get_answers_as_documented(
    node: RunningNode, tmp_path: Path
) -> None:
    fuzz(node, tmp_path, 180)  # for each of 56 operations
    assert_unharmed(node)
