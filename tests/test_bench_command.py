"""`python -m bench` answers questions about itself without measuring anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS

ROOT = Path(__file__).parent.parent


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )


def test_help_names_all_benchmarks_and_starts_none() -> None:
    shown = bench("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "===" not in shown.stdout
    assert all(name in shown.stdout for name in BENCHMARKS)


@pytest.mark.parametrize("wrong", ["participants", "--fast"])
def test_a_wrong_name_or_option_is_an_error_and_starts_none(wrong: str) -> None:
    refused = bench(BENCHMARKS[0], wrong)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert wrong in refused.stderr
    if not wrong.startswith("-"):
        assert ", ".join(BENCHMARKS) in refused.stderr


def test_each_name_is_a_module() -> None:
    assert [name for name in BENCHMARKS if not (ROOT / "bench" / f"{name}.py").exists()] == []
