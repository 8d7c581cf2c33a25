"""Why a store could not be opened. Faults of single requests are `app.errors.Problem`s."""


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
        "PostgreSQL needs its driver, psycopg, which is not installed: run `make setup`, or install "
        f"this package with its extra `postgres` ({error})"
    )
