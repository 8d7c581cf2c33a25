"""Who called through a proxy: the right-most address that is not a trusted proxy, whatever others claim."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.access.proxies import FORWARDED_BYTES_MAX, HOPS_MAX, Proxies, address_key

PROXY = "10.0.0.1"
TRUSTED = ["10.0.0.0/24", "2001:db8:1::/48", "192.0.2.7"]
PROXIES = Proxies(TRUSTED)
BY_FORWARDED = Proxies(TRUSTED, "forwarded")


def client(value: str, proxies: Proxies = PROXIES, name: str = "x-forwarded-for") -> str:
    return proxies.client(PROXY, [(name.encode(), value.encode("latin-1"))]).host


def forwarded(value: str) -> str:
    return client(value, BY_FORWARDED, "forwarded")


@pytest.mark.parametrize(
    ("value", "host"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("198.51.100.1, 203.0.113.9", "203.0.113.9"),
        ("198.51.100.1,203.0.113.9,10.0.0.2, 192.0.2.7", "203.0.113.9"),
        ("203.0.113.9:4711", "203.0.113.9"),
        ("[2001:db8::9]:4711", "2001:db8::9"),
        ("2001:db8::9", "2001:db8::9"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("::ffff:10.0.0.2", "10.0.0.2"),
        # Only proxies: the one furthest from here.
        ("10.0.0.3, 10.0.0.2", "10.0.0.3"),
        # An address that cannot be read ends the search at the proxy that reported it.
        ("203.0.113.9, unknown", PROXY),
        ("203.0.113.9, unknown, 10.0.0.2", "10.0.0.2"),
        ("", PROXY),
        (",", PROXY),
        ("203.0.113.9,", PROXY),
        ("127.0.0.1", "127.0.0.1"),
        ("fe80::1%eth0", PROXY),
        ("[203.0.113.9]", PROXY),
        ("203.0.113.9:port", PROXY),
        ("203.0.113.009", PROXY),
        ("\xb2.0.0.1", PROXY),
    ],
)
def test_the_client_is_the_right_most_address_that_is_no_trusted_proxy(
    value: str, host: str
) -> None:
    assert client(value) == host


@pytest.mark.parametrize(
    ("value", "host"),
    [
        ("for=203.0.113.9", "203.0.113.9"),
        ('For="[2001:db8::9]:4711";proto=https;by=10.0.0.1', "2001:db8::9"),
        ('for=1.1.1.1, for="203.0.113.9:80";host="a,b", for=10.0.0.2', "203.0.113.9"),
        ("for=203.0.113.9, for=_hidden", PROXY),
        ("for=1.1.1.1;for=203.0.113.9", PROXY),
        ("proto=https", PROXY),
        # A quotation that a client opens does not hide what the proxy adds.
        ('for=1.1.1.1;host=", for=203.0.113.9', PROXY),
        ('for=1.1.1.1;host=", for="[2001:db8::9]"', PROXY),
    ],
)
def test_forwarded_is_read_as_rfc_7239_says(value: str, host: str) -> None:
    assert forwarded(value) == host


def test_a_proxy_that_adds_a_line_is_believed_whatever_the_lines_before_open() -> None:
    lines = [(b"forwarded", b'for=1.1.1.1;host="'), (b"forwarded", b"for=203.0.113.9")]
    assert BY_FORWARDED.client(PROXY, lines).host == "203.0.113.9"


def test_only_the_header_that_the_operator_names_is_read() -> None:
    """A proxy that sets one passes the other on as a client wrote it."""
    both = [(b"forwarded", b"for=1.1.1.1;proto=https"), (b"x-forwarded-for", b"203.0.113.9")]
    assert PROXIES.client(PROXY, both) == ("203.0.113.9", None)
    assert BY_FORWARDED.client(PROXY, both) == ("1.1.1.1", "https")


def test_the_scheme_is_http_or_https_as_the_last_proxy_says() -> None:
    for value, scheme in (("https", "https"), ("HTTP", "http"), ("a, https", "https"), ("x", None)):
        seen = PROXIES.client(PROXY, [(b"x-forwarded-proto", value.encode())])
        assert seen.scheme == scheme


def test_a_long_header_is_read_from_the_right_only() -> None:
    assert client("203.0.113.9" + ", 10.0.0.2" * (HOPS_MAX - 1)) == "203.0.113.9"
    assert client("203.0.113.9" + ", 10.0.0.2" * HOPS_MAX) == "10.0.0.2"
    assert client("1.1.1.1," * 3_000 + "203.0.113.9") == "203.0.113.9"
    assert forwarded("for=1.1.1.1," * FORWARDED_BYTES_MAX + "for=203.0.113.9") == PROXY


ADDRESSES = st.one_of(
    st.ip_addresses().map(str),
    st.sampled_from(["10.0.0.5", "192.0.2.7", "2001:db8:1::5", "::ffff:10.0.0.5", "203.0.113.9"]),
)
HOSTILE = st.one_of(
    st.text(st.characters(max_codepoint=255), max_size=40),
    st.sampled_from(["unknown", "", "127.0.0.1", "10.0.0.1", '"', "for=10.0.0.1", "[::1", "::1%a"]),
)


def oracle(addresses: list[str]) -> str:
    """The client, in the words of the standard library."""
    networks = [ip_network(each) for each in TRUSTED]
    host = PROXY
    for text in reversed(addresses[-HOPS_MAX:]):
        address = ip_address(text)
        address = getattr(address, "ipv4_mapped", None) or address
        host = str(address)
        if not any(address in network for network in networks):
            break
    return host


@settings(max_examples=200, deadline=None)
@given(st.lists(HOSTILE, max_size=4), st.lists(ADDRESSES, min_size=1, max_size=20))
@example(['for="'], ["203.0.113.9"])
def test_nothing_that_a_client_writes_changes_what_proxies_report(
    hostile: list[str], reported: list[str]
) -> None:
    # The first address that the proxies report is the client's; the others are proxies.
    reported = [reported[0], *["10.0.0.9" for _ in reported[1:HOPS_MAX]]]
    expected = oracle(reported)
    if any(ip_address(expected) in ip_network(each) for each in TRUSTED):
        return  # a proxy called by itself: what is left of it counts
    assert client(", ".join([*hostile, *reported])) == expected
    quoted = [f'for="[{each}]"' if ":" in each else f"for={each}" for each in reported]
    lines = [(b"forwarded", each.encode("latin-1")) for each in [*hostile, *quoted]]
    assert BY_FORWARDED.client(PROXY, lines).host == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(ADDRESSES, max_size=20))
def test_readable_addresses_give_what_the_standard_library_gives(addresses: list[str]) -> None:
    assert client(",".join(addresses)) == oracle(addresses)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_header_raises_and_the_client_is_always_an_address(value: bytes) -> None:
    for proxies, name in ((PROXIES, b"x-forwarded-for"), (BY_FORWARDED, b"forwarded")):
        ip_address(proxies.client(PROXY, [(name, value), (b"x-forwarded-proto", value)]).host)


def test_a_subscriber_is_one_client_whichever_of_its_addresses_it_uses() -> None:
    assert address_key("2001:db8::1") == address_key("2001:db8::ffff:1") == "2001:db8::/64"
    assert address_key("2001:db8:0:1::1") != address_key("2001:db8::1")
    assert address_key("::ffff:203.0.113.9") == address_key("203.0.113.9") == "203.0.113.9"
    assert address_key("fe80::1%eth0") == "fe80::/64"
    assert address_key("not an address") == "not an address"
