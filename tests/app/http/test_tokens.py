"""Access tokens on a running node: every route with every kind of credential, and revocations."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from app.access.callers import Scope
from app.access.tokens import GRANTED_SCOPES, HOLDS_AFTER_S, TokenFile
from recon.initiator import hello_request
from sdstore.client import StoreClient, StoreError
from sdstore.client.transport import HttpTransport
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.cli import cli
from tests.support.routes import ROUTES, Route
from tests.support.server import PROTOBUF, RunningNode, running_node
from tests.support.stores import PostgresStores

STOPS_WITHIN_S = 1.0


@dataclass(frozen=True)
class Guarded:
    """A node that demands tokens, and its file of tokens."""

    node: RunningNode
    file: TokenFile

    def token(self, *scopes: Scope, **limits: object) -> dict[str, str]:
        """The headers of a new token."""
        return {"authorization": f"Bearer {self.file.create(scopes=scopes, **limits)[1]}"}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    file = TokenFile(folder / "tokens.json")
    with running_node(folder, trust_loopback=False) as node:
        yield Guarded(node, file)


def path_of(route: Route) -> str:
    return re.sub(r"\{\w+\}", "x", route.template)


def name_of(route: Route) -> str:
    return f"{route.method} {route.template}"


def status_of(guarded: Guarded, route: Route, headers: dict[str, str]) -> int:
    with guarded.node.http.stream(route.method, path_of(route), headers=headers) as answer:
        if answer.status_code == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
        return answer.status_code


@pytest.fixture(scope="module")
def refused(guarded: Guarded) -> dict[str, dict[str, str]]:
    """Headers that are no credentials, or none any more."""
    revoked, text = guarded.file.create(scopes=GRANTED_SCOPES)
    guarded.file.revoke(revoked.token_id)
    expired = guarded.token(*GRANTED_SCOPES, expires_in_s=0.001)
    good = guarded.token(*GRANTED_SCOPES)["authorization"]
    return {
        "none": {},
        "expired": expired,
        "revoked": {"authorization": f"Bearer {text}"},
        "wrong secret": {"authorization": good[:-1] + ("0" if good[-1] != "0" else "1")},
        "malformed": {"authorization": "Basic YTpi"},
    }


@pytest.mark.parametrize("route", ROUTES, ids=name_of)
def test_every_route_with_every_kind_of_credential(
    guarded: Guarded, refused: dict[str, dict[str, str]], route: Route
) -> None:
    if route.scope is Scope.OPEN:
        assert status_of(guarded, route, {}) not in {401, 403}
        return
    for kind, headers in refused.items():
        assert (kind, status_of(guarded, route, headers)) == (kind, 401)
    without = [each for each in GRANTED_SCOPES if each is not route.scope]
    assert status_of(guarded, route, guarded.token(*without)) == 403
    if "{channel_id}" in route.template and route.scope is not Scope.ADMIN:
        for limits in ({"channels": ["other"]}, {"prefixes": ["other"]}):
            assert status_of(guarded, route, guarded.token(route.scope, **limits)) == 403
        within = guarded.token(route.scope, prefixes=["x"])
        assert status_of(guarded, route, within) not in {401, 403}
    assert status_of(guarded, route, guarded.token(route.scope)) not in {401, 403}


@pytest.mark.parametrize("path", ["/v1/live", "/v1/channels/x/live"])
def test_a_revocation_ends_a_live_stream_within_a_second(guarded: Guarded, path: str) -> None:
    token, text = guarded.file.create(scopes=[Scope.READ])
    headers = {"authorization": f"Bearer {text}"}
    with guarded.node.http.stream("GET", path, headers=headers) as stream:
        chunks = stream.iter_raw()
        assert next(chunks)
        admin = guarded.token(Scope.ADMIN)
        started_s = time.monotonic()
        answer = guarded.node.http.delete(f"/v1/tokens/{token.token_id}", headers=admin)
        assert answer.status_code == 204
        took_s = time.monotonic() - started_s
        # The reply comes when the revocation holds: nothing is sent after it.
        message = Message("late", "x", lamport_timestamp=1, content=b"SECRET")
        publisher = {**guarded.token(Scope.PUBLISH), **PROTOBUF}
        guarded.node.http.post("/v1/messages", content=encode(message), headers=publisher)
        with pytest.raises(httpx.RemoteProtocolError):
            assert b"late" not in b"".join(chunks)
        assert took_s < STOPS_WITHIN_S + 1  # a loaded machine
    assert guarded.node.http.get(path, headers=headers).status_code == 401


ODD_FILES = {
    "Infinity": b'{"version": 1, "tokens": [{"id": "a", "name": "", "sha256": "%s", "scopes": [], '
    b'"channels": null, "channel_prefixes": null, "created_at_ms": Infinity, "expires_at_ms": null}]}'
    % (b"00" * 32),
    "nested": b"[" * 100_000,
    "a part": b'{"version": 1, "tok',
    "another shape": b'{"version": 1, "tokens": 7}',
}


@pytest.mark.parametrize("odd", ODD_FILES.values(), ids=list(ODD_FILES))
def test_a_revoked_stream_ends_within_a_second_also_after_the_file_was_odd_for_a_moment(
    tmp_path: Path, odd: bytes
) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    token, text = file.create(scopes=[Scope.READ])
    headers = {"authorization": f"Bearer {text}"}

    def is_served() -> bool:
        try:
            return node.http.get("/v1/channels", headers=headers).is_success
        except httpx.RemoteProtocolError:  # a withdrawal ends requests under way
            return False

    def wait_for(is_known: bool) -> None:
        ends_s = time.monotonic() + 10
        while is_served() is not is_known:
            assert time.monotonic() < ends_s
            time.sleep(0.01)

    with running_node(tmp_path, trust_loopback=False) as node:
        good = file.path.read_bytes()
        file.path.write_bytes(odd)
        wait_for(is_known=False)
        time.sleep(2 * HOLDS_AFTER_S)  # whoever looks at the file has seen it
        file.path.write_bytes(good)
        wait_for(is_known=True)
        timeout = httpx.Timeout(10, read=STOPS_WITHIN_S + 1)  # a loaded machine
        with node.http.stream("GET", "/v1/live", headers=headers, timeout=timeout) as stream:
            chunks = stream.iter_raw()
            assert next(chunks)
            file.revoke(token.token_id)
            with pytest.raises(httpx.HTTPError) as ended:
                list(chunks)
            assert not isinstance(ended.value, httpx.ReadTimeout), "the revoked stream goes on"


@pytest.mark.parametrize("odd", ODD_FILES.values(), ids=list(ODD_FILES))
def test_while_the_tokens_cannot_be_read_each_is_refused_with_503_and_the_node_is_not_ready(
    tmp_path: Path, odd: bytes
) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    headers = {"authorization": f"Bearer {file.create(scopes=[Scope.READ])[1]}"}
    with running_node(tmp_path, trust_loopback=False) as node:
        assert node.http.get("/readyz").status_code == 200
        file.path.write_bytes(odd)
        time.sleep(2 * HOLDS_AFTER_S)
        answer = node.http.get("/v1/channels", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (503, "tokens_unavailable")
        ready = node.http.get("/readyz")
        assert (ready.status_code, ready.json()["code"]) == (503, "not_ready")
        assert "tokens.json cannot be used" in ready.json()["detail"]


def test_the_metrics_say_when_tokens_expire(guarded: Guarded) -> None:
    token, text = guarded.file.create(scopes=[Scope.READ], expires_in_s=3_600)
    answer = guarded.node.http.get("/metrics", headers={"authorization": f"Bearer {text}"})
    [value] = re.findall(
        rf'^sdstore_token_not_after_seconds{{token="{token.token_id}"}} ([\d.e+]+)$',
        answer.text,
        re.MULTILINE,
    )
    assert float(value) == pytest.approx(time.time() + 3_600, abs=60)


def recon_call(guarded: Guarded, headers: dict[str, str]) -> httpx.Response:
    """A call of a reconciliation session."""
    raw = hello_request().SerializeToString()
    return guarded.node.http.post("/v1/recon", content=raw, headers={**PROTOBUF, **headers})


def negentropy_call(guarded: Guarded, headers: dict[str, str]) -> httpx.Response:
    """A call of a session of negentropy."""
    octets = {"content-type": "application/octet-stream"}
    path, first = "/v1/negentropy?channel_id=x", bytes.fromhex("61000000")
    return guarded.node.http.post(path, content=first, headers={**octets, **headers})


@pytest.mark.parametrize("call", [recon_call, negentropy_call])
def test_a_session_that_was_opened_before_a_revocation_is_refused_at_its_next_call(
    guarded: Guarded, call: Callable[[Guarded, dict[str, str]], httpx.Response]
) -> None:
    # The client keeps its connection, on which the node knows the token already.
    token, text = guarded.file.create(scopes=[Scope.READ, Scope.SYNC])
    headers = {"authorization": f"Bearer {text}"}
    for _ in range(2):
        assert call(guarded, headers).status_code == 200
    guarded.file.revoke(token.token_id)
    revoked_s = asked_s = time.monotonic()
    while (answer := call(guarded, headers)).status_code == 200:
        assert asked_s - revoked_s < STOPS_WITHIN_S
        asked_s = time.monotonic()
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
    other = guarded.token(Scope.READ, Scope.SYNC)
    assert call(guarded, other).status_code == 200


def test_a_sync_whose_token_is_revoked_while_it_runs_ends_with_the_reason(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = {**guarded.token(Scope.PUBLISH), **PROTOBUF}
    frame = encode(Message("to sync", "x", lamport_timestamp=1, content=b"x"))
    guarded.node.http.post("/v1/messages", content=frame, headers=publisher)
    token, text = guarded.file.create(scopes=[Scope.READ, Scope.SYNC])
    calls: list[bytes] = []
    recon = HttpTransport.recon

    async def revoked_after_the_first_answer(peer: HttpTransport, request: bytes) -> bytes:
        calls.append(request)
        if len(calls) == 3:
            guarded.file.revoke(token.token_id)
            await asyncio.sleep(HOLDS_AFTER_S)
        return await recon(peer, request)

    monkeypatch.setattr(HttpTransport, "recon", revoked_after_the_first_answer)
    with running_node(tmp_path) as node:
        # The node starts a session with a new peer at once.
        added = node.http.post("/v1/peers", json={"url": guarded.node.url, "token": text})
        assert added.status_code in {200, 201}, added.text
        ends_s = time.monotonic() + 30
        while (
            not (syncs := node.http.get("/v1/syncs").json()["syncs"]) or syncs[0]["report"] is None
        ):
            assert time.monotonic() < ends_s
            time.sleep(0.05)
        (peer,) = node.http.get("/v1/peers").json()["peers"]
    report = syncs[0]["report"]
    # The first call is that of the node that learns of a peer.
    assert (len(calls), report["requests"], report["entries_received"]) == (3, 2, 0)
    reason = "HTTP 401: the access token is not valid"
    assert (report["outcome"], report["code"], report["detail"]) == ("refused", "forbidden", reason)
    assert (peer["state"], peer["reason"]) == ("refused", reason)


def test_a_stream_ends_when_its_token_expires(guarded: Guarded) -> None:
    headers = guarded.token(Scope.READ, expires_in_s=1.5)
    started_s = time.monotonic()
    with (
        guarded.node.http.stream("GET", "/v1/live", headers=headers) as stream,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        for _ in stream.iter_raw():
            pass
    assert 1 < time.monotonic() - started_s < 10


def test_a_request_whose_body_comes_after_the_revocation_is_refused(guarded: Guarded) -> None:
    token, text = guarded.file.create(scopes=[Scope.PUBLISH])
    frame = encode(Message("slow body", "x", lamport_timestamp=1, content=b"x"))
    url = urlsplit(guarded.node.url)
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=10) as client:
        head = (
            f"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\n"
            f"authorization: Bearer {text}\r\ncontent-length: {len(frame)}\r\n\r\n"
        )
        client.sendall(head.encode() + frame[:-1])
        time.sleep(0.1)
        guarded.file.revoke(token.token_id)
        time.sleep(HOLDS_AFTER_S)
        client.sendall(frame[-1:])
        assert b" 401 " in client.recv(4_096)
    reader = guarded.token(Scope.READ)
    assert guarded.node.http.get("/v1/messages/slow%20body", headers=reader).status_code == 404


def test_tokens_are_made_listed_and_revoked_over_http(guarded: Guarded) -> None:
    admin = guarded.token(Scope.ADMIN)
    body = {"name": "phone", "scopes": ["read"], "channel_prefixes": ["/a/"], "expires_in_s": 60}
    made = guarded.node.http.post("/v1/tokens", json=body, headers=admin)
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    document = made.json()
    text = document.pop("token")
    listed = guarded.node.http.get("/v1/tokens", headers=admin)
    assert document in listed.json()["tokens"]
    assert text.split("_")[2] not in listed.text
    with StoreClient(guarded.node.url, token=text) as client:
        assert client.lookup(["m"], "/a/1").missing == ("m",)
        with pytest.raises(StoreError) as caught:
            client.lookup(["m"], "/b/1")
        assert caught.value.code == "forbidden"
        guarded.node.http.delete(f"/v1/tokens/{document['id']}", headers=admin)
        with pytest.raises(StoreError) as caught:
            client.lookup(["m"], "/a/1")
        assert caught.value.code == "unauthenticated"
    again = guarded.node.http.delete(f"/v1/tokens/{document['id']}", headers=admin)
    assert (again.status_code, again.json()["code"]) == (404, "not_found")


def test_while_the_file_is_damaged_a_token_is_refused_and_says_why(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    _, text = file.create(scopes=[Scope.READ])
    headers = {"authorization": f"Bearer {text}"}
    whole = file.path.read_bytes()
    with running_node(tmp_path) as node:
        assert node.http.get("/v1/channels", headers=headers).status_code == 200
        file.path.write_bytes(whole[:-10])
        time.sleep(HOLDS_AFTER_S)
        answer = node.http.get("/v1/channels", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (503, "tokens_unavailable")
        assert node.http.get("/v1/channels").status_code == 200
        file.path.write_bytes(whole)
        time.sleep(HOLDS_AFTER_S)
        assert node.http.get("/v1/channels", headers=headers).status_code == 200


def test_the_command_line_makes_lists_and_revokes_tokens_beside_a_running_node(
    tmp_path: Path,
) -> None:
    with running_node(tmp_path) as node:
        made = cli(
            *("token", "new", "--scope", "read", "--scope", "sync", "--prefix", "/a/"),
            *("--name", "b's node", "--expires-in", "90d", "--data-dir", tmp_path),
        )
        assert (made.code, made.out.count("\n")) == (0, 1)
        text = made.out.strip()
        assert text not in made.err
        assert "read, sync; /a/*; expires 20" in made.err
        headers = {"authorization": f"Bearer {text}"}
        assert node.http.get("/v1/channels", headers=headers).status_code == 200
        (listed,) = cli("token", "list", "--data-dir", tmp_path, "--json").lines
        assert listed["name"] == "b's node"
        assert text.split("_")[1] == listed["id"]
        shown = cli("token", "list", "--data-dir", tmp_path).out
        assert ("b's node" in shown, text.split("_")[2] in shown) == (True, False)
        assert cli("token", "revoke", listed["id"], "--data-dir", tmp_path).code == 0
        assert node.http.get("/v1/channels", headers=headers).status_code == 401
    assert cli("token", "revoke", listed["id"], "--data-dir", tmp_path).code == 1
    listed = cli("token", "list", "--data-dir", tmp_path)
    assert listed.err == f"no tokens in {tmp_path / 'tokens.json'}\n"


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--scope", "all"),
        ("--scope", "admin", "--channel", "a"),
        ("--scope", "read", "--expires-in", "soon"),
        ("--scope", "read", "--expires-in", "0d"),
    ],
)
def test_a_token_that_makes_no_sense_is_a_usage_error(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    result = cli("token", "new", *options, "--data-dir", tmp_path)
    assert (result.code, result.out) == (2, "")
    assert not (tmp_path / "tokens.json").exists()


def test_tokens_are_those_of_a_host_even_where_hosts_share_a_database(
    postgres_stores: PostgresStores, tmp_path: Path
) -> None:
    shared = {"database_url": postgres_stores.new_url(), "trust_loopback": False}
    with (
        running_node(tmp_path / "first", **shared) as first_node,
        running_node(tmp_path / "second", **shared) as second_node,
    ):
        first = Guarded(first_node, TokenFile(tmp_path / "first/tokens.json"))
        second = Guarded(second_node, TokenFile(tmp_path / "second/tokens.json"))
        publisher = {**first.token(Scope.PUBLISH), **PROTOBUF}
        frame = encode(Message("shared", "x", lamport_timestamp=1, content=b"x"))
        first.node.http.post("/v1/messages", content=frame, headers=publisher).raise_for_status()

        def statuses(headers: dict[str, str]) -> list[int]:
            answers = [
                each.node.http.get("/v1/messages/shared", headers=headers)
                for each in (first, second)
            ]
            return [each.status_code for each in answers]

        def distribute() -> None:
            copy = second.file.path.with_name("copy")
            shutil.copyfile(first.file.path, copy)
            copy.replace(second.file.path)
            time.sleep(HOLDS_AFTER_S)

        token, text = first.file.create(scopes=[Scope.READ])
        of_first, of_second = {"authorization": f"Bearer {text}"}, second.token(Scope.READ)
        assert (statuses(of_first), statuses(of_second)) == ([200, 401], [401, 200])
        # A file that is distributed replaces what a host had.
        distribute()
        assert (statuses(of_first), statuses(of_second)) == ([200, 200], [401, 401])
        # A revocation returns when it holds on its own host; the other one needs the file.
        first.node.http.delete(
            f"/v1/tokens/{token.token_id}", headers=first.token(Scope.ADMIN)
        ).raise_for_status()
        assert statuses(of_first) == [401, 200]
        distribute()
        assert statuses(of_first) == [401, 401]
