"""The first steps of every verb: validate the arguments, then start Spark."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.database import SQLITE_PREFIX, database_settings, require_database
from app.cli.options import node_client
from app.cli.output import CliError, Exit
from app.store import sqlite
from app.store.faults import StoreError as StoreFault
from pipeline import manifest as manifests
from pipeline.errors import (
    ChannelError,
    DatabaseError,
    ManifestError,
    OrderError,
    ParentMismatchError,
    PipelineError,
    PublishError,
)
from pipeline.publish import require_free

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_EXITS: dict[type[PipelineError], Exit] = {
    ManifestError: Exit.NO,
    DatabaseError: Exit.NO,
    ChannelError: Exit.NO,
    OrderError: Exit.NO,
    ParentMismatchError: Exit.USAGE,
    PublishError: Exit.USAGE,
}
_PYTHON_ERROR = re.compile(r"^Traceback .*?^(\w[\w.]*: .*?)$", re.MULTILINE | re.DOTALL)


@contextmanager
def opened(
    master: str | None, *sides: Path | str, target: Path | None = None
) -> Iterator[SparkSession]:
    """A Spark session; errors become lines and exit codes (`faults_told`).

    Before Spark starts, the snapshots and stores of `sides` are opened, and `target` must not exist.
    """
    with faults_told():
        from pipeline.database import open_database
        from pipeline.session import spark_session

        for side in sides:
            if isinstance(side, Path):
                manifests.load(side)
            else:
                open_database(side).close()
        if target is not None:
            require_free(target)
        # Py4J also logs what it raises to the root logger, which would print pages after Ctrl-C.
        logging.getLogger().addFilter(lambda _: False)
        with spark_session(master) as spark:
            yield spark


@contextmanager
def faults_told() -> Iterator[None]:
    """The faults of snapshots, stores and Spark as lines and exit codes."""
    try:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException
    except ImportError as error:
        detail = (
            "snapshots need Spark, which is not installed: run `make setup`, "
            f"or install this package with its extra `spark` ({error})"
        )
        raise CliError(Exit.LOCAL_FAULT, "spark_missing", detail) from None
    try:
        with snapshot_faults_told():
            yield
    except (PySparkException, Py4JError) as error:
        raise CliError(Exit.LOCAL_FAULT, "spark_failed", reason_of(str(error))) from error


@contextmanager
def snapshot_faults_told() -> Iterator[None]:
    """The faults of snapshots and stores as lines and exit codes; Spark need not be installed."""
    try:
        yield
    except PipelineError as error:
        raise CliError(_EXITS.get(type(error), Exit.LOCAL_FAULT), error.code, str(error)) from error
    except StoreFault as error:
        raise CliError(Exit.LOCAL_FAULT, "store_unavailable", str(error)) from error


def reason_of(report: str) -> str:
    """The line with the cause in Spark's report, which nests Python tracebacks in Java ones."""
    found = _PYTHON_ERROR.search(report)
    return found[1] if found else report.partition("\n")[0]


def require_folder(folder: Path) -> None:
    """Raises CliError if the folder does not exist."""
    if not folder.is_dir():
        raise CliError(Exit.NO, "not_found", f"there is no folder {folder}")


def require_writable(url: str) -> None:
    """Raises CliError unless a restore could begin to write to the store at `url`."""
    with snapshot_faults_told():
        if url.startswith(SQLITE_PREFIX):
            sqlite.require_writable(Path(url.removeprefix(SQLITE_PREFIX)))
        else:
            from pipeline.database import connected

            connected(url).close()


def require_node(url: str) -> None:
    """Raises StoreError or CliError unless a node answers at `url`."""
    with node_client(url) as client:
        client.info()


def existing_url(database: str | None, data_dir: Path | None) -> str:
    """The URL of the database that the flags name; CliError if its file does not exist."""
    url = database_settings(database, data_dir, None).database_url
    require_database(url)
    return url
