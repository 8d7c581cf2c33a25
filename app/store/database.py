"""What the store needs of a database: one reading side for the event loop, one writing side.

`app.store.sqlite` and `app.store.postgres` implement it; everything above is the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from app.store.sql import ManyQuery, Query, Row, SqlDialect


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
    """One database, open."""

    sql: SqlDialect

    @abstractmethod
    async def rows(self, query: Query, **values: Any) -> list[Row]:
        """The rows of one query."""

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
    async def close(self) -> None:
        """Let go of every connection."""


def chunks(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    """Consecutive slices of at most `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))
