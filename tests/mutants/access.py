"""Faults planted in access tokens, and in who is served without one."""

from __future__ import annotations

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
_TLS = "tests/app/http/test_tls.py"
_RELOAD = "tests/app/http/test_reload.py"
_WITHDRAWN = "test_a_stranger_s_open_stream_ends_when_what_it_reads_is_withdrawn_on_all_workers"
_TAKEN_OVER = f"{_RELOAD}::test_a_policy_rates_and_what_strangers_may_do_change_in_a_running_node"
_SENDERS = ("tests/app/http/test_senders.py",)
_CALLERS = ("tests/app/test_callers.py",)
_OPERATOR = ("tests/app/cli/test_operator.py",)
_PAGE = ("tests/app/page/test_page.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _TOKENS) -> Fault:
    return Fault(f"access: {name}", seam, plant, tests)


def _keep_what_was_read(right: Any) -> Any:
    def wrong(tokens: Any) -> None:
        callers = tokens._callers
        right(tokens)
        if tokens._problem is not None:
            tokens._callers, tokens._problem = callers, None

    return wrong


FAULTS = [
    _fault(
        "callers on this machine are operators",
        "app.access.callers:_LOCAL",
        lambda right: type(right)("local"),
        _CALLERS,
    ),
    _fault(
        "the operator's token goes to any listener",
        "app.access.operator:_serves",
        returns(True),
        _OPERATOR,
    ),
    _fault(
        "the page takes forms of other origins",
        "app.page.session:is_of_this_node",
        returns(True),
        _PAGE,
    ),
    _fault("two services use one data directory", "app.access.operator:_take", nothing, _OPERATOR),
    _fault("any secret will do", "app.access.tokens:compare_digest", returns(True)),
    _fault("a token never expires", "app.access.tokens:_is_past", returns(False)),
    _fault("a revocation lets what runs go on", "app.access.tokens:Tokens._end", nothing),
    _fault(
        "a request is not checked again after its body",
        "app.access.tokens:Tokens.begin",
        nothing,
        _SLOW_BODY,
    ),
    _fault("a damaged file changes nothing", "app.access.tokens:Tokens.look", _keep_what_was_read),
    _fault("a limited token covers every channel", "app.access.tokens:_interest", nothing),
    _fault(
        "a header counts whoever sent it",
        "app.access.proxies:Proxies.trusts",
        returns(True),
        _PROXIES,
    ),
    _fault("strangers reach every channel", "app.access.callers:_covered", nothing, _ANONYMOUS),
    _fault(
        "strangers publish where they read",
        "app.access.callers:Caller._channels_of",
        instead(lambda caller, _: caller.channels),
        _ANONYMOUS,
    ),
    _fault("bytes cost nothing", "app.access.rates:Bucket.spend", nothing, _RATES),
    _fault(
        "the disk is never low", "app.ingest.door:DiskWatermark.is_low", instead(False), _WATERMARK
    ),
    _fault(
        "a handshake has no deadline",
        "app.server.connection:Connection._await_headers",
        nothing,
        (f"{_TLS}::test_a_handshake_that_drips_or_says_nothing_ends_at_the_deadline_of_headers",),
    ),
    _fault(
        "unread bytes over TLS do not count",
        "app.server.server:TlsLayer.get_write_buffer_size",
        returns(0),
        (
            f"{_TLS}::test_replies_that_are_not_read_over_tls_count_to_the_byte_and_no_longer_once_they_are",
        ),
    ),
    _fault(
        "withdrawn anonymous access lets what runs go on",
        "app.access.callers:AnonymousCallers.begin",
        nothing,
        (f"{_RELOAD}::{_WITHDRAWN}",),
    ),
    _fault(
        "a reload keeps the policy", "app.server.node:Node.take_policy", nothing, (_TAKEN_OVER,)
    ),
    _fault(
        "callers are bound to every sender",
        "app.access.callers:Caller.binding",
        returns("bound"),
        _SENDERS,
    ),
    _fault(
        "a message of another passes for callers who may not read it",
        "app.access.callers:Caller.reads",
        returns(True),
        _SENDERS,
    ),
]
