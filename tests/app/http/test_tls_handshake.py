"""A client that connects to a TLS port and says nothing is cut off, as on a plain one."""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path

import pytest
import trustme

from app.http import server as module
from tests.support.server import running_node


def test_a_handshake_that_is_never_finished_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    certificate = tmp_path / "node.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
    monkeypatch.setattr(module, "TLS_HANDSHAKE_S", 2.0)
    with running_node(tmp_path / "node", tls_cert=certificate) as node:
        port = int(node.url.rpartition(":")[2])
        silent = [socket.create_connection(("127.0.0.1", port), timeout=40) for _ in range(3)]
        silent[1].sendall(b"\x16\x03\x01\x02\x00\x01")  # the begin of a ClientHello
        started_s = time.monotonic()
        # Meanwhile others are served.
        tls = ssl.create_default_context()
        authority.configure_trust(tls)
        with (
            socket.create_connection(("127.0.0.1", port), timeout=40) as plain,
            tls.wrap_socket(plain, server_hostname="127.0.0.1") as client,
        ):
            client.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
        for each in silent:
            with each:
                try:
                    while each.recv(4_096):
                        pass
                except ConnectionResetError:
                    pass
        assert time.monotonic() - started_s < 30  # uvloop's own bound is 60 s
