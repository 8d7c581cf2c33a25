"""Faults planted in the connections to peers, and in what is kept and said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpcore

from tests.mutants.fault import Fault, Plant, after, instead, nothing, returns

_CLIENT = ("tests/app/federation/test_client.py",)
_ADDRESS = ("tests/app/federation/test_address.py",)
_ACCESS = "tests/app/federation/test_access.py"
_DIVERGENCE = ("tests/app/federation/test_divergence.py",)
_RECORDS = ("tests/app/federation/test_records.py",)
_WRITTEN = (
    "test_a_quiet_peer_is_written_now_and_again_a_large_memory_seldom_and_a_new_state_at_once"
)
_PACE = (f"{_RECORDS[0]}::{_WRITTEN}",)
_SYNCS = ("tests/app/federation/test_syncs.py",)
_RELAY = "tests/app/federation/test_relay.py"
_OVER_HTTP = "tests/app/federation/test_over_http.py"


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...]) -> Fault:
    return Fault(f"federation: {name}", f"app.federation.{seam}", plant, tests)


async def _no_contact(*_: Any) -> None:
    pass


def _forget_the_last(right: Any) -> Any:
    def wrong(peer: Any, instance: str) -> None:
        peer.last_instance = ""
        right(peer, instance)

    return wrong


def _record(_: Any, _syncs: Any, sync: Any, _report: Any) -> None:
    sync.is_kept = True


FAULTS = [
    # Clients
    _fault(
        "idle connections to one peer have no bound",
        "client:PER_PEER_MAX",
        instead(1_000),
        _CLIENT,
    ),
    _fault(
        "unused connections stay open",
        "client:PeerClients._drop_unused",
        instead(_no_contact),
        _CLIENT,
    ),
    _fault(
        "the headers of an answer have no bound",
        "client:HEAD_BYTES_MAX",
        instead(1 << 40),
        _CLIENT,
    ),
    _fault(
        "what is around a body has no bound", "client:FRAMING_FACTOR", instead(1 << 20), _CLIENT
    ),
    _fault(
        "an answer to nothing answers the next call", "client:_has_more", returns(False), _CLIENT
    ),
    _fault(
        "a call over a connection that has ended is not repeated",
        "client:PeerTransport.handle_async_request",
        instead(lambda transport, request: transport._handled(request)),
        _CLIENT,
    ),
    _fault(
        "a name is looked up again after its check",
        "client:_PinnedBackend.connect_tcp",
        instead(httpcore.AnyIOBackend.connect_tcp),
        _ADDRESS,
    ),
    # Addresses
    _fault("every address is allowed", "client:is_allowed", returns(True), _ADDRESS),
    _fault(
        "the IPv4 address inside an IPv6 address is not looked at",
        "client:_innermost",
        instead(lambda address: address),
        _ADDRESS,
    ),
    _fault(
        "addresses in the settings are not checked",
        "client:refuse_literal",
        nothing,
        ("tests/app/cli/test_exit_codes.py::test_a_peer_that_no_node_can_have_is_2_and_named",),
    ),
    _fault(
        "a file of CAs is read once",
        "client:_tls_context_of",
        lambda right: lambda file, _: right(file, ()),
        (f"{_ACCESS}::test_a_file_of_cas_that_was_replaced_holds_for_the_next_session",),
    ),
    _fault(
        "this node is added as its own peer",
        "peers:Peers._contact",
        instead(_no_contact),
        (f"{_OVER_HTTP}::test_a_node_does_not_become_its_own_peer",),
    ),
    _fault(
        "another store in the place of a peer is not noticed",
        "peer:Peer.meet",
        _forget_the_last,
        (
            f"{_RELAY}::test_another_store_in_the_place_of_a_peer_is_logged_once_and_a_restart_is_not",
        ),
    ),
    # What is kept of peers and sessions
    _fault(
        "what the peer sent is missing there",
        "peer:unpack_elements",
        returns({}),
        _DIVERGENCE,
    ),
    _fault(
        "what is missing there is counted without its window",
        "peer:decode_interest",
        after(lambda found, _: replace(found, lamport_from=None, lamport_to=None)),
        _DIVERGENCE,
    ),
    _fault(
        "what is missing there is counted without bound",
        "peer:COUNTED_MAX",
        instead(1 << 40),
        _DIVERGENCE,
    ),
    _fault("a quiet peer is written each second", "records:PEER_WRITE_S", instead(0.0), _PACE),
    _fault(
        "a large memory is written as often as a small one",
        "records:MEMORY_BYTES_PER_S",
        instead(1e18),
        _PACE,
    ),
    _fault(
        "what every session changes is written",
        "records:_lasting",
        instead(lambda memory: memory),
        _RECORDS,
    ),
    _fault("every session is recorded", "syncs:Syncs._judge", after(_record), _RECORDS),
    _fault("ended sessions are never forgotten", "syncs:Syncs._forget_oldest", nothing, _SYNCS),
    _fault(
        "whole sessions with all peers fall due together",
        "peers:WHOLE_JITTER",
        instead(0.0),
        (
            "tests/app/federation/test_scheduling.py::test_whole_sessions_with_many_peers_fall_due_at_different_times",
        ),
    ),
]
