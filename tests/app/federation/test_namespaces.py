"""Hosts with networks of their own federate over TLS with tokens; who has no token gets no byte.

A tap records every packet between the hosts, and the files of the host without a token are searched.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import trustme

from app.access.callers import Scope
from app.access.tokens import TokenFile
from tests.support.cli import command
from tests.support.namespaces import Network
from tests.support.routes import ROUTES
from tests.support.store_process import StoreProcess

HOSTS = ("ada", "bob", "eve")
CHANNEL = "/secret/channel"
CONTENT = "c2VjcmV0IGNvbnRlbnQ="
SECRETS = (b"secret-id", CHANNEL.encode(), b"secret content", CONTENT[:-1].encode())
CONTROL = "a packet that nobody encrypted"
WAIT_S_MAX = 60.0
OPERATOR = (Scope.READ, Scope.PUBLISH, Scope.ADMIN)
PEER = (Scope.READ, Scope.PUBLISH, Scope.SYNC)

# Calls every route and writes all bytes that come back.
_ASK = """
import json, ssl, sys, httpx
url, ca, authorization, routes = json.loads(sys.argv[1])
headers = {"authorization": authorization} if authorization else {}
tls = ssl.create_default_context(cafile=ca)
out = sys.stdout.buffer
with httpx.Client(verify=tls, headers=headers, trust_env=False, timeout=10) as client:
    for name, method, path, body in routes:
        try:
            with client.stream(method, url + path, content=body.encode(), timeout=2) as answer:
                out.write(b"%d %s\\n" % (answer.status_code, name.encode()))
                out.writelines(b"%s: %s\\n" % each for each in answer.headers.raw)
                for part in answer.iter_raw():
                    out.write(part)
        except httpx.ReadTimeout:
            pass  # a stream of events
"""
_SEND = """
import socket, sys
socket.socket(type=socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], 9))
"""


class Hosts:
    """A store on each host, with TLS and a token for its operator; `ada` is a peer of the others."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = Network(HOSTS)
        self.ca = folder / "ca.pem"
        self.tokens = {host: self.new_token(host, *OPERATOR) for host in HOSTS}
        self.peer_token = self.new_token("ada", *PEER)
        (folder / "peer token").write_text(self.peer_token)
        self._config = folder / "node.toml"
        self._config.write_text("private_peers = true\nsync_interval_s = 0.5\n")
        self._authority = trustme.CA()
        self._authority.cert_pem.write_to_path(self.ca)
        self._stores = {"ada": self._store("ada")}
        peer = ("--peer", self.url("ada"))
        token = ("--peer-token-file", f"{self.url('ada')}={folder / 'peer token'}")
        self._stores["bob"] = self._store("bob", *peer, *token)
        self._stores["eve"] = self._store("eve", *peer)

    def new_token(self, host: str, *scopes: Scope) -> str:
        """A new token of a host's store."""
        (self.folder / host).mkdir(exist_ok=True)
        return TokenFile(self.folder / host / "tokens.json").create(scopes=scopes)[1]

    def _store(self, host: str, *options: object) -> StoreProcess:
        address = self.network.address(host)
        pem = self.folder / f"{host}.pem"
        self._authority.issue_cert(address).private_key_and_cert_chain_pem.write_to_path(pem)
        tls = ("--tls-cert", pem, "--peer-ca", self.ca)
        return StoreProcess(
            self.folder / host,
            *(*tls, "--config", self._config, *options),
            runner=self.network.at(host),
            host=address,
        )

    def url(self, host: str) -> str:
        """The address of a host's store."""
        return self._stores[host].url

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The stores and the network between them; its packets are recorded in the file `packets`."""
        with ExitStack() as closing:
            closing.enter_context(self.network.opened())
            closing.enter_context(self.network.tapped(self.folder / "packets"))
            for store in self._stores.values():
                store.start()
                closing.callback(store.end, signal.SIGTERM)
            yield

    def run(self, host: str, *line: str, stdin: bytes = b"") -> bytes:
        """What a program writes that runs on a host."""
        line = (*self.network.at(host), *line)
        return subprocess.run(
            line, input=stdin, check=True, capture_output=True, timeout=120
        ).stdout

    def call(self, host: str, verb: str, *arguments: object, stdin: bytes = b"") -> list[Any]:
        """What a verb of the operator prints on its host."""
        file = self.folder / f"token of {host}"
        file.write_text(self.tokens[host])
        access = ("--token-file", file, "--ca-file", self.ca)
        node = ("--node", self.url(host), "--json")
        line = command(*access, *verb.split(), *arguments, *node)
        return [json.loads(each) for each in self.run(host, *line, stdin=stdin).splitlines()]

    def publish(self, host: str) -> None:
        """Publish a message at a host's own store."""
        message = {
            "message_id": f"secret-id-{host}",
            "channel_id": CHANNEL,
            "lamport_timestamp": "1",
            "content": CONTENT,
        }
        self.call(host, "publish", "-", stdin=json.dumps({"message": message}).encode())

    def count_at(self, host: str) -> int:
        """Messages at a host's store."""
        return sum(int(each["count"]) for each in self.call(host, "channels"))

    def answers(self, authorization: str) -> bytes:
        """All bytes that `eve` gets from the store of `ada`, from every route that changes nothing."""
        routes = [
            (route.template, route.method, filled(route.template), "{}" * (route.method == "POST"))
            for route in ROUTES
            if route.method in ("GET", "POST")
        ]
        asked = json.dumps([self.url("ada"), str(self.ca), authorization, routes])
        return self.run("eve", sys.executable, "-c", _ASK, asked)

    def files_of(self, host: str) -> bytes:
        """All bytes in the files of a host's store."""
        files = (each for each in (self.folder / host).rglob("*") if each.is_file())
        return b"".join(each.read_bytes() for each in files)


def filled(template: str) -> str:
    """The path of a route, with the names of what the stores have."""
    path = template.replace("{message_id}", "secret-id-ada")
    path = path.replace("{channel_id}", CHANNEL.replace("/", "%2F"))
    return "/".join("00" if each.startswith("{") else each for each in path.split("/"))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_two_hosts_federate_with_tls_and_tokens_and_a_third_one_gets_not_one_byte(
    tmp_path: Path,
) -> None:
    hosts = Hosts(tmp_path)
    with hosts.serving():
        hosts.run("bob", sys.executable, "-c", _SEND, hosts.network.address("ada"), CONTROL)
        hosts.publish("ada")
        hosts.publish("bob")
        for host in ("bob", "ada"):
            wait_until(lambda host=host: hosts.count_at(host) == 2)  # type: ignore[misc]
        wait_until(lambda: hosts.call("eve", "peers list")[0]["state"] == "refused")
        without = ("", "Bearer sds_a_b", f"Bearer {hosts.tokens['eve']}")
        received = b"".join(map(hosts.answers, without))
        received_with_token = hosts.answers(f"Bearer {hosts.tokens['ada']}")
    packets = (tmp_path / "packets").read_bytes()
    assert CONTROL.encode() in packets  # the tap hears what goes from host to host
    tokens = [each.split("_")[2].encode() for each in (*hosts.tokens.values(), hosts.peer_token)]
    assert not [each for each in (*SECRETS, *tokens) if each in packets]
    for route in ROUTES:
        if route.method == "GET" and route.scope is not Scope.OPEN:
            assert received.count(f"401 {route.template}\n".encode()) >= len(without)
    assert not [each for each in SECRETS if each in received]
    assert b"200 /v1/feed\n" in received_with_token
    assert SECRETS[0] in received_with_token
    assert SECRETS[0] in hosts.files_of("bob")
    assert not [each for each in SECRETS if each in hosts.files_of("eve")]
