"""Faults planted in access tokens, and in who is served without one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from tests.mutants.fault import Fault, Plant, after, instead, nothing, returns

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
_NAMED = f"{_RELOAD}::test_a_reload_takes_over_what_can_change_and_names_the_rest"
_EDITED = (
    f"{_RELOAD}::"
    "test_a_changed_file_of_a_policy_judges_from_the_reload_on_and_a_broken_one_does_not"
)
_BEHIND = f"{_RELOAD}::test_a_worker_is_behind_until_it_has_read_its_settings_since_the_call"
_CALLERS = ("tests/app/test_callers.py",)
_OPERATOR = ("tests/app/cli/test_operator.py",)


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
    from app.access.callers import Caller

    return Caller("stranger")


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
        from app.access.proxies import Seen

        values = [value for name, value in headers if name == proxies._header]
        return Seen(values[0].partition(b",")[0].decode("latin-1") if values else proxy_host, None)

    return wrong


def _piece_by_piece(layer: Any, pieces: Any) -> None:
    for each in pieces:
        layer.write(each)


def _read_at_once(layer: Any) -> None:
    layer._is_paused = False
    layer._go_on_reading()


def _not_once_ended(right: Any) -> Any:
    def wrong(layer: Any) -> None:
        if not layer._is_ended:
            right(layer)

    return wrong


def _take_always(layer: Any, nbytes: int) -> None:
    layer._incoming.write(layer._buffer[:nbytes])
    layer._advance()


def _operator(*_: Any) -> Any:
    from app.access.callers import Caller

    return Caller("local")


@contextmanager
def _no_lock(_: Any) -> Any:
    yield


def _keep_verified(right: Any) -> Any:
    def wrong(tokens: Any, fresh: Any) -> None:
        verified = tokens._verified
        right(tokens, fresh)
        tokens._verified = verified

    return wrong


def _as_at_first(right: Any) -> Any:
    first: dict[Any, Any] = {}
    return lambda settings: first.setdefault(settings.data_dir, right(settings))


def _always_anew(right: Any) -> Any:
    return lambda name, _=None: right(name)


def _by_name_alone(right: Any) -> Any:
    return lambda name, loaded=None: (
        loaded if loaded is not None and loaded.name == name else right(name, loaded)
    )


def _with_its_own_revision(right: Any) -> Any:
    def wrong(name: str, loaded: Any = None) -> Any:
        policy = right(name, loaded)
        return policy if policy is loaded else policy._replace(revision=policy.rules.revision)

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
    _fault("two services use one data directory", "app.access.operator:_take", nothing, _OPERATOR),
    _fault("a file that is replaced changes its owner", "app.server.disk:_take_owner", nothing),
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
    _fault(
        "the secret is kept", "app.access.tokens:_hash", instead(lambda secret: secret.encode())
    ),
    _fault(
        "changes of two processes overwrite each other",
        "app.access.tokens:TokenFile._locked",
        instead(_no_lock),
    ),
    _fault("a limited token covers every channel", "app.access.tokens:_interest", nothing),
    _fault(
        "strangers are operators of an open node",
        "app.access.callers:_anybody",
        instead(_everything),
        _CALLERS,
    ),
    _fault(
        "callers on this machine are trusted behind a proxy",
        "app.access.callers:DistrustingAuthorizer.identify",
        instead(_operator),
        _CALLERS,
    ),
    _fault(
        "a header counts whoever sent it",
        "app.access.proxies:Proxies.trusts",
        returns(True),
        _PROXIES,
    ),
    _fault("the client is what it says", "app.access.proxies:Proxies.client", _left_most, _PROXIES),
    _fault(
        "an address in IPv6 is not the one in IPv4",
        "app.access.proxies:_node",
        instead(_as_written),
        _PROXIES,
    ),
    _fault(
        "every address of a subscriber is a client",
        "app.access.proxies:address_key",
        instead(str),
        _PROXIES,
    ),
    _fault(
        "callers are local behind a proxy",
        "app.server.settings:Settings.trusts_loopback",
        instead(True),
        _PROXIES,
    ),
    _fault("strangers reach every channel", "app.access.callers:_covered", nothing, _ANONYMOUS),
    _fault(
        "strangers publish where they read",
        "app.access.callers:Caller._channels_of",
        instead(lambda caller, _: caller.channels),
        _ANONYMOUS,
    ),
    _fault(
        "live streams of strangers are not counted",
        "app.access.rates:Rates.begin_live",
        nothing,
        _RATES,
    ),
    _fault("bytes cost nothing", "app.access.rates:Bucket.spend", nothing, _RATES),
    _fault(
        "the disk is never low", "app.ingest.door:DiskWatermark.is_low", instead(False), _WATERMARK
    ),
    _fault(
        "a low disk is looked at by the clock alone",
        "app.ingest.door:GROWTH",
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
        "connections over TLS have the event loop's own layer",
        "app.server.server:_Server.startup",
        instead(_startup_of_uvicorn),
        (
            f"{_TLS}::test_a_node_under_half_handshakes_serves_others_in_bounded_memory_and_stops_at_once",
        ),
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
        "input that is left over when a connection pauses waits for more",
        "app.server.server:TlsLayer._go_on_reading",
        nothing,
        (f"{_TLS}::test_requests_sent_ahead_over_tls_are_all_answered_in_order",),
    ),
    _fault(
        "all records that one read brings are decrypted at once",
        "app.server.server:RECORDS_PER_PASS",
        instead(1_000_000),
        (f"{_TLS}::test_records_of_one_byte_leave_other_connections_their_turns",),
    ),
    _fault(
        "the end of a TLS connection is not said",
        "app.server.server:TlsLayer._end",
        nothing,
        (f"{_TLS}::test_an_answer_before_the_end_of_the_body_arrives_with_a_proper_end",),
    ),
    _fault(
        "more is read over TLS than the connection takes",
        "app.server.server:TlsLayer.get_buffer",
        instead(lambda layer, _: layer._buffer),
        (_TLS,),
    ),
    _fault(
        "a large reply is encrypted at once",
        "app.server.server:STEP_BYTES",
        instead(1 << 30),
        (_TLS,),
    ),
    _fault(
        "each piece of a reply is a record",
        "app.server.server:TlsLayer.writelines",
        instead(_piece_by_piece),
        (_TLS,),
    ),
    _fault(
        "the connection goes on reading while it parses",
        "app.server.server:TlsLayer.resume_reading",
        instead(_read_at_once),
        (_TLS,),
    ),
    _fault(
        "a failed handshake is not explained",
        "app.server.server:TlsLayer._flush",
        _not_once_ended,
        (_TLS,),
    ),
    _fault(
        "what comes after the end of a TLS connection is decrypted",
        "app.server.server:TlsLayer.buffer_updated",
        instead(_take_always),
        (_TLS,),
    ),
    _fault("what was verified stays valid", "app.access.tokens:Tokens._take", _keep_verified),
    _fault(
        "withdrawn anonymous access lets what runs go on",
        "app.access.callers:Strangers.begin",
        nothing,
        (f"{_RELOAD}::{_WITHDRAWN}",),
    ),
    _fault(
        "less than before is within it never",
        "app.access.callers:Caller.is_within",
        instead(lambda caller, other: caller == other),
        (f"{_RELOAD}::{_WITHDRAWN}",),
    ),
    _fault(
        "a reload leaves strangers what they had",
        "app.http.application:_without_token",
        _as_at_first,
        (_TAKEN_OVER,),
    ),
    _fault(
        "a reload forgets the rates", "app.access.rates:Rates.configure", nothing, (_TAKEN_OVER,)
    ),
    _fault(
        "a reload keeps the policy", "app.server.node:Node.take_policy", nothing, (_TAKEN_OVER,)
    ),
    _fault("a policy is its name", "app.server.reload:load_policy", _by_name_alone, (_EDITED,)),
    _fault(
        "a policy is made at each reload", "app.server.reload:load_policy", _always_anew, (_EDITED,)
    ),
    _fault(
        "other code of a policy has the old revision",
        "app.ingest.policy:load_policy",
        _with_its_own_revision,
        (_EDITED,),
    ),
    _fault("a reload keeps the log level", "app.server.reload:set_level", nothing, (_NAMED,)),
    _fault("a reload keeps the peers", "app.federation.peers:Peers.configure", nothing, (_NAMED,)),
    _fault(
        "a reload keeps the interest",
        "app.federation.interests:Interests.configure",
        nothing,
        (_NAMED,),
    ),
    _fault(
        "a reload keeps the certificate",
        "app.server.reload:load_certificate",
        nothing,
        (f"{_RELOAD}::test_new_connections_get_a_replaced_certificate_and_old_ones_go_on",),
    ),
    _fault(
        "a reload does not name the certificate",
        "app.server.reload:checked_certificate",
        returns(b""),
        (f"{_RELOAD}::test_new_connections_get_a_replaced_certificate_and_old_ones_go_on",),
    ),
    _fault(
        "a reload waits for no other worker",
        "app.server.workers:Board.behind",
        returns([]),
        (_BEHIND,),
    ),
    _fault(
        "a worker that began before the call is done",
        "app.server.workers:Board.reload",
        after(lambda mark, *_: mark - 1),
        (_BEHIND,),
    ),
]
