"""Peer URLs lead nowhere they should not."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address

import pytest

from app.errors import Code, Problem
from app.federation.client import (
    PeerClients,
    is_allowed,
    open_http_client,
    open_http_transport,
    parse_peer_url,
    resolve,
)
from app.server.limits import DEFAULT_LIMITS

NOT_URLS = [
    "",
    " ",
    "example.org",
    "//example.org",
    "ftp://example.org",
    "file:///etc/passwd",
    "gopher://127.0.0.1:70/",
    "unix:///run/x.sock",
    "javascript:alert(1)",
    "data:text/plain,x",
    "http://",
    "http:///path",
    "http://:8000",
    "http://user@example.org",
    "http://user:password@example.org",
    "http://example.org@127.0.0.1",
    "http://example.org?x=1",
    "http://example.org/#x",
    "http://example.org:99999",
    "http://exa mple.org",
    "http://[::1",
    "http://example.org\r\nHost: internal",
    "http://xn--a",
    "http://xn--a.example/x",
    "http://" + "a" * 3_000,
]
INWARD_URLS = [
    "http://127.0.0.1",
    "http://127.1",
    "http://127.0.0.1.",
    "http://0x7f.0.0.1",
    "http://0x7f000001",
    "http://2130706433",
    "http://0177.0.0.1",
    "http://017700000001",
    "http://127.255.255.254",
    "http://localhost",
    "http://LOCALHOST",
    "http://localhost.",
    "http://0.0.0.0",
    "http://0",
    "http://10.0.0.1",
    "http://10.255.255.255",
    "http://172.16.0.1",
    "http://172.31.255.254",
    "http://192.168.1.1",
    "http://169.254.169.254",
    "http://169.254.169.254/latest/meta-data",
    "http://2852039166",
    "http://100.64.0.1",
    "http://192.0.2.1",
    "http://198.18.0.1",
    "http://224.0.0.1",
    "http://240.0.0.1",
    "http://255.255.255.255",
    "http://[::1]",
    "http://[::]",
    "http://[0:0:0:0:0:0:0:1]",
    "http://[::ffff:127.0.0.1]",
    "http://[::ffff:7f00:1]",
    "http://[::ffff:169.254.169.254]",
    "http://[64:ff9b::127.0.0.1]",
    "http://[64:ff9b::a9fe:a9fe]",
    "http://[2002:7f00:1::]",
    "http://[2002:a00:1::]",
    "http://[fe80::1]",
    "http://[fc00::1]",
    "http://[fd12:3456::1]",
    "http://[ff02::1]",
    "http://[fec0::1]",
    "http://192.0.0.8",
    "http://[::ffff:192.0.0.8]",
    "http://[::127.0.0.1]",
    "http://[64:ff9b:1::7f00:1]",
    "https://[::1]:8443/base",
]


@pytest.mark.parametrize("text", NOT_URLS)
def test_what_is_no_plain_http_url_is_refused(text: str) -> None:
    with pytest.raises(Problem) as refusal:
        parse_peer_url(text)
    assert refusal.value.code is Code.PEER_URL_REFUSED


@pytest.mark.parametrize("text", INWARD_URLS)
def test_no_form_of_an_inward_address_resolves_where_private_ones_are_not_allowed(
    text: str,
) -> None:
    with pytest.raises(Problem) as refusal:
        asyncio.run(resolve(parse_peer_url(text), private_allowed=False))
    # Some forms are no address to this machine's resolver at all; none may come through.
    assert refusal.value.code in {Code.PEER_URL_REFUSED, Code.PEER_UNREACHABLE}


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254", "fe80::1", "224.0.0.1", "0.0.0.0", "0.1.2.3", "::", "240.0.0.1"),
        *("fec0::1", "feff::1", "192.0.0.8", "192.0.0.170", "192.0.2.1", "198.18.0.1"),
        *("255.255.255.255", "192.88.99.1", "203.0.113.9", "ff02::1", "100::1", "4000::1"),
        *("::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b:1::7f00:1", "2001:db8::1", "5f00::1"),
        *("2001:0:101:101::1", "2001:0:7f00:1:0:fbff:80ff:fffe", "2001:2::1", "3fff::1"),
        *("::ffff:169.254.169.254", "::ffff:192.0.0.8", "64:ff9b::a9fe:a9fe", "2002:c000:8::"),
    ],
)
def test_addresses_that_no_peer_has_stay_forbidden_where_private_ones_are_allowed(
    address: str,
) -> None:
    assert not is_allowed(ip_address(address), private_allowed=True)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "::1", "10.0.0.1", "172.31.0.1", "192.168.1.1", "100.64.0.1"),
        *("fd00::1", "fc00::1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1", "2002:a00:1::"),
    ],
)
def test_private_addresses_depend_on_the_operator(address: str) -> None:
    assert is_allowed(ip_address(address), private_allowed=True)
    assert not is_allowed(ip_address(address), private_allowed=False)


def test_the_same_peer_has_one_url() -> None:
    forms = ["http://Example.org", "http://example.org/", " http://example.org:80 "]
    assert len({str(parse_peer_url(form)) for form in forms}) == 1


@pytest.mark.parametrize("client", ["sessions", "links"])
def test_a_name_that_changes_between_the_check_and_the_connection_leads_to_the_checked_address(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    met: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnews")
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()

        async def answer(host: str, *_: object, **__: object) -> list[object]:
            asked.append(host)
            address = "127.0.0.1" if len(asked) == 1 else "169.254.169.254"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

        monkeypatch.setattr(loop, "getaddrinfo", answer)
        url = parse_peer_url(f"http://peer.example:{port}")
        if client == "links":
            async with open_http_client(url, private_allowed=True) as http:
                assert (await http.get("v1/relay")).content == b"news"
        else:
            clients = PeerClients()
            async with open_http_transport(
                url, DEFAULT_LIMITS, private_allowed=True, clients=clients
            ) as transport:
                assert await transport.recon(b"") == b"news"
            await clients.close()
        server.close()

    asyncio.run(scenario())
    assert asked == ["peer.example"]
    assert b"host: peer.example:" in met[0].lower()
