"""The container files: linted, and in step with what the node understands."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from app.settings import load_settings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
STORES = ("store-a", "store-b")


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
    assert needed | {"pyproject.toml", "LICENSE", "requirements/server.lock"} == let_in
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
