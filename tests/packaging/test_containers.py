"""The container files: linted, and in step with what the node understands."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trustme
import yaml

from app.cli.demo import running_node
from app.server.settings import load_settings
from tests.support.cli import free_port

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
STORES = ("store-a", "store-b")
SECONDS_MAX = 60


def test_the_linter_finds_nothing_in_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    linted = subprocess.run(
        [hadolint, ROOT / "Dockerfile"], check=False, capture_output=True, text=True
    )
    assert (linted.returncode, linted.stdout) == (0, "")


def test_the_image_runs_as_an_unprivileged_user_and_is_asked_for_its_health() -> None:
    last_stage = (ROOT / "Dockerfile").read_text().rsplit("FROM ", 1)[1]
    instructions = [
        line.split(maxsplit=1) for line in last_stage.splitlines() if line[:1].isupper()
    ]
    user = next(words[1] for words in instructions if words[0] == "USER")
    assert int(user.split(":")[0]) >= 1_000
    assert any(words[0] == "HEALTHCHECK" for words in instructions)


def test_every_copied_path_reaches_the_build() -> None:
    """.dockerignore lets in by name: what the packages need must be among the names."""
    let_in = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    needed = {"app", "recon", "sdstore", "pipeline", "proto", "migrations", "README.md"}
    assert (
        needed | {"hatch_build.py", "pyproject.toml", "LICENSE", "requirements/server.lock"}
        == let_in
    )
    assert all((ROOT / path).exists() for path in let_in)


@pytest.mark.parametrize("name", STORES)
def test_the_nodes_of_the_compose_file_start_with_settings_that_exist(name: str) -> None:
    settings, origin = load_settings(environment=COMPOSE["services"][name]["environment"])
    assert origin["peers"] == origin["database_url"] == "environment"
    assert settings.database_url.startswith("postgresql://")


def test_the_two_nodes_of_the_compose_file_are_each_other_s_peers_on_databases_of_their_own() -> (
    None
):
    services = COMPOSE["services"]
    peers = [services[name]["environment"]["SDSTORE_PEERS"] for name in STORES]
    assert peers == ["http://store-b:8000", "http://store-a:8000"]
    databases = {services[name]["environment"]["SDSTORE_DATABASE_URL"] for name in STORES}
    assert len(databases) == len(STORES)
    for name in STORES:
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])


def image_environment() -> dict[str, str]:
    """The environment that the image sets."""
    last_stage = (ROOT / "Dockerfile").read_text().rsplit("FROM ", 1)[1].replace("\\\n", " ")
    (line,) = (line for line in last_stage.splitlines() if line.startswith("ENV "))
    return dict(word.split("=", 1) for word in line.split()[1:])


def test_no_container_of_the_compose_file_fills_the_disk_with_its_log() -> None:
    for name, service in COMPOSE["services"].items():
        options = service.get("logging", {}).get("options", {})
        assert options.keys() >= {"max-size", "max-file"}, name


DOCKER = """#!/usr/bin/env bash
# What docker does for the commands of the page, without an engine: the image is this checkout.
set -euo pipefail
echo "$*" >> calls
case $1 in
    build) test -f Dockerfile ;;
    exec) shift 2; "$@" ;;
    run)
        detach=no; [[ " $* " == *" --detach "* ]] && detach=yes
        while [ "$1" != sdstore ] || [ "$last" = --name ]; do last=$1; shift; done
        shift
        [ $# -gt 0 ] || set -- serve
        if [ $detach = no ]; then sdstore "$@"; else sdstore "$@" > serving 2>&1 & echo $! > pid; fi ;;
esac
"""


def test_the_image_starts_as_the_page_says_and_takes_the_token_that_was_printed(
    tmp_path: Path,
) -> None:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    [block] = re.findall(r"(?<=\n\n)((?:    .*\n)+)", page.partition("## In a container")[2])
    port = free_port()
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    shutil.copy(ROOT / "Dockerfile", tmp_path)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        key: value for key, value in image_environment().items() if key.startswith("SDSTORE_")
    }
    environment |= {"PATH": path, "SDSTORE_DATA_DIR": str(tmp_path / "data")}
    environment |= {"SDSTORE_PORT": str(port), "SDSTORE_DRAIN_S": "0"}
    url = f"http://127.0.0.1:{port}"
    block += f"\nsdstore wait --node {url}\n"
    try:
        shown = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        serving = tmp_path / "serving"
        assert shown.returncode == 0, shown.stderr + (
            serving.read_text() if serving.exists() else ""
        )
        token = (tmp_path / "first.token").read_text().strip()
        assert token.startswith("sds_")
        bearer = {"authorization": f"Bearer {token}"}
        message = {"message_id": "m", "channel_id": "c", "lamport_timestamp": 1}
        body = {"message": {**message, "content": "aGk="}}
        stored = httpx.post(f"{url}/v1/messages", json=body, headers=bearer, trust_env=False)
        assert stored.status_code == 201
    finally:
        if (tmp_path / "pid").exists():
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    calls = (tmp_path / "calls").read_text()
    assert "max-size" in calls
    assert "--publish 8000:8000" in calls


def health_check() -> list[str]:
    """The command of the image's HEALTHCHECK."""
    [command] = re.findall(
        r"^HEALTHCHECK .*\\\n *CMD (\[.*\])$", (ROOT / "Dockerfile").read_text(), re.MULTILINE
    )
    words: list[str] = json.loads(command)
    return words


def health(port: int) -> int:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "SDSTORE_PORT": str(port)}
    return subprocess.run(
        health_check(), env=environment, check=False, timeout=SECONDS_MAX
    ).returncode


def test_the_health_check_knows_nodes_with_and_without_tls_from_a_port_where_nobody_listens(
    tmp_path: Path,
) -> None:
    certificate = trustme.CA().issue_cert("store.example")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "store.pem")
    assert health(free_port()) != 0
    for flags in ([], ["--tls-cert", str(tmp_path / "store.pem")]):
        with running_node(tmp_path / f"data-{len(flags)}", *flags) as url:
            assert health(int(url.rpartition(":")[2])) == 0, flags
