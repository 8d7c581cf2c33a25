"""The database under the store: what its subjects ask of it, and the shapes of their statements.

Statements are written once in SQLAlchemy Core and compiled once for each database; hot paths run the
compiled text on the raw driver with tuples of arguments. Four shapes differ between the databases.
`SqlDialect` builds each of them from one description:

- `query`: a statement with a handful of arguments;
- `among`: rows whose column is one of many keys (SQLite: a fixed number of placeholders, padded;
  PostgreSQL: one array);
- `each`: a small look-up for each of many argument tuples, with its own LIMIT (SQLite: a loop;
  PostgreSQL: unnested arrays joined laterally);
- `insert`, `delete_each`, `update_each`: many rows (SQLite: executemany; PostgreSQL: unnested arrays).

`Database` runs them: one reading side for the event loop, one writing side for the writer's thread.
`app.store.sqlite` and `app.store.postgres` implement both; all other code is the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from sqlalchemy import (
    ColumnElement,
    Executable,
    Integer,
    Select,
    Table,
    func,
    literal_column,
    select,
)
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.types import TypeEngine

from sdstore.errors import how_to_install

# ---- why a store could not be opened


class StoreError(Exception):
    """The store cannot be used; the text says why and what to do."""


class UnsupportedDatabaseError(StoreError):
    """The URL does not name a database that this node can use."""


class DatabaseUnreachableError(StoreError):
    """The server does not answer, or rejects this node."""


class SchemaTooNewError(StoreError):
    """The database was written by a newer sdstore, which this one must not touch."""


class UnusableFileError(StoreError):
    """The file is damaged, is not a SQLite database, or cannot be opened."""


class StoreBusyError(StoreError):
    """Another process writes to this SQLite file."""


def missing_driver(error: ImportError) -> UnsupportedDatabaseError:
    """The error if the packages of the extra `postgres` are not installed."""
    return UnsupportedDatabaseError(
        f"PostgreSQL needs its driver, psycopg ({error}); {how_to_install('postgres')}"
    )


# ---- shapes of statements

Row = tuple[Any, ...]
Arguments = Mapping[str, TypeEngine[Any]]
"""Names and types of the arguments of one key, in the order they are given in."""

Keyed = Mapping[str, ColumnElement[Any]]
"""Arguments of one key of an `each` query, by name."""


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
    """Compiles the shapes for one database; there is one instance of each dialect in a process.

    Shapes of whole tables are compiled once for each table. Functions that build other shapes are cached
    where they are written, beside the code that reads the rows.
    """

    _dialect: Dialect

    def query(self, statement: Executable) -> Query:
        """A statement whose arguments are named `bindparam`s."""
        compiled = statement.compile(dialect=self._dialect)  # type: ignore[attr-defined]
        constants = {name: value for name, value in compiled.params.items() if value is not None}
        return Query(str(compiled), tuple(compiled.positiontup or ()), constants)

    def _many(self, statement: Executable, names: Sequence[str]) -> ManyQuery:
        text, order, constants = self.query(statement)
        if order[: len(names)] != tuple(names):
            raise AssertionError(
                f"the statement's arguments are {order}, but {names} were declared"
            )
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


class Erasure(StrEnum):
    """Whether content that was retired is still in the files of the database."""

    DONE = "done"
    """No file of the database contains it."""
    PENDING = "pending"
    """A reader keeps the old state of pages: the node tries again."""
    REWRITE_NEEDED = "rewrite_needed"
    """PostgreSQL overwrites deleted rows only when it writes the tables anew (docs/operations.md)."""


class Transaction(Protocol):
    """One open write transaction, on the writer's thread."""

    def rows(self, query: Query, **values: Any) -> list[Row]:
        """The rows of one query."""

    def among(self, query: ManyQuery, keys: Sequence[Any]) -> list[Row]:
        """The rows of many keys, in no particular order."""

    def each(self, query: ManyQuery, arguments: Sequence[Row]) -> list[Row]:
        """The rows of many small look-ups; each row begins with the number of its look-up."""

    def execute(self, query: Query, **values: Any) -> None:
        """A statement without rows."""

    def many(self, query: ManyQuery, rows: Sequence[Row]) -> None:
        """Insert, update or delete many rows."""


class Database(ABC):
    """One database, open. `is_shared`: several processes may write to it."""

    sql: SqlDialect
    is_shared = False

    @abstractmethod
    async def rows(self, query: Query, **values: Any) -> list[Row]:
        """The rows of one query."""

    async def few(self, query: Query, **values: Any) -> list[Row]:
        """As `rows`, for a query that reads a few pages: it can run where look-ups do."""
        return await self.rows(query, **values)

    @abstractmethod
    async def among(self, query: ManyQuery, keys: Sequence[Any]) -> list[Row]:
        """The rows of many keys, in no particular order."""

    @abstractmethod
    async def each(self, query: ManyQuery, arguments: Sequence[Row]) -> list[Row]:
        """The rows of many small look-ups, in order; each begins with its look-up's number."""

    @abstractmethod
    async def single(self, query: ManyQuery, arguments: Row) -> list[Row]:
        """One look-up of an `each` query, without the number: the hot path of reading."""

    @abstractmethod
    def snapshot(self) -> AbstractAsyncContextManager[Database]:
        """This database as of the first read inside the block, without later commits.

        For reading only. While it lasts, SQLite cannot shorten its log and PostgreSQL cannot clean up:
        keep it to seconds.
        """

    @abstractmethod
    async def ping(self) -> None:
        """Return once the database has answered. Raises `Problem` STORE_UNAVAILABLE."""

    @abstractmethod
    def begin_writing(self) -> None:
        """Become the writer; `StoreBusyError` where another process is it already."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[Transaction]:
        """Commits at the end, rolls back on an exception. Writer's thread only.

        Raises `Problem` DISK_FULL or STORE_UNAVAILABLE for faults that are not the data's.
        """

    @abstractmethod
    def erase(self) -> Erasure:
        """Have the database's files forget what was deleted and committed. Writer's thread only."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of every connection."""


def chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """Consecutive slices of at most `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))


def constant(value: int) -> ColumnElement[int]:
    """A number written into the statement."""
    # PostgreSQL takes no argument as the LIMIT of a lateral query; a literal serves both.
    return literal_column(str(value), Integer)


def highest(column: ColumnElement[Any]) -> ColumnElement[int]:
    """The highest number of a table, 0 while it is empty."""
    return select(func.coalesce(func.max(column), literal_column("0"))).scalar_subquery()
