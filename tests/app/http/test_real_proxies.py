"""nginx and Caddy with the configuration of docs/deploy in front of a node, as programs of their own."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import trustme

from app.access.callers import Scope
from app.access.operator import operator_token, token_for
from app.access.tokens import TokenFile
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.cli import free_port
from tests.support.debian import program
from tests.support.routes import ROUTES
from tests.support.server import PROTOBUF, running_node

EXAMPLES = Path(__file__).parents[3] / "docs" / "deploy"
STARTS_WITHIN_S = 20


def nginx(folder: Path, ports: tuple[int, int]) -> list[str]:
    """The command that runs nginx in the foreground with our example as a part of its configuration."""
    example = (
        (EXAMPLES / "nginx.conf")
        .read_text()
        .replace("127.0.0.1:8000", f"127.0.0.1:{ports[0]}")
        .replace("listen 443 ", f"listen 127.0.0.1:{ports[1]} ")
        .replace("/etc/ssl/store.example.pem", str(folder / "proxy.pem"))
        .replace("/etc/ssl/store.example.key", str(folder / "proxy.pem"))
    )
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    main = f"pid {folder}/pid; events {{}} http {{ access_log off; {paths}\n{example}\n}}"
    (folder / "nginx.conf").write_text(main)
    options = ["-p", str(folder), "-e", "stderr", "-g", "daemon off; master_process off;"]
    return [program("nginx"), "-c", str(folder / "nginx.conf"), *options]


def usual_nginx(folder: Path, ports: tuple[int, int]) -> list[str]:
    """The command that runs nginx as a newcomer sets it up: nothing but `proxy_pass`."""
    command = nginx(folder, ports)
    file = folder / "nginx.conf"
    head, _, _ = file.read_text().partition("\n")
    server = (
        f"server {{ listen 127.0.0.1:{ports[1]}; "
        f"location / {{ proxy_pass http://127.0.0.1:{ports[0]}; }} }}"
    )
    file.write_text(f"{head}\n{server}\n}}")
    return command


@pytest.mark.slow
def test_whoever_comes_through_a_proxy_that_nobody_declared_is_no_operator(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        running_node(tmp_path / "node") as node,
        httpx.Client(base_url=url, trust_env=False, timeout=20) as outside,
        running(usual_nginx(tmp_path, (int(node.url.rpartition(":")[2]), port)), tmp_path, outside),
    ):
        # nginx sends `Host: 127.0.0.1:PORT`, from loopback, and nothing that shows it.
        assert outside.get("/v1/channels", headers={"host": "store.example"}).status_code == 200
        for route in ROUTES:
            if route.scope is Scope.ADMIN:
                path = re.sub(r"\{\w+\}", "x", route.template)
                answer = outside.request(route.method, path, headers={"host": "store.example"})
                assert (route.template, answer.status_code) == (route.template, 403)
        assert token_for(url) is None, "the command line sends the token to the node alone"
        assert token_for(node.url) == operator_token(tmp_path / "node")


def caddy(folder: Path, ports: tuple[int, int]) -> list[str]:
    """The command that runs Caddy with our example and a certificate of our own."""
    example = (
        (EXAMPLES / "Caddyfile")
        .read_text()
        .replace("127.0.0.1:8000", f"127.0.0.1:{ports[0]}")
        .replace(
            "store.example {",
            f"https://127.0.0.1:{ports[1]}, https://store.example:{ports[1]} {{\n"
            f"\ttls {folder}/proxy.pem {folder}/proxy.pem",
        )
    )
    options = "{\n\tadmin off\n\tauto_https disable_redirects\n}\n"
    (folder / "Caddyfile").write_text(options + example)
    return [program("caddy"), "run", "--adapter", "caddyfile", "--config", f"{folder}/Caddyfile"]


@contextmanager
def running(command: list[str], folder: Path, client: httpx.Client) -> Iterator[None]:
    """The program, once it answers for the node."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | {"HOME": str(folder)}
        )
    try:
        ends_s = time.monotonic() + STARTS_WITHIN_S
        while True:
            with suppress(httpx.TransportError):
                if client.get("/livez").is_success:
                    break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < ends_s, log.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.kill()  # asked to end, it would wait for the client's idle connections
        process.wait(30)


@pytest.mark.slow
@pytest.mark.parametrize("command", [nginx, caddy])
def test_a_node_behind_a_real_proxy_is_served_as_the_documentation_says(
    tmp_path: Path, command: Callable[[Path, tuple[int, int]], list[str]]
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "store.example")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "proxy.pem")
    tls = ssl.create_default_context()
    authority.configure_trust(tls)
    port = free_port()
    url = f"https://127.0.0.1:{port}"
    data_dir = tmp_path / "node"
    options = {"public_url": url, "trusted_proxies": ["127.0.0.1"]}
    with (
        running_node(data_dir, **options) as node,
        httpx.Client(base_url=url, verify=tls, trust_env=False, timeout=20) as client,
        running(command(tmp_path, (int(node.url.rpartition(":")[2]), port)), tmp_path, client),
    ):
        # The proxy calls from loopback, and nobody is an operator for that.
        for forged in ({}, {"x-forwarded-for": "127.0.0.1"}, {"forwarded": "for=127.0.0.1"}):
            for path in ("/v1/peers", "/v1/channels"):
                assert client.get(path, headers=forged).status_code == 401
        _, text = TokenFile(data_dir / "tokens.json").create(scopes=[Scope.READ, Scope.PUBLISH])
        client.headers["authorization"] = f"Bearer {text}"

        def publish(message_id: str, content: bytes) -> httpx.Response:
            frame = encode(Message(message_id, "c/d e", lamport_timestamp=1, content=content))
            return client.post("/v1/messages", content=frame, headers=PROTOBUF)

        published = publish("a/b", b"first")
        assert published.status_code == 201, published.text
        assert published.headers["location"].startswith(f"{url}/v1/entries/")
        assert client.get(published.headers["location"]).content
        assert client.get("/v1/messages/a%2Fb").json()["message"]["channel_id"] == "c/d e"

        large = bytes(1_048_576 - 200)
        assert publish("large", large).status_code == 201
        got = client.get("/v1/messages/large", headers={"accept": "application/x-protobuf"})
        assert large in got.content

        page = client.get("/v1/channels/c%2Fd%20e/messages?limit=1")
        assert len(page.json()["messages"]) == 1
        following = client.get(page.links["next"]["url"])
        assert page.links["next"]["url"].startswith(url)
        assert len(following.json()["messages"]) == 1

        with client.stream("GET", "/v1/live") as stream:
            pieces = stream.iter_raw()
            head = next(pieces)
            for number in range(3):
                sent_s = time.monotonic()
                publish(f"live {number}", b"x")
                while f"live {number}".encode() not in head:
                    head += next(pieces)
                # Far below the heartbeat, with which a buffer would be emptied.
                assert time.monotonic() - sent_s < 5
