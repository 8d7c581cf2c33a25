"""Looks rows up through each index of their table, a few at a time, so that a running node can.

`app.store.integrity` has the database's own check of indexes; that one reads whole tables in one
statement. A look-up fails in two ways: it leads to no row or another one, or the database refuses it
because a page is damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Column, Integer, Table, bindparam, select

from app.errors import Problem
from app.store.database import Database, ManyQuery, Query, Row, constant
from app.store.integrity import RowStep, is_damage
from app.store.schema import metadata

CONFIRMED_MAX = 64
"""Rows of one step that are looked up again in a snapshot before they count as not found."""


class _LookUp(NamedTuple):
    """An index: its name, its columns' places in a walked row, and the look-up of the row's number."""

    name: str
    places: tuple[int, ...]
    query: ManyQuery


class _Probed(NamedTuple):
    """A table: (number, indexed columns …) from a number on, and its indexes."""

    rows_from: Query
    look_ups: tuple[_LookUp, ...]


class IndexProbe:
    """Looks up the rows of one open store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @cached_property
    def tables(self) -> tuple[str, ...]:
        """The tables with indexes that can be probed: those whose key is one number."""
        found = [
            each for each in metadata.sorted_tables if each.indexes and _number_of(each) is not None
        ]
        return tuple(sorted(each.name for each in found))

    async def step(self, table: str, after: int, most: int) -> RowStep:
        """Look up rows of a table with numbers above `after` (-1: from the start), up to `most`.

        Raises `Problem` if the rows themselves cannot be read.
        """
        probed = self._probed[table]
        rows = await self._database.rows(probed.rows_from, least=after + 1, most=most)
        faults: list[str] = []
        for look_up in probed.look_ups:
            try:
                missed = await _missed(self._database, look_up, rows)
                if missed:
                    missed = await self._confirmed(probed, look_up, missed)
            except Problem as problem:
                if not is_damage(problem):
                    raise
                faults.append(f"index {look_up.name} cannot be read: {problem}")
                continue
            faults += [f"index {look_up.name} does not lead to row {row[0]}" for row in missed]
        return RowStep(len(rows), rows[-1][0] if rows else None, faults)

    async def _confirmed(
        self, probed: _Probed, look_up: _LookUp, missed: Sequence[Row]
    ) -> list[Row]:
        """The rows that a look-up misses in one snapshot too: others were changed or deleted meanwhile."""
        confirmed: list[Row] = []
        async with self._database.snapshot() as frozen:
            for number, *_ in missed[:CONFIRMED_MAX]:
                rows = await frozen.rows(probed.rows_from, least=number, most=1)
                present = [row for row in rows if row[0] == number]
                confirmed += await _missed(frozen, look_up, present)
        return confirmed

    @cached_property
    def _probed(self) -> dict[str, _Probed]:
        return {name: self._probed_table(metadata.tables[name]) for name in self.tables}

    def _probed_table(self, table: Table) -> _Probed:
        number = _number_of(table)
        assert number is not None  # noqa: S101 - of `tables`
        # Some indexes have one form for each database, which differ in the number at the end.
        indexes = {
            str(index.name): tuple(each for each in index.columns if each is not number)
            for index in table.indexes
        }
        columns = tuple({each.name: each for found in indexes.values() for each in found}.values())
        least: Any = bindparam("least", type_=BigInteger())
        most: Any = bindparam("most", type_=Integer())
        walked = select(number, *columns).where(number >= least).order_by(number).limit(most)
        names = [each.name for each in columns]
        return _Probed(
            self._database.sql.query(walked),
            tuple(
                _LookUp(
                    name,
                    tuple(1 + names.index(each.name) for each in found),
                    self._look_up(table, number, name, found),
                )
                for name, found in sorted(indexes.items())
            ),
        )

    def _look_up(
        self, table: Table, number: Column[int], name: str, columns: Iterable[Column[Any]]
    ) -> ManyQuery:
        # Several rows can have equal values: the first of them from this number on is this row. SQLite
        # uses the named index or refuses; PostgreSQL chooses, and uses it if its statistics are right.
        indexed = tuple(columns)
        return self._database.sql.each(
            {**{each.name: each.type for each in indexed}, "least": BigInteger()},
            lambda key: (
                select(number)
                .with_hint(table, f"INDEXED BY {name}", "sqlite")
                .where(*(each == key[each.name] for each in indexed), number >= key["least"])
                .order_by(number)
                .limit(constant(1))
            ),
        )


async def _missed(database: Database, look_up: _LookUp, rows: Sequence[Row]) -> list[Row]:
    """The rows to which the index does not lead."""
    asked = [(*(row[place] for place in look_up.places), row[0]) for row in rows]
    found: dict[int, int] = dict(starmap(_pair, await database.each(look_up.query, asked)))
    return [row for place, row in enumerate(rows) if found.get(place) != row[0]]


def _pair(place: int, number: int) -> tuple[int, int]:
    return place, number


def _number_of(table: Table) -> Column[int] | None:
    """The one number that is a table's key; None for other keys."""
    [first, *more] = table.primary_key.columns
    return first if not more and isinstance(first.type, (Integer, BigInteger)) else None
