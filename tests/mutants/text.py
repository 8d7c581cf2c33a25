"""`python -m tests.mutants.text [WORD …]`: plant every fault whose name holds a WORD (default: all).

Exit code 1 when a fault survives, 2 when a fault no longer fits the code.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants import recon
from tests.mutants.recon import Fault

ROOT = Path(__file__).resolve().parents[2]
FAULTS: list[Fault] = recon.FAULTS
TEST_SECONDS_MAX = 240  # a fault may also show as an endless loop
COPIED = (
    *("recon", "sdstore", "app", "pipeline", "migrations", "bench"),
    *("tests", "docs/vectors", "pyproject.toml"),
)


def main() -> int:
    """Plant, test, report."""
    words = sys.argv[1:]
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        _copy_to(copy)
        verdicts = [_judge(copy, fault) for fault in chosen]
    survivors = verdicts.count("SURVIVED")
    print(f"{len(chosen)} faults, {verdicts.count('caught')} caught, {survivors} survived")
    return 1 if survivors else 2 if "does not fit" in verdicts else 0


def _copy_to(folder: Path) -> None:
    for name in COPIED:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target)


def _judge(folder: Path, fault: Fault) -> str:
    path = folder / fault.path
    text = path.read_text()
    if text.count(fault.right) != 1:
        verdict = "does not fit"
    else:
        path.write_text(text.replace(fault.right, fault.wrong))
        verdict = "SURVIVED" if _tests_pass(folder, fault) else "caught"
        path.write_text(text)
    print(f"{verdict:13} {fault.name}", flush=True)
    return verdict


def _tests_pass(folder: Path, fault: Fault) -> bool:
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-m", "not soak and not slow"]
    command += ["-p", "no:cacheprovider", *fault.tests]
    try:
        ended = subprocess.run(
            command, cwd=folder, capture_output=True, timeout=TEST_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    if ended.returncode not in {0, 1, 2}:  # 2: the fault broke a module at import
        raise RuntimeError(ended.stdout.decode()[-2000:])
    return ended.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
