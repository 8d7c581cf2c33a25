"""Faults planted in the driver of a session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tests.mutants.fault import Fault, Plant, after, instead, nothing, returns

_SESSION = ("tests/sync/test_session.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _SESSION) -> Fault:
    return Fault(f"sync: {name}", f"sdstore.sync.{seam}", plant, tests)


def _awaited(change: Callable[..., Any]) -> Plant:
    """Return `change(result, *args)` of an asynchronous function."""

    async def later(result: Awaitable[Any], *args: Any) -> Any:
        return change(await result, *args)

    return after(later)


async def _proof_at_once(session: Any, header: Any) -> Any:
    """Take our own set for the peer's."""
    view = session.replica.view(header.key(), session._mutual)
    return session._proof_of(session.aside.view(view))


def _unlike_the_name(right: Any) -> Any:
    """Take each entry for the element that the peer says it is."""

    async def wrong(replica: Any, items: Any, ids: Any) -> Any:
        class Trusting:
            async def prepare(self, items: Any) -> Any:
                prepared = await replica.prepare(items)
                return [
                    replace(each, order=item.order, element_id=item.id)
                    for item, each in zip(items, prepared, strict=True)
                ]

        return await right(Trusting(), items, ids)

    return wrong


def _twice(right: Any) -> Any:
    """Read an item again before it is stored."""

    async def wrong(moves: Any, rows: Any) -> None:
        again = await moves._replica.prepare([row.item for row in rows])
        rows = [row._replace(prepared=each) for row, each in zip(rows, again, strict=True)]
        await right(moves, rows)

    return wrong


def _swallowed(right: Any) -> Any:
    """Go on when the replica cannot store."""

    async def wrong(moves: Any, rows: Any) -> None:
        with suppress(Exception):
            await right(moves, rows)

    return wrong


FAULTS = [
    # The proof
    _fault(
        "a set is proved equal whatever the peer states",
        "session:_Session._compare_everything",
        instead(_proof_at_once),
    ),
    _fault("idle pairs compare ranges", "session:_Session._is_idle", _awaited(lambda *_: False)),
    # Content
    _fault("content may be another entry", "moves:read_items", _unlike_the_name),
    _fault("an item is read twice", "moves:Moves._store", _twice),
    _fault("a commit that fails is not noticed", "moves:Moves._store", _swallowed),
    _fault("nobody asks for lost content", "moves:Moves.fetch_lost", _awaited(lambda *_: set())),
    _fault(
        "what the peer does not serve is not missed",
        "moves:Moves.unserved_count",
        instead(0),
    ),
    # What is set aside and remembered
    _fault("what is refused is not set aside", "moves:Moves._set_aside", nothing),
    _fault(
        "what was set aside is forgotten", "memory:PeerMemory.with_aside", after(lambda _, m, __: m)
    ),
    _fault(
        "a new policy is not noticed", "session:_Session._learn_policy", after(lambda *_: False)
    ),
    _fault(
        "a time that is still to come is waited for",
        "memory:_is_due",
        lambda right: lambda at_s: at_s <= right.__globals__["time"].time(),
    ),
    _fault(
        "a proof of another clock holds",
        "memory:age_s",
        lambda right: lambda at_s: right.__globals__["time"].time() - at_s,
    ),
    # Errors
    _fault("every error is this side's", "report:outcome_of", returns("local_fault")),
]
