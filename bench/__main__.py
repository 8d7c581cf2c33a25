"""Every benchmark, one after the other, each in a process of its own.

`python -m bench [NAME …] [--quick]`: names as in bench/NAME.py; without names all of them.
"""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = (
    "recon",
    "requests",
    "negentropy",
    "mvds",
    "participant",
    "backfill",
    "participant_file",
    "store",
    "frames",
    "http",
    "postgres",
    "pipeline",
    "stampede",
)


def main() -> int:
    """Run them; the exit code of the first that failed."""
    flags = [argument for argument in sys.argv[1:] if argument.startswith("-")]
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")] or BENCHMARKS
    for name in names:
        print(f"\n=== {name} ===", flush=True)
        ended = subprocess.run(
            [sys.executable, "-m", f"bench.{name}", *flags],
            cwd=Path(__file__).parent.parent,
            check=False,
        )
        if ended.returncode:
            return ended.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
