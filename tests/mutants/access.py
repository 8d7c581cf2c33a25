"""Faults planted in access tokens, and in who is served without one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from tests.mutants.fault import Fault, Plant, instead, nothing, returns

_TOKENS = ("tests/app/test_tokens.py",)
_SLOW_BODY = (
    "tests/app/http/test_tokens.py::test_a_request_whose_body_comes_after_the_revocation_is_refused",
)
_PROXIES = ("tests/app/test_proxies.py", "tests/app/http/test_proxies.py")
_ANONYMOUS = ("tests/app/http/test_anonymous.py",)
_RATES = ("tests/app/test_rates.py", "tests/app/http/test_anonymous.py")
_WATERMARK = ("tests/app/test_watermark.py",)
_CALLERS = ("tests/app/test_callers.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _TOKENS) -> Fault:
    return Fault(f"access: {name}", seam, plant, tests)


def _keep_what_was_read(right: Any) -> Any:
    def wrong(tokens: Any) -> None:
        callers = tokens._callers
        right(tokens)
        if tokens._problem is not None:
            tokens._callers, tokens._problem = callers, None

    return wrong


def _everything(*_: Any) -> Any:
    from app.callers import Caller

    return Caller("stranger", is_trusted=False)


def _as_written(text: str) -> Any:
    from ipaddress import ip_address

    try:
        return ip_address(text.strip())
    except ValueError:
        return None


async def _startup_of_uvicorn(server: Any, sockets: Any = None) -> None:
    import uvicorn

    await uvicorn.Server.startup(server, sockets)


def _left_most(*_: Any) -> Any:
    def wrong(proxies: Any, proxy_host: str, headers: Any) -> Any:
        from app.proxies import Seen

        values = [value for name, value in headers if name == proxies._header]
        return Seen(values[0].partition(b",")[0].decode("latin-1") if values else proxy_host, None)

    return wrong


def _operator(*_: Any) -> Any:
    from app.callers import Caller

    return Caller("local")


@contextmanager
def _no_lock(_: Any) -> Any:
    yield


FAULTS = [
    _fault("any secret will do", "app.tokens:compare_digest", returns(True)),
    _fault("a token never expires", "app.tokens:_is_expired", returns(False)),
    _fault("a revocation lets what runs go on", "app.tokens:Tokens._end", nothing),
    _fault(
        "a request is not checked again after its body",
        "app.tokens:Tokens.begin",
        nothing,
        _SLOW_BODY,
    ),
    _fault("a damaged file changes nothing", "app.tokens:Tokens.look", _keep_what_was_read),
    _fault("the secret is kept", "app.tokens:_hash", instead(lambda secret: secret.encode())),
    _fault(
        "changes of two processes overwrite each other",
        "app.tokens:TokenFile._locked",
        instead(_no_lock),
    ),
    _fault("a limited token covers every channel", "app.tokens:_interest", nothing),
    _fault(
        "strangers are operators of an open node",
        "app.callers:_anybody",
        instead(_everything),
        _CALLERS,
    ),
    _fault(
        "callers on this machine are trusted behind a proxy",
        "app.callers:DistrustingAuthorizer.identify",
        instead(_operator),
        _CALLERS,
    ),
    _fault(
        "a header counts whoever sent it", "app.proxies:Proxies.trusts", returns(True), _PROXIES
    ),
    _fault("the client is what it says", "app.proxies:Proxies.client", _left_most, _PROXIES),
    _fault(
        "an address in IPv6 is not the one in IPv4",
        "app.proxies:_node",
        instead(_as_written),
        _PROXIES,
    ),
    _fault(
        "every address of a subscriber is a client",
        "app.proxies:address_key",
        instead(str),
        _PROXIES,
    ),
    _fault(
        "callers are local behind a proxy",
        "app.settings:Settings.trusts_loopback",
        instead(True),
        _PROXIES,
    ),
    _fault("strangers reach every channel", "app.callers:_covered", nothing, _ANONYMOUS),
    _fault(
        "strangers publish where they read",
        "app.callers:Caller._channels_of",
        instead(lambda caller, _: caller.channels),
        _ANONYMOUS,
    ),
    _fault(
        "live streams of strangers are not counted", "app.rates:Rates.begin_live", nothing, _RATES
    ),
    _fault("bytes cost nothing", "app.rates:Bucket.spend", nothing, _RATES),
    _fault(
        "the disk is never low", "app.ingest.watermark:Watermark.is_low", instead(False), _WATERMARK
    ),
    _fault(
        "a low disk is looked at by the clock alone",
        "app.ingest.watermark:GROWTH",
        instead(0),
        _WATERMARK,
    ),
    _fault(
        "a push into a low disk is a fault",
        "app.recon.replica:NodeReplica.is_disk_low",
        instead(False),
        _WATERMARK,
    ),
    _fault(
        "a handshake may take a minute",
        "app.http.server:_TimelyServer.startup",
        instead(_startup_of_uvicorn),
        ("tests/app/http/test_tls_handshake.py",),
    ),
]
