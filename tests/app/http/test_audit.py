"""The audit log has every action of an operator, and no log has a secret or content."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from app.access.callers import DistrustingAuthorizer, Scope
from app.access.tokens import TokenFile
from app.server.logs import TextLines, shown_url
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect
from tests.support.cli import command
from tests.support.federation import message
from tests.support.routes import ROUTES, Route
from tests.support.server import PROTOBUF, running_node

ACTIONS = [route for route in ROUTES if route.scope is Scope.ADMIN and route.method != "GET"]
AUDIT = "sdstore.audit"


def fields_of(caplog: pytest.LogCaptureFixture, count: int) -> list[dict[str, str]]:
    """The fields of all lines of the audit log, once there are `count`: replies come before them."""
    ends_s = time.monotonic() + 20
    while True:
        lines = [each for each in caplog.records if each.name == AUDIT]
        if len(lines) >= count:
            return [line.__dict__["audit"] for line in lines]
        assert time.monotonic() < ends_s, lines
        time.sleep(0.005)


def path_of(route: Route) -> str:
    """A path of a route, with some ID for each parameter."""
    return "/".join(
        "0" * 16 if each.startswith("{") else each for each in route.template.split("/")
    )


def test_there_are_actions_of_operators() -> None:
    names = {f"{route.method} {route.template}" for route in ACTIONS}
    assert {"POST /v1/peers", "DELETE /v1/tokens/{token_id}", "PUT /v1/recon/interests"} <= names


def test_each_action_is_one_line_whether_it_was_allowed_or_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, AUDIT)
    with running_node(tmp_path / "open") as node:
        for route in ACTIONS:
            caplog.clear()
            answer = node.http.request(route.method, path_of(route), json={"odd": 1})
            (fields,) = fields_of(caplog, 1)
            assert fields["action"] == f"{route.method} {route.template}"
            assert fields["target"].startswith(path_of(route))
            assert (fields["who"], fields["address"]) == ("operator", "127.0.0.1")
            assert fields["outcome"].split()[0] == str(answer.status_code)
    closed = DistrustingAuthorizer(is_open=False)
    with running_node(tmp_path / "closed", authorizer=closed) as node:
        for route in ACTIONS:
            caplog.clear()
            assert node.http.request(route.method, path_of(route)).status_code == 401
            (fields,) = fields_of(caplog, 1)
            assert fields["outcome"] == "401 unauthenticated"
        caplog.clear()
        node.http.get("/v1/peers")
        assert node.http.delete("/v1/peers/0").status_code == 401
        (fields,) = fields_of(caplog, 1)  # a reading request leaves none
        assert fields["target"] == "/v1/peers/0"


def test_a_token_that_is_refused_is_logged_by_its_id_and_a_flood_of_them_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    token, text = file.create(scopes=["sync"])
    file.revoke(token.token_id)
    with running_node(tmp_path) as node:
        for wrong in (text, *["sds_\nforged_x"] * 200):
            headers = {"authorization": f"Bearer {wrong}".encode("unicode_escape")}
            assert node.http.get("/v1/info", headers=headers).status_code == 401
    lines = [each.getMessage() for each in caplog.records if "their token" in each.getMessage()]
    assert len(lines) == 1
    assert f"the token {token.token_id}, from 127.0.0.1: the access token is not valid" in lines[0]


@pytest.mark.parametrize(
    "url",
    [
        "ada:hidden@b.example",
        "http:/ada:hidden@b.example",
        "http://ada:hid/hidden@b.example",
        "http://ada:hidden?hidden@b.example",
        "http://b.example?token=hidden@hidden",
        "http://b.example#hidden@",
        "//ada:hidden@@b.example",
    ],
)
def test_no_form_of_a_url_shows_a_secret(url: str) -> None:
    assert "hid" not in shown_url(url)


def test_no_log_has_a_secret_or_content_and_lines_name_their_request_and_session(
    tmp_path: Path,
) -> None:
    """All ways in, at the level debug."""
    hint, content = bytes.fromhex("5e" * 24), b"content that nobody logs"
    other, made = TokenFile(tmp_path / "tokens.json").create(
        scopes=["admin", "read", "sync", "publish"]
    )
    with running_node(tmp_path / "peer") as peer:
        peer.publish(message(1, "c", content=content + b" of the peer"))
        flags = ("--log-level", "debug", "--log-format", "json", "--sync-interval", "0.2")
        with subprocess.Popen(
            command("serve", "--port", 0, "--data-dir", tmp_path, "--json", *flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as running:
            try:
                assert running.stdout is not None
                url = json.loads(running.stdout.readline())["url"]
                headers = {"authorization": f"Bearer {made}"}
                with httpx.Client(base_url=url, headers=headers, trust_env=False) as http:
                    frame = encode(message(2, "c", content=content), Dialect.V2)
                    hints = {"retrieval-hint": hint.hex()}
                    http.post("/v1/messages", content=frame, headers=PROTOBUF | hints)
                    http.post("/v1/messages", content=b"\xff" + frame, headers=PROTOBUF)
                    http.post("/v1/messages/batch", content=frame, headers=PROTOBUF)
                    http.post("/v1/recon", content=frame, headers=PROTOBUF)
                    http.post("/v1/mvds/p?channel_id=c", content=frame, headers=PROTOBUF)
                    http.post("/v1/negentropy?channel_id=c", content=frame)
                    http.get(f"/v1/hints/{hint.hex()}")
                    http.get("/v1/feed", headers={"authorization": "Bearer sds_0_wrongsecret"})
                    for added in (
                        {"url": peer.url},
                        {"url": "http://127.0.0.1:1", "token": "token-of-the-peer"},
                    ):
                        assert http.post("/v1/peers", json=added).status_code == 201
                    secret = http.post("/v1/tokens", json={"scopes": ["read"]}).json()["token"]
                    ends_s = time.monotonic() + 20
                    while http.get("/v1/messages/m1").status_code != 200:
                        assert time.monotonic() < ends_s
                        time.sleep(0.05)
            finally:
                running.terminate()
                _, err = running.communicate()
    text = err.decode()
    lines = [json.loads(line) for line in text.splitlines()]
    secrets = [made, secret, made.rpartition("_")[2], secret.rpartition("_")[2]]
    for each in (*secrets, "token-of-the-peer", "wrongsecret", hint.hex(), content.decode()):
        assert each not in text, each
    audited = [line for line in lines if line["logger"] == AUDIT]
    assert [line["action"] for line in audited] == [*["POST /v1/peers"] * 2, "POST /v1/tokens"]
    assert {line["who"] for line in audited} == {f"token {other.token_id}"}
    assert len({line["request"] for line in audited}) == 3
    healthy = [line for line in lines if "is healthy" in line["message"]]
    assert healthy
    assert all(len(line["sync"]) == 16 for line in healthy)


FORGED = "2026-01-01T00:00:00.000+00:00 INFO sdstore.audit: DELETE /v1/tokens by token sds_forged"
UGLY = f"no\r\n{FORGED}\n\x1b[2J\x07\x9b31m\u202e\u2066\u2028\x7f"


def serve_refusals(connection: socket.socket) -> None:
    """Answer every request on a connection with a problem whose detail is `UGLY`."""
    problem = {"type": "about:blank", "status": 403, "code": "forbidden", "detail": UGLY}
    body = json.dumps(problem).encode()
    head = (
        b"HTTP/1.1 403 Forbidden\r\ncontent-type: application/problem+json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    with connection, suppress(OSError):
        connection.recv(65_536)
        connection.sendall(head + body)


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_a_peer_says_neither_begins_a_line_of_the_log_nor_reaches_the_terminal(
    tmp_path: Path, form: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        flags = ("--log-level", "debug", "--log-format", form)
        peer = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with subprocess.Popen(
            command("serve", "--port", 0, "--data-dir", tmp_path, "--peer", peer, *flags),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as running:
            assert running.stderr is not None
            try:
                listener.settimeout(20)
                lines: list[str] = []
                while not any("is down" in line for line in lines):
                    serve_refusals(listener.accept()[0])
                    while select.select([running.stderr], [], [], 0.2)[0]:
                        lines.append(os.read(running.stderr.fileno(), 1 << 20).decode())
            finally:
                running.terminate()
    text = "".join(lines)
    assert FORGED in text
    assert not any(line.startswith(FORGED) for line in text.splitlines())
    assert all(each.isprintable() for each in text.split("\n")), text


def test_a_traceback_does_not_begin_a_line_either(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextLines())
    try:
        int(UGLY)
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, UGLY, None, sys.exc_info())
    handler.emit(record)
    first, *rest = capsys.readouterr().err.split("\n")[:-1]
    assert first.isprintable()
    assert rest
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
