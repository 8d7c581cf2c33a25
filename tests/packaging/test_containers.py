"""The container files: linted, and in step with what the node understands."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
import psycopg
import pytest
import yaml

from app.settings import ENVIRONMENT_PREFIX, load_settings
from bench.postgres_server import SERVER_USER, PostgresServer, own_postgres
from sdstore.client import StoreClient
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.cli import command, free_port

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
STORES = ("store-a", "store-b")
# Every character that a URL, a shell or a connection string might take for its own.
PASSWORD = "p@ss/w:rd?#%41&='\\ \""
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


def environment_of(name: str) -> dict[str, str]:
    """The environment of a store's container, from the image and the compose file."""
    last_stage = (ROOT / "Dockerfile").read_text().rsplit("FROM ", 1)[1].replace("\\\n", " ")
    (line,) = (line for line in last_stage.splitlines() if line.startswith("ENV "))
    image = dict(word.split("=", 1) for word in line.split()[1:])
    given = COMPOSE["services"][name]["environment"]
    filled = {
        key: re.sub(r"\$\{POSTGRES_PASSWORD[^}]*\}", lambda _: PASSWORD, value)
        for key, value in given.items()
    }
    return {k: v for k, v in (image | filled).items() if k != "PATH"}


@contextmanager
def demanding_password(server: PostgresServer) -> Iterator[str]:
    """The user of the compose file, with its password and databases; the folder of the socket."""
    folder = Path(server.url.split("host=")[1])
    with psycopg.connect(server.url, autocommit=True) as connection:
        literal = psycopg.sql.Literal(PASSWORD)
        connection.execute(psycopg.sql.SQL("CREATE ROLE sdstore LOGIN PASSWORD {}").format(literal))
        for name in STORES:
            connection.execute(f'CREATE DATABASE "{name}" OWNER sdstore')  # type: ignore[call-overload]
        rules = folder / "data" / "pg_hba.conf"
        rules.write_text("local all postgres trust\nlocal all sdstore scram-sha-256\n")
        if SERVER_USER:
            shutil.chown(rules, SERVER_USER)
        connection.execute("SELECT pg_reload_conf()")
    yield str(folder)


@contextmanager
def store(name: str, folder: Path, ports: dict[str, int], sockets: str) -> Iterator[str]:
    """A store with the settings of its container; only places are those of this machine."""
    environment = environment_of(name)
    url = environment["SDSTORE_DATABASE_URL"]
    host = f"@database-{name[-1]}/sdstore"
    assert host in url
    environment["SDSTORE_DATABASE_URL"] = url.replace(host, f"@/{name}?host={quote(sockets)}")
    for other, port in ports.items():
        peers = environment["SDSTORE_PEERS"]
        environment["SDSTORE_PEERS"] = peers.replace(f"{other}:8000", f"127.0.0.1:{port}")
    environment |= {"SDSTORE_DATA_DIR": str(folder / name), "SDSTORE_PORT": str(ports[name])}
    environment["SDSTORE_SYNC_INTERVAL_S"] = "0.2"
    kept = {k: v for k, v in os.environ.items() if not k.startswith((ENVIRONMENT_PREFIX, "PG"))}
    with subprocess.Popen(
        command(*COMPOSE["services"][name]["command"], "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=kept | environment,
    ) as running:
        try:
            assert running.stdout is not None
            assert running.stderr is not None
            first = running.stdout.readline()
            assert first, running.stderr.read().decode()
            assert PASSWORD not in first.decode()
            assert json.loads(first)["url"].endswith(str(ports[name]))
            yield f"http://127.0.0.1:{ports[name]}"
        finally:
            running.terminate()
            running.communicate()


def test_two_stores_with_the_settings_of_the_compose_file_federate(tmp_path: Path) -> None:
    ports = {name: free_port() for name in STORES}
    with own_postgres() as server, demanding_password(server) as sockets, ExitStack() as stack:
        # The first one starts before its peer is there.
        urls = [stack.enter_context(store(name, tmp_path, ports, sockets)) for name in STORES]
        for number, url in enumerate(urls):
            frame = encode(Message(f"m{number}", "c", lamport_timestamp=number + 1, content=b"hi"))
            with StoreClient(url) as client:
                client.publish(frame)
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            found = [
                len(httpx.get(f"{url}/v1/feed", trust_env=False).json()["messages"]) for url in urls
            ]
            peers = [httpx.get(f"{url}/v1/peers", trust_env=False).json() for url in urls]
            if found == [2, 2] and all(each["peers"][0]["state"] == "healthy" for each in peers):
                break
            assert time.monotonic() < deadline, (found, peers)
            time.sleep(0.1)
