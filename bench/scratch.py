"""One folder for every temporary file of a run of tests or benchmarks; nothing of it stays behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

PREFIX = "sdstore-run-"
_OWNER = "owner"
"""The file that a run holds a lock on for as long as it lives."""
_UNOWNED_SECONDS_MAX = 60
"""A run locks its folder at once after making it; one without a lock for this long has no owner."""
_GIB = 1 << 30


class NotEnoughRoomError(Exception):
    """The disk of the temporary directory has too little room for the run."""


@contextmanager
def scratch_folder(free_bytes_min: int = 0) -> Iterator[Path]:
    """A folder that takes every temporary file of this process and its children until the block ends.

    Beforehand it removes the folders of runs that were killed. SIGTERM and SIGHUP end the block as
    Ctrl-C does. Raises `NotEnoughRoomError` if fewer bytes are free than `free_bytes_min`.
    """
    parent = Path(tempfile.gettempdir())
    _remove_folders_of_dead_runs(parent)
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < free_bytes_min:
        raise NotEnoughRoomError(
            f"{parent} has {free_bytes / _GIB:.1f} GiB free, and this run needs "
            f"{free_bytes_min / _GIB:.1f} GiB; remove something, or set TMPDIR to a folder of another disk"
        )
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    folder.chmod(0o711)  # PostgreSQL's server, whose files are below it, runs as another user
    with (folder / _OWNER).open("wb") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        try:
            with _temporary_directory(folder), _signals_like_ctrl_c():
                yield folder
        finally:
            _remove(folder)


def in_scratch(main: Callable[[], int | None]) -> int | None:
    """Run the `main` of a benchmark, with its temporary files in a scratch folder."""
    with scratch_folder():
        return main()


def _remove_folders_of_dead_runs(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            if folder.stat().st_uid == os.geteuid() and _is_dead(folder):
                _remove(folder)
        except OSError:  # another run has removed it meanwhile
            continue


def _is_dead(folder: Path) -> bool:
    try:
        with (folder / _OWNER).open("rb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _UNOWNED_SECONDS_MAX
    except BlockingIOError:
        return False
    return True


def _remove(folder: Path) -> None:
    """Remove it without waiting: PostgreSQL's files alone can take a minute."""
    subprocess.run(
        ["sh", "-c", 'rm -rf "$0" &', str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C must not reach it
        check=True,
    )


@contextmanager
def _temporary_directory(folder: Path) -> Iterator[None]:
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = None
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


@contextmanager
def _signals_like_ctrl_c() -> Iterator[None]:
    process = os.getpid()

    def interrupt(number: int, _frame: FrameType | None) -> None:
        # The second one ends the process at once, and so does the first for a forked child.
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:
            os.kill(os.getpid(), number)
        raise KeyboardInterrupt

    # One that is ignored stays so: nohup asks for that.
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
