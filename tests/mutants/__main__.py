"""`python -m tests.mutants [WORD …]`: plant every fault whose name holds a WORD (default: all).

Each fault gets a run of pytest over its tests, which must fail. First the tests of all chosen
faults run once without a fault, because a test that fails anyway notices nothing.
Exit code 1 when a fault survives, 2 when a seam no longer exists, 3 when the tests fail without it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.mutants.fault import ENVIRONMENT, Fault
from tests.mutants.planted import AREAS, all_faults

ROOT = Path(__file__).resolve().parents[2]
EVERYWHERE = Path(__file__).parent / "everywhere"
TEST_SECONDS_MAX = 240  # a fault may also show as an endless loop
_PYTEST = ("-m", "pytest", "-x", "-q", "-m", "not soak and not slow", "-p", "no:cacheprovider")


def main() -> int:
    """Plant, test, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help=f"areas: {', '.join(AREAS)}")
    words = parser.parse_args().words
    chosen = [
        each for each in all_faults() if not words or any(word in each.name for word in words)
    ]
    if not chosen:
        parser.error(f"no fault has one of {words} in its name")
    started = time.monotonic()
    if failed := _first_failure(
        None, dict.fromkeys(test for each in chosen for test in each.tests)
    ):
        print(f"without a fault: {failed}")
        return 3
    verdicts = Counter(_judge(fault) for fault in chosen)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    print(f"{len(chosen)} faults: {counts}; {(time.monotonic() - started) / 60:.0f} minutes")
    return 1 if verdicts["SURVIVED"] else 2 if verdicts["does not fit"] else 0


def _judge(fault: Fault) -> str:
    try:
        fault.wrong_value()
    except (ImportError, LookupError) as error:
        verdict, by = "does not fit", str(error)
    else:
        by = _first_failure(fault, fault.tests)
        verdict = "caught" if by else "SURVIVED"
    print(f"{verdict:13} {fault.name}\n{'':13} {by}".rstrip(), flush=True)
    return verdict


def _first_failure(fault: Fault | None, tests: Iterable[str]) -> str:
    """The first test that fails, and why; empty if all pass."""
    folders = [ROOT, *([EVERYWHERE] if fault else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    environment |= {ENVIRONMENT: fault.name if fault else "", "COLUMNS": "300"}
    try:
        ended = subprocess.run(
            [sys.executable, "-B", *_PYTEST, *tests],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TEST_SECONDS_MAX if fault else None,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {TEST_SECONDS_MAX} s"
    if ended.returncode == 0:
        return ""
    if ended.returncode not in {1, 2}:  # 2: the fault broke a module at import
        raise RuntimeError(ended.stdout[-2000:] + ended.stderr[-2000:])
    found = re.search(r"^(?:FAILED|ERROR) (.*)$", ended.stdout, re.MULTILINE)
    return found[1][:200] if found else ended.stdout[-300:]


if __name__ == "__main__":
    sys.exit(main())
