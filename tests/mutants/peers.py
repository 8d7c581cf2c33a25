"""Faults planted in the peers' rows: leases, fences, memories and session records."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, instead

_ROWS = ("tests/app/store/test_peerrows.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _ROWS) -> Fault:
    return Fault(f"peers: {name}", f"app.{seam}", plant, tests)


def _everything_stands(_rows: Any, _transaction: Any, _process: str, fences: Any) -> set[str]:
    return set(fences)


def _passes(*_: Any) -> bytes:
    return b"\0" * 16


def _of_epoch() -> Any:
    """A clock at which no lease ever expires."""
    from sqlalchemy import BigInteger, literal_column

    return literal_column("0", BigInteger)


async def _nothing(*_: Any, **__: Any) -> None:
    pass


FAULTS = [
    _fault(
        "a write does not look at fences and leases",
        "store.peerrows:PeerRows.standing",
        instead(_everything_stands),
    ),
    _fault("leases never expire", "store.peerrows:clock_ms", instead(_of_epoch)),
    _fault(
        "the checksum of a memory does not depend on its bytes",
        "store.peerrows:MemoryCodec._check",
        instead(_passes),
    ),
    _fault(
        "a process that stops keeps its leases",
        "store.peerrows:PeerRows.release",
        instead(_nothing),
    ),
]
