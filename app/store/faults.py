"""Why a store could not be opened. Faults of single requests are `app.errors.Problem`s."""


class StoreError(Exception):
    """The store cannot be used; the text says why and what to do."""


class UnsupportedDatabaseError(StoreError):
    """The URL names no database this node can use."""


class DatabaseUnreachableError(StoreError):
    """The server is not there, or does not let this node in."""


class SchemaTooNewError(StoreError):
    """The database was written by a newer sdstore, which this one must not touch."""


class UnusableFileError(StoreError):
    """The SQLite file is damaged, is none, or may not be opened."""


class StoreBusyError(StoreError):
    """Another process writes to this SQLite file."""


def missing_driver(error: ImportError) -> UnsupportedDatabaseError:
    """What to say where the packages of the extra `postgres` are not installed."""
    return UnsupportedDatabaseError(
        "PostgreSQL needs its driver, psycopg, which is not installed: run `make setup`, or install "
        f"this package with its extra `postgres` ({error})"
    )
