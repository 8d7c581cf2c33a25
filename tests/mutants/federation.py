"""Faults planted in the connections to peers, and in what is kept and said of them."""

from __future__ import annotations

from typing import Any

import httpcore

from tests.mutants.fault import Fault, Plant, instead, returns

_CLIENT = ("tests/app/federation/test_client.py",)
_ADDRESS = ("tests/app/federation/test_address.py",)
_OVER_HTTP = "tests/app/federation/test_over_http.py"


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...]) -> Fault:
    return Fault(f"federation: {name}", f"app.federation.{seam}", plant, tests)


async def _no_contact(*_: Any) -> None:
    pass


FAULTS = [
    _fault(
        "the headers of an answer have no bound",
        "client:HEAD_BYTES_MAX",
        instead(1 << 40),
        _CLIENT,
    ),
    _fault(
        "a name is looked up again after its check",
        "client:_PinnedBackend.connect_tcp",
        instead(httpcore.AnyIOBackend.connect_tcp),
        _ADDRESS,
    ),
    _fault("every address is allowed", "client:is_allowed", returns(True), _ADDRESS),
    _fault(
        "the IPv4 address inside an IPv6 address is not looked at",
        "client:_innermost",
        instead(lambda address: address),
        _ADDRESS,
    ),
    _fault(
        "this node is added as its own peer",
        "peers:Peers._contact",
        instead(_no_contact),
        (f"{_OVER_HTTP}::test_a_node_does_not_become_its_own_peer",),
    ),
]
