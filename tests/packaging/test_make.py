"""`make run` passes to `sdstore serve` only what is given, so that settings have their other sources."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ([], ""),
        (["PORT=9000"], "--port 9000"),
        (["HOST=::1", "PORT=0", "ARGS=--json"], "--host ::1 --port 0 --json"),
    ],
)
def test_make_run_passes_on_only_what_is_given(given: list[str], passed: str) -> None:
    # `make test ARGS=…`, which may run this test, hands its own variables to every `make` below it.
    above = ("HOST", "PORT", "ARGS", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in above}
    shown = subprocess.run(
        ["make", "--dry-run", "run", *given],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (line,) = (each for each in shown.splitlines() if "sdstore serve" in each)
    assert line.split()[-len(passed.split()) - 1 :] == ["serve", *passed.split()]
