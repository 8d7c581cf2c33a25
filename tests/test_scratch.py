"""Runs of tests and benchmarks leave nothing in the temporary directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.scratch import PREFIX, NotEnoughRoomError, scratch_folder

ROOT = Path(__file__).parent.parent
RUN = """
import tempfile, time
from pathlib import Path
from bench.scratch import scratch_folder
with scratch_folder():
    Path(tempfile.mkdtemp(), "file").write_text("content")
    print(tempfile.gettempdir(), flush=True)
    time.sleep(60)
"""
FULL = """
import shutil, sys, pytest
from collections import namedtuple
Usage = namedtuple("Usage", "total used free")
shutil.disk_usage = lambda path: Usage(9 << 30, 7 << 30, 2 << 30)
sys.exit(pytest.main(["tests/wire"]))
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of the test, and of the processes that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def start() -> tuple[subprocess.Popen[str], Path]:
    """A run at its work, and its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with process:
        process.send_signal(number)


def wait_until(holds: Callable[[], bool]) -> None:
    """Folders are removed in the background."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_stop_removes_its_folder(
    temporary: Path, number: signal.Signals
) -> None:
    process, folder = start()
    assert folder.parent == temporary
    end(process, number)
    wait_until(lambda: not list(temporary.iterdir()))


def test_a_run_removes_the_folders_of_killed_ones_and_no_others(temporary: Path) -> None:
    killed, dead = start()
    end(killed, signal.SIGKILL)
    assert dead.exists()
    foreign, new, old = (temporary / name for name in ("other", f"{PREFIX}new", f"{PREFIX}old"))
    for folder in (foreign, new, old):
        folder.mkdir()
    os.utime(old, (0, 0))
    living, alive = start()
    try:
        wait_until(lambda: set(temporary.iterdir()) == {foreign, new, alive})
        with scratch_folder() as own:
            assert set(temporary.iterdir()) == {foreign, new, alive, own}
        wait_until(lambda: set(temporary.iterdir()) == {foreign, new, alive})
    finally:
        end(living, signal.SIGKILL)


def test_a_run_without_room_names_the_directory_what_is_free_and_what_is_needed(
    temporary: Path,
) -> None:
    with pytest.raises(NotEnoughRoomError) as refused, scratch_folder(1 << 70):
        pass
    assert str(temporary) in str(refused.value)
    assert f"needs {1 << 40}.0 GiB" in str(refused.value)
    assert list(temporary.iterdir()) == []


def test_a_session_of_tests_on_a_full_disk_stops_before_the_first_one() -> None:
    refused = subprocess.run(
        [sys.executable, "-c", FULL], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR
    assert "has 2.0 GiB free, and this run needs 5.0 GiB" in refused.stderr
    assert "passed" not in refused.stdout
