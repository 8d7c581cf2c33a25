"""Clients that are generated from the OpenAPI document compile strictly, and do the README's minute."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.node import NODE, node_project
from tests.support.server import RunningNode, running_node

CLIENTS = Path(__file__).parent / "clients"
FOUND = ["YnV6eg==", "2 hinted", "m 1", "m 2", "not_found"]
TYPES = ("--output", "api.d.ts", "--default-non-nullable", "false")
"""Without the option a field with a default is required of who sends it, too."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_minute_with_a_client_in_typescript(tmp_path: Path) -> None:
    installed = node_project(CLIENTS / "typescript")
    for name in ("minute.ts", "package.json", "run.js", "tsconfig.json"):
        shutil.copy(installed / name, tmp_path)
    (tmp_path / "node_modules").symlink_to(installed / "node_modules")
    tools = tmp_path / "node_modules"
    with running_node(tmp_path / "node") as node:
        document = _document(node, tmp_path)
        _run(NODE, tools / "openapi-typescript/bin/cli.js", document, *TYPES)
        _run(NODE, tools / "typescript/bin/tsc", "--project", ".")
        assert json.loads(_run(NODE, "run.js", node.url, _token(node))) == FOUND


def test_the_minute_with_a_client_in_python(tmp_path: Path) -> None:
    _run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    _run(python, "-m", "pip", "install", "-r", CLIENTS / "python/requirements.txt")
    shutil.copy(CLIENTS / "python/minute.py", tmp_path)
    with running_node(tmp_path / "node") as node:
        document = _document(node, tmp_path)
        generate = (tmp_path / "venv/bin/openapi-python-client", "generate", "--meta", "none")
        _run(*generate, "--path", document, "--output-path", tmp_path / "client")
        checked = ("--strict", "--python-executable", python, "-p", "client", "-m", "minute")
        _run(sys.executable, "-m", "mypy", "--config-file", os.devnull, *checked)
        assert json.loads(_run(python, "minute.py", node.url, _token(node))) == FOUND


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _document(node: RunningNode, folder: Path) -> Path:
    path = folder / "openapi.json"
    path.write_bytes(node.http.get("/openapi.json").content)
    return path


def _token(node: RunningNode) -> str:
    body = {"name": "generated", "scopes": ["read", "publish"]}
    return str(node.http.post("/v1/tokens", json=body).json()["token"])


def _run(*command: str | Path) -> str:
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, stdin=subprocess.DEVNULL
    )
    assert ran.returncode == 0, f"{ran.stdout[-5_000:]}\n{ran.stderr[-5_000:]}"
    return ran.stdout
