"""Without credentials a node serves its own machine; every route asks the authorizer once."""

from __future__ import annotations

import pytest

from app.access.callers import (
    Caller,
    LoopbackAuthorizer,
    OpenAuthorizer,
    Scope,
    authorizer_without_tokens,
)
from app.errors import Code, Problem
from recon.agreement import Interest


@pytest.mark.parametrize("client", ["127.0.0.1", "127.8.9.10", "::1"])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "LocalHost:80"])
def test_this_machine_may_do_everything_but_what_is_the_operators(client: str, host: str) -> None:
    for authorizer in (LoopbackAuthorizer(), OpenAuthorizer()):
        caller = authorizer.identify(client, {b"host": host.encode()})
        for scope in set(Scope) - {Scope.ADMIN}:
            caller.require(scope, "any channel")
        with pytest.raises(Problem, match="admin"):
            caller.require(Scope.ADMIN, None)


@pytest.mark.parametrize("client", ["192.168.1.5", "10.0.0.1", "2001:db8::1", "", "::ffff:8.8.8.8"])
def test_another_machine_is_not_authenticated(client: str) -> None:
    caller = LoopbackAuthorizer().identify(client, {b"host": b"localhost"})
    caller.require(Scope.OPEN, None)
    with pytest.raises(Problem) as caught:
        caller.require(Scope.READ, None)
    assert caught.value.code is Code.UNAUTHENTICATED
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"}


@pytest.mark.parametrize(
    "host", ["store.example", "store.example:8000", "127.0.0.1.example", "10.0.0.1", "[::2]", ""]
)
def test_a_host_name_that_leads_elsewhere_is_forbidden(host: str) -> None:
    with pytest.raises(Problem) as caught:
        LoopbackAuthorizer().identify("127.0.0.1", {b"host": host.encode()})
    assert caught.value.code is Code.FORBIDDEN


def test_an_open_node_serves_strangers_but_does_not_trust_them() -> None:
    stranger = OpenAuthorizer().identify("8.8.8.8", {b"host": b"store.example"})
    stranger.require(Scope.SYNC, None)
    with pytest.raises(Problem) as caught:
        stranger.require(Scope.ADMIN, None)
    assert caught.value.code is Code.FORBIDDEN
    assert stranger.name != OpenAuthorizer().identify("8.8.4.4", {}).name


def test_without_trust_in_this_machine_nobody_is_the_operator() -> None:
    for is_open in (True, False):
        authorizer = authorizer_without_tokens(trust_loopback=False, insecure=is_open)
        caller = authorizer.identify("127.0.0.1", {b"host": b"localhost"})
        with pytest.raises(Problem):
            caller.require(Scope.ADMIN, None)


def test_grants_are_limited_by_scope_and_channel() -> None:
    caller = Caller(
        "token 1", frozenset({Scope.READ}), Interest.make(channels=frozenset({"a", ""}))
    )
    caller.require(Scope.READ, "a")
    caller.require(Scope.READ, "")
    for scope, channel_id in ((Scope.PUBLISH, "a"), (Scope.READ, "b")):
        with pytest.raises(Problem) as caught:
            caller.require(scope, channel_id)
        assert caught.value.code is Code.FORBIDDEN
