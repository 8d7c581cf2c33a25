"""Faults planted in the store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.mutants.fault import Fault, Plant, after, instead

_CHAIN = ("tests/app/store/test_arrivals.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _CHAIN) -> Fault:
    return Fault(f"store: {name}", f"app.store.{seam}", plant, tests)


def _check(name: str, seam: str, plant: Plant) -> Fault:
    return _fault(name, seam, plant, ("tests/app/cli/test_check.py",))


async def _no_faults(_check: Any) -> AsyncIterator[str]:
    for fault in ():
        yield fault


class _Anything:
    def __eq__(self, _: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _any_digest(_message: Any) -> Any:
    return _Anything()


def _numbers(read: Any, there: Any) -> bool:
    """Whether a database has as many rows as were read, whatever their sums."""
    return bool(
        read.entries.number <= there.entries.number and read.claims.number <= there.claims.number
    )


@asynccontextmanager
async def _as_it_is(store: Any) -> AsyncIterator[Any]:
    """A store that goes on, where a snapshot is asked for."""
    yield store


def _begin_at_the_newest(table: str, column: str, place: str) -> Plant:
    """Number new rows after the newest row that is there, not after the watermark."""

    def change(group: Any, writer: Any, transaction: Any) -> Any:
        from sqlalchemy import func, select

        from app.store import schema

        numbers = getattr(schema, table).c[column]
        query = writer._database.sql.query(select(func.coalesce(func.max(numbers), 0)))
        [[number]] = transaction.rows(query)
        token = getattr(group.watermark, place)._replace(number=number)
        group.watermark = group.watermark._replace(**{place: token})
        return group

    return after(change)


FAULTS = [
    _fault(
        "the sum of a token is not compared",
        "arrivals:goes_on_from",
        instead(_numbers),
        (*_CHAIN, "tests/app/federation/test_back_in_time.py"),
    ),
    _fault(
        "numbers are given again after the newest row is gone",
        "groupwriter:GroupWriter._begin",
        _begin_at_the_newest("messages", "seq", "entries"),
    ),
    _fault(
        "a snapshot goes on",
        "store:Store.snapshot",
        instead(_as_it_is),
        ("tests/app/store/test_opening.py",),
    ),
    _check("counters are not compared", "integrity:RowCheck._of_counters", instead(_no_faults)),
    _check(
        "the chain is not followed", "integrity:RowCheck._of_chain", instead(lambda *_: iter(()))
    ),
    _check("any frame is that of its row", "recovery:entry_digest", instead(_any_digest)),
]
