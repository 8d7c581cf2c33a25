"""Statements written once in SQLAlchemy Core and compiled once for each database.

The hot paths run the compiled text on the raw driver with tuples of arguments. Four shapes differ
between the databases and are built here from one description:

- `query`: a statement with a handful of arguments;
- `among`: rows whose column is one of many keys (SQLite: a fixed number of placeholders, padded;
  PostgreSQL: one array);
- `each`: a small look-up for each of many argument tuples, with its own LIMIT (SQLite: a loop;
  PostgreSQL: unnested arrays joined laterally);
- `insert`, `delete_each`, `update_each`: many rows (SQLite: executemany; PostgreSQL: unnested arrays).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    ARRAY,
    BindParameter,
    Column,
    ColumnElement,
    Delete,
    Executable,
    FromClause,
    Select,
    Table,
    Text,
    Update,
    any_,
    bindparam,
    column,
    delete,
    func,
    literal_column,
    select,
    true,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import psycopg
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.types import TypeEngine

Row = tuple[Any, ...]
Arguments = Mapping[str, TypeEngine[Any]]
"""Names and types of the arguments of one key, in the order they are given in."""

Keyed = Mapping[str, ColumnElement[Any]]
"""Arguments of one key of an `each` query, by name."""

SQLITE_KEYS_PER_QUERY = (1, 16, 128)
"""Placeholders of the forms of an `among` query on SQLite: preparing many for one key costs ten
times the look-up, and beyond 128 longer lists gain nothing."""


SQLITE_ROWS_PER_INSERT = 32
"""Rows of one statement: the driver lets other threads run during a statement and then waits for its
turn, which between single rows would cost more than the insertion."""


class Query(NamedTuple):
    """Compiled text, the names of its positional arguments in order, and those that are fixed."""

    text: str
    names: tuple[str, ...]
    constants: Mapping[str, Any]

    def arguments(self, values: Mapping[str, Any]) -> Row:
        """The positional arguments of named values."""
        constants = self.constants
        return tuple([values[n] if n in values else constants[n] for n in self.names])


class ManyQuery(NamedTuple):
    """Text that serves many keys or rows; the driver-specific side knows how to feed it.

    `constants` follow the caller's own arguments; `types` are those of the arrays that PostgreSQL
    is given. On SQLite `shorter` are forms for fewer keys, as (keys at most, text), shortest first,
    and `several` is an insertion of `SQLITE_ROWS_PER_INSERT` rows.
    """

    text: str
    constants: Row = ()
    types: tuple[TypeEngine[Any], ...] = ()
    shorter: tuple[tuple[int, str], ...] = ()
    several: str | None = None


class SqlDialect(ABC):
    """Compiles the shapes for one database."""

    _dialect: Dialect

    def query(self, statement: Executable) -> Query:
        """A statement whose arguments are named `bindparam`s."""
        compiled = statement.compile(dialect=self._dialect)  # type: ignore[attr-defined]
        constants = {name: value for name, value in compiled.params.items() if value is not None}
        return Query(str(compiled), tuple(compiled.positiontup or ()), constants)

    def _many(self, statement: Executable, names: Sequence[str]) -> ManyQuery:
        text, order, constants = self.query(statement)
        if order[: len(names)] != tuple(names):
            raise AssertionError(f"arguments come as {order}, are given as {names}")
        return ManyQuery(text, tuple(constants[name] for name in order[len(names) :]))

    @abstractmethod
    def among(
        self, key: ColumnElement[Any], make: Callable[[ColumnElement[bool]], Select[Any]]
    ) -> ManyQuery:
        """`make(condition)` selects the rows whose `key` is among many."""

    @abstractmethod
    def each(self, arguments: Arguments, make: Callable[[Keyed], Select[Any]]) -> ManyQuery:
        """`make(arguments)` selects the rows of one argument tuple; answers carry its number."""

    @abstractmethod
    def insert(self, table: Table, *, or_ignore: bool = False) -> ManyQuery:
        """Rows in the order of the table's columns."""

    @abstractmethod
    def upsert(self, table: Table, key: str, merge: Callable[[Any], dict[str, Any]]) -> ManyQuery:
        """As `insert`; where `key` is there already, `merge(excluded)` is set instead."""

    @abstractmethod
    def delete_each(self, table: Table, *columns: str) -> ManyQuery:
        """Rows that equal each of many tuples in these columns."""

    @abstractmethod
    def update_each(self, table: Table, key: str, *changed: str) -> ManyQuery:
        """Tuples of (changed …, key)."""


class SqliteSql(SqlDialect):
    """Placeholders are question marks; many rows go through executemany."""

    _dialect = sqlite.dialect(paramstyle="qmark")

    def among(
        self, key: ColumnElement[Any], make: Callable[[ColumnElement[bool]], Select[Any]]
    ) -> ManyQuery:
        forms = []
        for most in SQLITE_KEYS_PER_QUERY:
            keys: list[BindParameter[Any]] = [bindparam(f"key_{n}") for n in range(most)]
            forms.append((most, self._many(make(key.in_(keys)), [each.key for each in keys])))
        *shorter, (_, longest) = forms
        return longest._replace(shorter=tuple((most, form.text) for most, form in shorter))

    def each(self, arguments: Arguments, make: Callable[[Keyed], Select[Any]]) -> ManyQuery:
        binds = {name: bindparam(name, type_=kind) for name, kind in arguments.items()}
        return self._many(make(binds), list(arguments))

    def insert(self, table: Table, *, or_ignore: bool = False) -> ManyQuery:
        names = table.columns.keys()
        if or_ignore:
            statement = sqlite.insert(table).values(_binds(table.columns))
            return self._many(statement.on_conflict_do_nothing(), names)
        rows: list[dict[str, BindParameter[Any]]] = [
            {name: bindparam(f"{name}_{row}") for name in names}
            for row in range(SQLITE_ROWS_PER_INSERT)
        ]
        # Without ROLLBACK a statement of several rows copies each page first, to undo itself alone.
        many_rows = sqlite.insert(table).prefix_with("OR ROLLBACK").values(rows)
        several = self.query(many_rows).text
        statement = sqlite.insert(table).values(_binds(table.columns))
        return self._many(statement, names)._replace(several=several)

    def upsert(self, table: Table, key: str, merge: Callable[[Any], dict[str, Any]]) -> ManyQuery:
        statement = sqlite.insert(table).values(_binds(table.columns))
        statement = statement.on_conflict_do_update(
            index_elements=[key], set_=merge(statement.excluded)
        )
        return self._many(statement, table.columns.keys())

    def delete_each(self, table: Table, *columns: str) -> ManyQuery:
        wanted = [table.c[name] == bindparam(f"is_{name}") for name in columns]
        return self._many(delete(table).where(*wanted), [f"is_{name}" for name in columns])

    def update_each(self, table: Table, key: str, *changed: str) -> ManyQuery:
        # SQLAlchemy sets columns in the order of the table.
        statement = update(table).ordered_values(
            *[(name, bindparam(f"to_{name}")) for name in changed]
        )
        names = [*(f"to_{name}" for name in changed), "at"]
        return self._many(statement.where(table.c[key] == bindparam("at")), names)


class PostgresSql(SqlDialect):
    """Placeholders are `%s`; many keys and rows travel as one array for each column."""

    _dialect = psycopg.dialect(paramstyle="format")  # type: ignore[no-untyped-call]

    def among(
        self, key: ColumnElement[Any], make: Callable[[ColumnElement[bool]], Select[Any]]
    ) -> ManyQuery:
        keys: BindParameter[Any] = bindparam("keys", type_=ARRAY(key.type))
        return self._arrays(make(key == any_(keys)), {"keys": key.type})

    def each(self, arguments: Arguments, make: Callable[[Keyed], Select[Any]]) -> ManyQuery:
        rows = self._unnested(arguments, number="which")
        found = make({name: rows.c[name] for name in arguments}).lateral()
        # WITH ORDINALITY counts from 1.
        which = (rows.c.which - literal_column("1")).label("which")
        statement = select(which, *found.c).select_from(rows.join(found, true()))
        return self._arrays(statement, arguments)

    def insert(self, table: Table, *, or_ignore: bool = False) -> ManyQuery:
        statement = self._insert_unnested(table)
        if or_ignore:
            statement = statement.on_conflict_do_nothing()
        return self._arrays(statement, _types(table))

    def upsert(self, table: Table, key: str, merge: Callable[[Any], dict[str, Any]]) -> ManyQuery:
        statement = self._insert_unnested(table)
        statement = statement.on_conflict_do_update(
            index_elements=[key], set_=merge(statement.excluded)
        )
        return self._arrays(statement, _types(table))

    def delete_each(self, table: Table, *columns: str) -> ManyQuery:
        types = {name: table.c[name].type for name in columns}
        rows = self._unnested(types)
        statement: Delete = delete(table)
        for name in columns:
            statement = statement.where(table.c[name] == rows.c[name])
        return self._arrays(statement, types)

    def update_each(self, table: Table, key: str, *changed: str) -> ManyQuery:
        types = {name: table.c[name].type for name in (*changed, key)}
        rows = self._unnested(types)
        statement: Update = update(table).values({name: rows.c[name] for name in changed})
        return self._arrays(statement.where(table.c[key] == rows.c[key]), types)

    def _arrays(self, statement: Executable, types: Arguments) -> ManyQuery:
        return self._many(statement, list(types))._replace(types=tuple(types.values()))

    def _insert_unnested(self, table: Table) -> postgresql.Insert:
        rows = self._unnested(_types(table))
        return postgresql.insert(table).from_select(
            [c.name for c in table.columns], select(*[rows.c[c.name] for c in table.columns])
        )

    @staticmethod
    def _unnested(
        columns: Mapping[str, TypeEngine[Any]], *, number: str | None = None
    ) -> FromClause:
        arrays = [bindparam(name, type_=ARRAY(_plain(kind))) for name, kind in columns.items()]
        described = [column(name, kind) for name, kind in columns.items()]
        return (
            func.unnest(*arrays).table_valued(*described, with_ordinality=number).render_derived()
        )


def _binds(columns: Iterable[Column[Any]]) -> dict[str, BindParameter[Any]]:
    return {each.name: bindparam(each.name) for each in columns}


def _types(table: Table) -> Arguments:
    return {each.name: each.type for each in table.columns}


def _plain(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    # The type of an array's elements cannot name a collation.
    return Text() if isinstance(kind, Text) else kind


SQLITE = SqliteSql()
POSTGRES = PostgresSql()
