"""Nodes that federate with tokens and TLS, as processes of their own."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from app.access.callers import Scope
from app.access.operator import token_for
from app.access.tokens import TokenFile
from sdstore.client import StoreClient
from sdstore.sds.model import Message
from tests.support.cli import Result, cli
from tests.support.server import running_node
from tests.support.store_process import StoreProcess

MESSAGE = Message("m", "/a/1", lamport_timestamp=1, content=b"SECRET content")
OTHER = Message("n", "/b/1", lamport_timestamp=2, content=b"SECRET other")


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a CA and of the certificate and key of 127.0.0.1."""
    folder = tmp_path_factory.mktemp("ca")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
        folder / "node.pem"
    )
    return folder


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, ca: Path) -> Iterator[StoreProcess]:
    """A node that serves https and demands tokens, with two messages."""
    tmp_path = tmp_path_factory.mktemp("guarded")
    config = tmp_path / "guarded.toml"
    config.write_text("trust_loopback = false\n")
    node = StoreProcess(tmp_path / "guarded", "--tls-cert", ca / "node.pem", "--config", config)
    node.start()
    file = TokenFile(node.data_dir / "tokens.json")
    _, publisher = file.create(scopes=[Scope.PUBLISH])
    (tmp_path / "publisher").write_text(publisher)
    try:
        for message in (MESSAGE, OTHER):
            lines = json.dumps({"message": message_json(message)}).encode()
            published = cli(
                *access(ca, tmp_path / "publisher"),
                *("publish", "-", "--node", node.url),
                stdin=lines,
            )
            assert published.code == 0, published.err
        yield node
    finally:
        node.end(signal.SIGTERM)


def message_json(message: Message) -> dict[str, str]:
    return {
        "message_id": message.message_id,
        "channel_id": message.channel_id,
        "lamport_timestamp": str(message.lamport_timestamp),
        "content": "U0VDUkVU",
    }


def access(ca: Path, token_file: Path) -> tuple[object, ...]:
    return ("--ca-file", ca / "ca.pem", "--token-file", token_file)


def write_token(node: StoreProcess, path: Path, *scopes: Scope, **limits: list[str]) -> str:
    """A token of the node in a file; its ID."""
    token, text = TokenFile(node.data_dir / "tokens.json").create(
        scopes=scopes, prefixes=limits.get("prefixes", ())
    )
    path.write_text(f"{text}\n")
    return token.token_id


def synced(node: StoreProcess, peer: StoreProcess) -> Result:
    return cli("sync", peer.url, "--node", node.url, "--json")


def ids(node: StoreProcess) -> set[str]:
    with StoreClient(node.url, token=token_for(node.url)) as client:
        channels = [each.channel_id for each in client.channels()]
        return {each.message.message_id for name in channels for each in client.messages(name)}


def test_a_peer_is_added_with_its_token_which_survives_a_restart_and_is_not_shown(
    tmp_path: Path, ca: Path, guarded: StoreProcess
) -> None:
    write_token(guarded, tmp_path / "token", Scope.READ, Scope.SYNC)
    node = StoreProcess(tmp_path / "node", "--peer-ca", ca / "ca.pem")
    node.start()
    try:
        added = cli("peers", "add", guarded.url, "--node", node.url, "--json")
        assert added.code == 0
        assert synced(node, guarded).code == 4
        token = ("--token-file", tmp_path / "token")
        added = cli("peers", "add", guarded.url, *token, "--node", node.url, "--json")
        assert "sds_" not in added.out
        assert synced(node, guarded).code == 0
        assert ids(node) == {"m", "n"}
        node.end(signal.SIGTERM)
        node.start()
        assert synced(node, guarded).code == 0
    finally:
        node.end(signal.SIGTERM)


def test_a_node_that_does_not_know_the_ca_refuses_the_certificate(
    tmp_path: Path, guarded: StoreProcess
) -> None:
    node = StoreProcess(tmp_path / "node")
    node.start()
    try:
        result = synced(node, guarded)
        assert (result.code, "certificate" in result.out) == (5, True)
    finally:
        node.end(signal.SIGTERM)


def test_a_file_of_cas_that_was_replaced_holds_for_the_next_session(
    tmp_path: Path, ca: Path
) -> None:
    file = tmp_path / "cas.pem"
    with (
        running_node(tmp_path / "peer", tls_cert=ca / "node.pem") as peer,
        running_node(tmp_path / "node", peer_ca=file) as node,
    ):

        def ended(cas: bytes) -> tuple[str, str]:
            """The outcome and the code of a session, once the file has these CAs."""
            file.with_suffix(".new").write_bytes(cas)
            file.with_suffix(".new").replace(file)
            url = peer.url.replace("http:", "https:")
            sync_id = node.http.post("/v1/syncs", json={"peer_url": url}).json()["id"]
            node.http.get(f"/v1/syncs/{sync_id}/events").raise_for_status()  # until it has ended
            report = node.http.get(f"/v1/syncs/{sync_id}").json()["report"]
            return report["outcome"], report["code"]

        old, new = trustme.CA().cert_pem.bytes(), (ca / "ca.pem").read_bytes()
        assert ended(old) == ("peer_fault", "peer_unreachable")
        assert ended(old + new) == ("in_sync", "")
        assert ended(new) == ("in_sync", "")
        assert ended(old) == ("peer_fault", "peer_unreachable")


@pytest.mark.parametrize("content", [None, b"", b"two tokens", b"\xff"])
def test_a_token_file_without_a_token_is_a_clear_error(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    result = cli("--token-file", file, "get", "m", "--node", "http://127.0.0.1:9")
    assert result.code in (2, 6)
    assert str(file) in result.err


def test_a_certificate_that_cannot_be_used_stops_the_start(tmp_path: Path, ca: Path) -> None:
    for cert, why in (
        (tmp_path / "absent.pem", "No such file"),
        (ca / "ca.pem", "no tls_key, so the file must contain the key too"),
    ):
        result = cli("serve", "--port", 0, "--data-dir", tmp_path, "--tls-cert", cert)
        assert (result.code, str(cert) in result.err) == (2, True)
        assert why in result.err
    key_alone = cli("serve", "--port", 0, "--data-dir", tmp_path, "--tls-key", ca / "node.pem")
    assert (key_alone.code, "it needs tls_cert" in key_alone.err) == (2, True)
