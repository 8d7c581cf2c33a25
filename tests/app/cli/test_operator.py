"""The operator's token: who has it, where the command line finds it, and to whom it is never sent."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.access.operator import LOCK_FILE, OPERATOR_FILE, operator_token, token_for
from tests.support.cli import command, process
from tests.support.server import running_node
from tests.support.store_process import StoreProcess


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    running = StoreProcess(tmp_path / "data")
    running.start()
    yield running
    if running.process is not None:
        running.end(signal.SIGTERM)


def test_every_verb_of_an_operator_finds_the_token_of_the_node_on_its_machine(
    store: StoreProcess, tmp_path: Path
) -> None:
    second = StoreProcess(tmp_path / "second")
    second.start()
    try:
        for verb in (
            ("sync", store.url),
            ("peers", "list"),
            ("peers", "add", store.url),
            ("interests", "list"),
            ("interests", "set", "--channel", "c"),
            ("interests", "reset"),
            ("quarantine", "list"),
            ("reload",),
        ):
            done = process(*verb, "--node", second.url)
            assert done.code == 0, (verb, done.err)
        by_name = second.url.replace("127.0.0.1", "localhost")
        assert process("peers", "list", "--node", by_name).code == 0
    finally:
        second.end(signal.SIGTERM)


def test_an_address_makes_nobody_an_operator_and_the_minute_needs_no_token(
    store: StoreProcess,
) -> None:
    with httpx.Client(base_url=store.url, trust_env=False, timeout=30) as client:
        message = {
            "message_id": "m",
            "channel_id": "c",
            "lamport_timestamp": "1",
            "content": "eA==",
        }
        assert client.post("/v1/messages", json={"message": message}).status_code == 201
        assert client.get("/v1/messages/m").status_code == 200
        assert client.get("/v1/recon/interests").status_code == 200
        refused = client.get("/v1/peers")
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        assert OPERATOR_FILE in refused.json()["detail"]
        bearer = {"authorization": f"Bearer {operator_token(store.data_dir)}"}
        assert client.get("/v1/peers", headers=bearer).status_code == 200
        for wrong in ("0" * 64, "", "operator"):
            forged = {"authorization": f"Bearer sds_operator_{wrong}"}
            assert client.get("/v1/peers", headers=forged).status_code == 401
    mode = stat.S_IMODE((store.data_dir / OPERATOR_FILE).stat().st_mode)
    assert mode == 0o600


def test_a_token_is_worth_nothing_after_the_node_that_made_it(store: StoreProcess) -> None:
    first = operator_token(store.data_dir)
    store.end(signal.SIGKILL)
    assert token_for(store.url) is None, "nobody is there"
    store.start()
    second = token_for(store.url)
    assert second not in (None, first)
    status = {
        token: httpx.get(
            f"{store.url}/v1/peers", headers={"authorization": f"Bearer {token}"}, trust_env=False
        ).status_code
        for token in (first, second)
    }
    assert status == {first: 401, second: 200}


@pytest.mark.parametrize("mode", [0o644, 0o666, None])
def test_nobody_else_reads_the_new_token_whoever_could_read_the_old_one(
    tmp_path: Path, mode: int | None
) -> None:
    store = StoreProcess(tmp_path / "data")
    file = store.data_dir / OPERATOR_FILE
    store.data_dir.mkdir()
    old = tmp_path / "old" if mode is None else file
    old.write_text("sds_operator_" + "a" * 64)
    old.chmod(mode or 0o644)
    if mode is None:
        file.symlink_to(old)
    store.start()
    try:
        assert file.lstat().st_mode == stat.S_IFREG | 0o600
        assert process("peers", "list", "--node", store.url).code == 0
    finally:
        store.end(signal.SIGTERM)
    assert mode is not None or old.read_text() == "sds_operator_" + "a" * 64


def test_a_node_that_cannot_write_its_token_says_so(tmp_path: Path) -> None:
    file = tmp_path / OPERATOR_FILE
    file.mkdir()
    node = subprocess.Popen(
        command("serve", "--port", "0", "--data-dir", tmp_path, "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert node.stdout is not None
    node.stdout.readline()
    node.terminate()
    log = node.communicate(timeout=60)[1].decode()
    assert f"no operator's token: {file} cannot be written" in log


@pytest.mark.parametrize("excepted", ["127.0.0.1", "127.0.0.1:{port}"])
def test_the_token_is_sent_past_a_proxy_that_is_excepted(
    store: StoreProcess, monkeypatch: pytest.MonkeyPatch, excepted: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid")
    assert token_for(store.url) is None
    monkeypatch.setenv("NO_PROXY", excepted.format(port=store.port))
    assert token_for(store.url) == operator_token(store.data_dir)


@pytest.mark.parametrize("verb", ["peers list", "wait --timeout 1"])
def test_a_proxy_that_cannot_be_used_is_named_without_its_password(verb: str) -> None:
    told = process(*verb.split(), ALL_PROXY="socks5://user:secret@127.0.0.1:1", NO_PROXY="")
    assert (told.code, "ALL_PROXY is a socks5 proxy" in told.err) == (2, True)
    assert "secret" not in told.err
    assert "Traceback" not in told.err


def test_the_operator_still_gets_in_while_the_file_of_the_tokens_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_bytes(b"[" * 100_000)
    with running_node(tmp_path, trust_loopback=False) as node:
        bearer = {"authorization": f"Bearer {operator_token(tmp_path)}"}
        assert node.http.get("/v1/peers", headers=bearer).status_code == 200
        assert node.http.get("/v1/peers").status_code == 401


@contextmanager
def held(data_dir: Path, **changed: object) -> Iterator[str]:
    """A data directory as of a node that runs; what its lock file says is `changed`. Gives a URL."""
    with running_node(data_dir) as node:
        lock = data_dir / LOCK_FILE
        document = json.loads(lock.read_bytes()) | changed
        lock.write_bytes(json.dumps(document).encode())
        yield node.url


@pytest.mark.parametrize(
    "changed",
    [
        {"port": 1},
        {"address": "127.0.0.2"},
        {"address": "::"},
        {"place": "another host"},
        {"address": "odd"},
        {"address": None},
    ],
)
def test_the_token_is_sent_to_no_address_but_that_of_its_node(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    with held(tmp_path) as url:
        assert token_for(url) == operator_token(tmp_path)
    with held(tmp_path, **changed) as url:
        assert token_for(url) is None


def test_the_token_is_not_sent_where_a_node_that_was_killed_once_listened(
    store: StoreProcess,
) -> None:
    assert token_for(store.url) is not None
    links = Path(os.environ["XDG_STATE_HOME"]) / "sdstore" / "nodes"
    store.end(signal.SIGKILL)
    assert (links / f"127.0.0.1_{store.port}").is_symlink(), "nobody was left to remove it"
    with socket.create_server(("127.0.0.1", store.port)) as stranger:
        stranger.settimeout(20)
        caller = subprocess.Popen(
            command("peers", "list", "--node", store.url),
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        connection, _ = stranger.accept()
        with connection:
            request = connection.recv(65_536)
            connection.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
        caller.communicate(timeout=30)
    assert b"GET /v1/peers" in request
    assert b"authorization" not in request.lower()


@pytest.mark.parametrize(
    "url",
    [
        "http://store.example",
        "http://10.0.0.1:8000",
        "http://localhost:{port}",
        "http://[::1]:{port}",
    ],
)
def test_names_and_other_addresses_get_no_token(tmp_path: Path, url: str) -> None:
    with running_node(tmp_path) as node:
        assert token_for(url.format(port=node.url.rpartition(":")[2])) is None


def test_no_proxy_of_the_environment_gets_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with running_node(tmp_path) as node:
        assert token_for(node.url) is None
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert token_for(node.url) is not None


def test_a_second_service_on_a_data_directory_is_refused_and_told_of_the_first(
    store: StoreProcess, tmp_path: Path
) -> None:
    token = operator_token(store.data_dir)
    other = ("--database", f"sqlite:///{tmp_path}/other.db", "--port", "0")
    done = process("serve", "--data-dir", store.data_dir, *other)
    assert done.code == 6
    assert "data_dir_in_use" in done.err
    assert store.url in done.err
    assert operator_token(store.data_dir) == token, "the token of the first one stays"
    assert process("peers", "list", "--node", store.url).code == 0
