"""A wheel, built and installed as a stranger would, serves."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import httpx
import pytest

from app.cli.output import Exit
from app.store.schema import SCHEMA_REVISION

ROOT = Path(__file__).parents[2]
START_S_MAX = 30

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean checkout."""
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, tracked):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def environment(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands of docs/operations.md install, in other folders than those of the system."""
    folder = tmp_path_factory.mktemp("installed")
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    block = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    block = block.replace("/opt/sdstore", str(folder / "opt")).replace("/usr/local", str(folder))
    (folder / "bin").mkdir()
    shown = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=source,
        env={"PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    ).stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert shown.splitlines()[-1] == f"sdstore {project['version']}"
    return folder / "opt"


def test_without_the_extra_the_command_says_which_one_it_needs(
    source: Path, tmp_path: Path
) -> None:
    _run(sys.executable, "-m", "venv", tmp_path / "venv")
    _run(tmp_path / "venv/bin/pip", "install", source)
    ran = subprocess.run(
        [tmp_path / "venv/bin/sdstore", "--version"], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in ran.stderr
    assert (ran.returncode, ran.stdout) == (Exit.LOCAL_FAULT, "")
    assert ran.stderr.startswith("sdstore: server_missing: No module named 'typer'")
    assert "'sdstore[server]'" in ran.stderr


def test_the_installed_command_serves(environment: Path, tmp_path: Path) -> None:
    command = [environment / "bin" / "sdstore", "serve", "--port", "0"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,  # far from the checkout: nothing is imported from there
        env={"PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as node:
        try:
            url = _announced_url(node)
            message = {"message_id": "m", "channel_id": "c", "lamport_timestamp": 1}
            body = {"message": {**message, "content": "aGk="}}
            stored = httpx.post(f"{url}/v1/messages", json=body)
            assert (stored.status_code, stored.json()["outcome"]) == (201, "stored")
            served = httpx.get(f"{url}/v1/messages/m").json()
            assert served["message"]["content"] == "aGk="
        finally:
            node.terminate()
    assert node.returncode in (0, 130, 143)


def test_the_installed_command_upgrades_a_database_of_the_first_schema(
    environment: Path, tmp_path: Path
) -> None:
    shutil.copyfile(ROOT / "tests/fixtures/schemas/0001/store.db", tmp_path / "store.db")
    told = subprocess.run(
        [environment / "bin" / "sdstore", "migrate", "--database", "sqlite:///store.db", "--json"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    report = json.loads(told)
    assert (report["before"], report["after"]) == ("0001", SCHEMA_REVISION)


def test_the_library_imports_without_the_server_packages(environment: Path, tmp_path: Path) -> None:
    hidden = "import sys; sys.modules.update(dict.fromkeys(['fastapi', 'sqlalchemy', 'pyspark', 'zstandard']));"
    imports = "import recon.initiator, recon.responder, sdstore.sds, sdstore.sync.driver"
    imports += ", sdstore.client, sdstore.participant"
    subprocess.run(
        [environment / "bin" / "python", "-c", f"{hidden} {imports}"], cwd=tmp_path, check=True
    )


def _announced_url(node: subprocess.Popen[str]) -> str:
    assert node.stdout is not None
    started = time.monotonic()
    for line in node.stdout:
        if "serves http://" in line:
            return line.split("serves ")[1].split()[0]
        assert time.monotonic() - started < START_S_MAX
    raise AssertionError("the node ended before it served")


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=600)
