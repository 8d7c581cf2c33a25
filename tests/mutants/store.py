"""Faults planted in the store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from tests.mutants.fault import Fault, Plant, after, before, instead

_CHAIN = ("tests/app/store/test_arrivals.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _CHAIN) -> Fault:
    return Fault(f"store: {name}", f"app.store.{seam}", plant, tests)


def _check(name: str, seam: str, plant: Plant) -> Fault:
    return _fault(name, seam, plant, ("tests/app/cli/test_check.py",))


def _nothing(_connection: Any) -> Iterator[Any]:
    return iter(())


async def _no_faults(_check: Any) -> AsyncIterator[str]:
    for fault in ():
        yield fault


class _Anything:
    def __eq__(self, _: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _any_digest(_message: Any) -> Any:
    return _Anything()


async def _none_of_them(*_: Any) -> list[str]:
    return []


async def _prepare_nothing(*_: Any) -> None:
    pass


def _is_corrupt(error: BaseException | None) -> bool:
    """Whether SQLite says that a file is damaged or no database."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (11, 26)


def _numbers(read: Any, there: Any) -> bool:
    """Whether a database has as many rows as were read, whatever their sums."""
    return bool(
        read.entries.number <= there.entries.number and read.claims.number <= there.claims.number
    )


def _sums(read: Any, there: Any) -> bool:
    """Whether the sums agree, wherever the watermark is."""
    return (read.entries.sum, read.claims.sum) == (there.entries.sum, there.claims.sum)


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
    # The arrival chain
    _fault(
        "the sum of a token is not compared",
        "arrivals:goes_on_from",
        instead(_numbers),
        (*_CHAIN, "tests/app/federation/test_back_in_time.py"),
    ),
    _fault("a token above the watermark holds", "arrivals:goes_on_from", instead(_sums)),
    _fault(
        "numbers are given again after the newest row is gone",
        "groupwriter:GroupWriter._begin",
        _begin_at_the_newest("messages", "seq", "entries"),
    ),
    _fault(
        "numbers of claims are given again",
        "groupwriter:GroupWriter._begin",
        _begin_at_the_newest("published_claims", "claim_no", "claims"),
    ),
    _fault(
        "order does not matter",
        "arrivals:ArrivalChain.sums",
        before(lambda chain, first, numbers, ids: (chain, first, [0] * len(numbers), ids)),
    ),
    _fault(
        "a group begins its sums anew",
        "arrivals:ArrivalChain.sums",
        before(lambda chain, _first, numbers, ids: (chain, 0, numbers, ids)),
    ),
    # Checks beside a writer
    _fault(
        "a snapshot goes on",
        "store:Store.snapshot",
        instead(_as_it_is),
        ("tests/app/store/test_opening.py",),
    ),
    Fault(
        "store: a check compares messages that came after the index was read",
        "app.cli.checking:_check_messages",
        before(
            lambda store, index, channel, _, *others: (store, index, channel, 2**63 - 1, *others)
        ),
        ("tests/app/cli/test_check_beside_a_writer.py",),
    ),
    # The deep check
    _check("values of any type are taken", "integrity:_wrong_types", instead(_nothing)),
    _check(
        "names in histories are not looked up", "histories:Gaps.unrecorded", instead(_none_of_them)
    ),
    _check(
        "missing references are not compared",
        "integrity:RowCheck._of_missing",
        instead(_no_faults),
    ),
    _check("counters are not compared", "integrity:RowCheck._of_counters", instead(_no_faults)),
    _check(
        "marks of lost content are not compared", "integrity:RowCheck._of_lost", instead(_no_faults)
    ),
    _check(
        "the chain is not followed", "integrity:RowCheck._of_chain", instead(lambda *_: iter(()))
    ),
    # Rebuilding a file
    _check("rows that lost pages are whole", "recovery:_is_count", instead(lambda *_: True)),
    _check("any frame is that of its row", "recovery:entry_digest", instead(_any_digest)),
    _check(
        "a row that is too long is a fault of the node", "integrity:is_damage", instead(_is_corrupt)
    ),
    # The range index
    Fault(
        "store: large views are built on the event loop",
        "app.recon.index:NodeIndex.prepare_view",
        instead(_prepare_nothing),
        ("tests/app/test_rangeindex_parts.py",),
    ),
]
