"""Brings a database to the schema of this code, or refuses one that is newer.

The revision is read before Alembic is imported: opening an up-to-date store costs no import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text

from app.store.faults import SchemaTooNewError
from app.store.schema import SCHEMA_REVISION

MIGRATION_LOCK = 0x5D5_0002


def migrate(url: str) -> None:
    """Upgrade in one transaction, so that a migration that is killed has not happened.

    Raises `SchemaTooNewError` for a revision this code does not know.
    """
    engine = _engine(url)
    try:
        with engine.begin() as connection:
            if revision_of(connection) != SCHEMA_REVISION:
                _upgrade(connection)
    finally:
        engine.dispose()


def revision_of(connection: Connection) -> str | None:
    """The revision a database is at; None for an empty one."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if found is None else str(found)


def is_current(revision: str | None) -> bool:
    """Whether a database can be used as it is."""
    return revision == SCHEMA_REVISION


def migrations_folder() -> Path:
    """`migrations/` inside the installed package, or at the top of the checkout."""
    installed = Path(__file__).parent / "migrations"
    # Names the file: a checkout that had the folder here once can still hold its empty remains.
    return (
        installed if (installed / "env.py").is_file() else Path(__file__).parents[2] / "migrations"
    )


def _upgrade(connection: Connection) -> None:
    from alembic import command  # noqa: PLC0415 - see above
    from alembic.config import Config  # noqa: PLC0415
    from alembic.util import CommandError  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise SchemaTooNewError(
            f"the database is at revision {revision_of(connection)}, which this version of sdstore "
            f"(revision {SCHEMA_REVISION}) does not know: use the newer sdstore that wrote it"
        ) from error


def _engine(url: str) -> Engine:
    if url.startswith("postgresql:"):
        import psycopg  # noqa: PLC0415 - an extra

        # The URL is libpq's: several hosts, sockets and all its parameters mean what they say there.
        engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url))
        event.listen(engine, "begin", _alone_on_postgres)
        return engine
    engine = create_engine(url)
    # sqlite3 would commit before each CREATE TABLE; one explicit transaction holds them all.
    event.listen(engine, "connect", _leave_transactions_to_us)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return engine


def _alone_on_postgres(connection: Connection) -> None:
    # Nodes that share a database and start together migrate it one after the other.
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")


def _leave_transactions_to_us(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
