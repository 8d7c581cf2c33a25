"""How this node talks to PostgreSQL: parameters, session settings, what its faults mean."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import errors
from psycopg.adapt import AdaptersMap
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrBinaryDumper

from app.errors import Code, Problem
from app.limits import Limits
from app.store.arrays import BinaryArray, BinaryArrayDumper, wire_text
from app.store.faults import DatabaseUnreachableError, UnsupportedDatabaseError

VERSION_MIN = 15

# A URL may say otherwise. A peer that vanished without a word is noticed within half a minute.
_DEFAULTS = {
    "application_name": "sdstore",
    "client_encoding": "UTF8",
    "connect_timeout": 5,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

# Every statement is a bounded number of look-ups in indexes. The planner must not take a table
# without statistics for one that may as well be scanned, nor plan the same look-ups again for other
# arguments. Only one of the writers waits at a time for what ends within milliseconds. A commit that
# is acknowledged is on disk, whatever the server, the database or the role has as its default.
_SESSION = """
SET plan_cache_mode = force_generic_plan;
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SET enable_hashjoin = off;
SET enable_mergejoin = off;
SET max_parallel_workers_per_gather = 0;
SET jit = off;
SET default_transaction_isolation = 'read committed';
SET statement_timeout = '{seconds}s';
SET idle_in_transaction_session_timeout = '{seconds}s';
SELECT set_config('synchronous_commit', 'on', false)
WHERE current_setting('synchronous_commit') = 'off'
"""

_UNAVAILABLE = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.InternalError,
    errors.ReadOnlySqlTransaction,
)


class _TextDumper(StrBinaryDumper):
    def dump(self, obj: str) -> bytes | None:
        return wire_text(obj)


def parameters_of(url: str) -> dict[str, Any]:
    """What `psycopg.connect` needs: the URL's own parameters over this node's defaults."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        raise UnsupportedDatabaseError(f"this is no URL of PostgreSQL: {error}") from error
    return {**_DEFAULTS, **given, "autocommit": True}


def session_settings(limits: Limits) -> str:
    """Statements that every new connection runs."""
    return _SESSION.format(seconds=limits.database_statement_s)


def adapt(adapters: AdaptersMap) -> None:
    """Send everything in binary; integers in one width, so that a statement is prepared once."""
    adapters.register_dumper(int, Int8BinaryDumper)
    adapters.register_dumper(str, _TextDumper)
    adapters.register_dumper(BinaryArray, BinaryArrayDumper)


def check_server(info: psycopg.ConnectionInfo) -> None:
    """Refuse servers that would answer differently."""
    if info.server_version < VERSION_MIN * 10_000:
        version = info.server_version // 10_000
        raise UnsupportedDatabaseError(
            f"PostgreSQL {VERSION_MIN} or later is needed; this server is {version}"
        )
    encoding = info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise UnsupportedDatabaseError(
            f"the database {info.dbname!r} is encoded in {encoding}: make one with ENCODING 'UTF8'"
        )


def unreachable(error: psycopg.Error) -> DatabaseUnreachableError:
    """What to say where no connection can be had."""
    return DatabaseUnreachableError(f"the database cannot be reached: {str(error).strip()}")


def problem_of(error: BaseException) -> Problem | None:
    """The refusal that a fault of the database is; None where the data are at fault."""
    if isinstance(error, errors.DiskFull):
        return Problem(Code.DISK_FULL, f"the database could not be written: {error}")
    if isinstance(error, _UNAVAILABLE):
        return Problem(Code.STORE_UNAVAILABLE, f"the database cannot be used: {error}")
    return None
