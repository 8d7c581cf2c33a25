"""A wheel, built and installed as a stranger would, serves."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.cli.output import Exit
from app.store.schema import SCHEMA_REVISION

ROOT = Path(__file__).parents[2]
START_S_MAX = 60
NAMES = ("app", "recon", "pipeline")
"""Packages of the checkout that a user has too, below."""

MESSAGE = {"message_id": "m1", "channel_id": "/garden/1/bees/proto", "sender_id": "ada"}
PUBLICATION = {"message": {**MESSAGE, "lamport_timestamp": "1763000000001", "content": "YnV6eg=="}}

pytestmark = pytest.mark.timeout(900)


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
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of that checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def beside(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel beside a user's own `app`, `recon` and `pipeline`.

    What it needs comes from the environment of the tests, whose `.pth` files, and so the checkout, are
    not read.
    """
    environment = tmp_path_factory.mktemp("beside") / "venv"
    _run(sys.executable, "-m", "venv", "--without-pip", environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    for name in NAMES:
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text(f"MINE = {name!r}\n", encoding="utf-8")
    shutil.copy(ROOT / "examples/policy.py", packages / "app/rules.py")
    _run(
        *(sys.executable, "-m", "pip", "--python", environment / "bin/python"),
        *("install", "--no-deps", wheel),
    )
    of_tests = [each for each in sys.path if each.endswith("site-packages")]
    (packages / "of_tests.pth").write_text("\n".join(of_tests), encoding="utf-8")
    return environment


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


# ---- the wheel beside a user's own packages


def test_a_wheel_has_one_package(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {re.sub(r"-.*\.", ".", each) for each in tops} == {"sdstore", "sdstore.dist-info"}


def test_every_module_of_a_wheel_leaves_the_users_packages_alone(
    beside: Path, tmp_path: Path
) -> None:
    shown = _python(
        beside,
        f"""
        import importlib, pkgutil, sys
        import sdstore
        names = [each.name for each in pkgutil.walk_packages(sdstore.__path__, "sdstore.")]
        for name in names:
            if ".migrations." not in name:  # Alembic runs these
                importlib.import_module(name)
        assert not [name for name in sys.modules if name.partition(".")[0] in {NAMES}]
        import app, recon, pipeline
        print(len(names), app.MINE, recon.MINE, pipeline.MINE)
        """,
        tmp_path,
    )
    count, *mine = shown.split()
    assert int(count) > 150
    assert tuple(mine) == NAMES


def test_a_node_of_a_wheel_does_the_readmes_minute_under_the_users_policy(
    beside: Path, tmp_path: Path
) -> None:
    with _serving(beside, tmp_path, SDSTORE_POLICY="app.rules:Moderation") as url:
        assert httpx.post(f"{url}/v1/messages", json=PUBLICATION).json()["outcome"] == "stored"
        assert "Entries" in httpx.get(url).text
        got = _sdstore(beside, tmp_path, "get", "m1", "--json", "--node", url)
        assert json.loads(got)["message"]["content"] == "YnV6eg=="
        listed = json.loads(_sdstore(beside, tmp_path, "channels", "--json", "--node", url))
        assert listed["channel_id"] == MESSAGE["channel_id"]

        spam = {**MESSAGE, "message_id": "m2", "lamport_timestamp": "2", "content": "Y2FzaW5v"}
        refused = httpx.post(f"{url}/v1/messages", json={"message": spam}).json()
        assert refused["code"] == "quarantined"


def test_the_documented_python_runs_from_a_wheel(beside: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    script = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert "ParticipantDriver" in script
    with _serving(beside, tmp_path) as url:
        _python(beside, script.replace("http://127.0.0.1:8000", url), tmp_path)


@pytest.mark.slow
def test_the_demo_of_a_wheel_starts_its_own_nodes(beside: Path, tmp_path: Path) -> None:
    assert _sdstore(beside, tmp_path, "demo", "--json")


@pytest.mark.slow
def test_an_application_of_the_users_mounts_a_node_of_a_wheel(beside: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/http.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shown = _python(
        beside,
        block
        + textwrap.dedent("""
            from fastapi.testclient import TestClient
            with TestClient(app, "http://localhost", client=("127.0.0.1", 1)) as client:
                print(client.get("/store/v1/info").status_code)
            """),
        tmp_path,
    )
    assert shown.split() == ["200"]


@pytest.mark.slow
def test_workers_of_spark_export_from_a_wheel(beside: Path, tmp_path: Path) -> None:
    frame = json.dumps(PUBLICATION)
    (tmp_path / "messages.ndjson").write_text(f"{frame}\n", encoding="utf-8")
    _sdstore(beside, tmp_path, "import", "messages.ndjson")
    made = json.loads(_sdstore(beside, tmp_path, "snapshot", "export", "snapshot", "--json"))
    assert made["entries"]["count"] == 1
    verified = json.loads(_sdstore(beside, tmp_path, "snapshot", "verify", "snapshot", "--json"))
    assert verified["findings"] == []


# ---- what is installed


@pytest.mark.slow
def test_a_source_distribution_builds_the_same_wheel(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    _run(sys.executable, "-m", "venv", tmp_path / "venv")
    _run(tmp_path / "venv/bin/pip", "install", "hatchling")
    build = (tmp_path / "venv/bin/python", "-m", "hatchling", "build")
    _run(*build, "-t", "sdist", "-d", tmp_path, cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "sdist", filter="data")
    (unpacked,) = (tmp_path / "sdist").iterdir()
    _run(*build, "-t", "wheel", "-d", tmp_path, cwd=unpacked)
    (built,) = tmp_path.glob("*.whl")
    assert _contents(built) == _contents(wheel)


@pytest.mark.slow
def test_the_library_alone_brings_no_web_framework_and_the_command_names_the_extra(
    source: Path, tmp_path: Path
) -> None:
    _run(sys.executable, "-m", "venv", tmp_path / "venv")
    _run(tmp_path / "venv/bin/pip", "install", source)
    packages = subprocess.run(
        [tmp_path / "venv/bin/pip", "list", "--format", "json"], capture_output=True, check=True
    ).stdout
    names = {each["name"].lower() for each in json.loads(packages)}
    assert not names & {"fastapi", "starlette", "uvicorn", "pydantic", "sqlalchemy", "pyspark"}
    _python(
        tmp_path / "venv",
        """
        import sdstore.client, sdstore.mvds, sdstore.ordering, sdstore.participant, sdstore.sds
        import sdstore.recon.initiator, sdstore.recon.negentropy, sdstore.recon.responder
        import sdstore.sync.driver
        """,
        tmp_path,
    )
    ran = subprocess.run(
        [tmp_path / "venv/bin/sdstore", "--version"], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in ran.stderr
    assert (ran.returncode, ran.stdout) == (Exit.LOCAL_FAULT, "")
    assert ran.stderr.startswith("sdstore: server_missing: No module named 'typer'")
    assert "pip install '.[server]'" in ran.stderr
    for module in ("policy", "server"):
        ran = subprocess.run(
            [tmp_path / "venv/bin/python", "-c", f"import sdstore.{module}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "MissingExtraError: No module named" in ran.stderr
        assert "pip install '.[server]'" in ran.stderr.splitlines()[-1]


@pytest.mark.slow
def test_one_line_installs_the_command_and_the_node(source: Path, tmp_path: Path) -> None:
    _run(sys.executable, "-m", "venv", tmp_path / "venv")
    _run(tmp_path / "venv/bin/pip", "install", "pipx")
    homes = {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path / "tools/bin")}
    environment = os.environ | homes | {"PATH": f"{tmp_path / 'venv/bin'}:{os.environ['PATH']}"}
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"`(pipx install .*?)`", page)
    subprocess.run(
        ["bash", "-c", line],
        cwd=source,
        env=environment,
        check=True,
        capture_output=True,
        timeout=600,
    )
    with _serving(tmp_path / "tools", tmp_path) as url:
        assert httpx.post(f"{url}/v1/messages", json=PUBLICATION).status_code == 201
        _sdstore(tmp_path / "tools", tmp_path, "get", "m1", "--node", url)
    run = subprocess.run(
        [tmp_path / "tools/bin/sdstore", "snapshot", "export", "snapshot"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, "pip install '.[spark]'" in run.stderr) == (6, True), run.stderr


@pytest.mark.slow
def test_the_installed_command_serves(environment: Path, tmp_path: Path) -> None:
    with _serving(environment, tmp_path) as url:
        stored = httpx.post(f"{url}/v1/messages", json=PUBLICATION)
        assert (stored.status_code, stored.json()["outcome"]) == (201, "stored")
        served = httpx.get(f"{url}/v1/messages/m1").json()
        assert served["message"]["content"] == "YnV6eg=="


@pytest.mark.slow
def test_the_installed_command_upgrades_a_database_of_the_first_schema(
    environment: Path, tmp_path: Path
) -> None:
    shutil.copyfile(ROOT / "tests/fixtures/schemas/0001/store.db", tmp_path / "store.db")
    told = _sdstore(environment, tmp_path, "migrate", "--database", "sqlite:///store.db", "--json")
    report = json.loads(told)
    assert (report["before"], report["after"]) == ("0001", SCHEMA_REVISION)


@contextmanager
def _serving(environment: Path, folder: Path, **settings: str) -> Iterator[str]:
    """The URL of a node of that environment, which runs during the block."""
    with subprocess.Popen(
        [environment / "bin/sdstore", "serve", "--port", "0"],
        cwd=folder,  # far from the checkout: nothing is imported from there
        env={"PATH": os.environ["PATH"]} | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as node:
        try:
            yield _announced_url(node)
        finally:
            node.terminate()
    assert node.returncode in (0, 130, 143)


def _announced_url(node: subprocess.Popen[str]) -> str:
    assert node.stdout is not None
    started = time.monotonic()
    shown = []
    for line in node.stdout:
        if "serves http://" in line:
            return line.split("serves ")[1].split()[0]
        shown.append(line)
        assert time.monotonic() - started < START_S_MAX
    raise AssertionError("the node ended before it served: " + "".join(shown))


def _sdstore(environment: Path, folder: Path, *arguments: str) -> str:
    """What a verb prints."""
    return _output([environment / "bin/sdstore", *arguments], folder)


def _python(environment: Path, script: str, folder: Path) -> str:
    """What a script prints."""
    return _output([environment / "bin/python", "-c", textwrap.dedent(script)], folder)


def _output(command: list[str | Path], folder: Path) -> str:
    ran = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _contents(wheel: Path) -> dict[str, int]:
    """The files of a wheel and their checksums, without the list that has them too."""
    files = zipfile.ZipFile(wheel).infolist()
    return {each.filename: each.CRC for each in files if not each.filename.endswith("RECORD")}


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=600, cwd=cwd)
