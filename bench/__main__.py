"""Every benchmark, one after the other, each in a process of its own.

`python -m bench [NAME …] [--quick]`: names as in bench/NAME.py; without names all of them.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from bench.scratch import in_scratch

BENCHMARKS = (
    "recon",
    "requests",
    "negentropy",
    "mvds",
    "ordering",
    "participant",
    "backfill",
    "participant_file",
    "store",
    "frames",
    "http",
    "tokens",
    "postgres",
    "pipeline",
    "stampede",
    "growth",
    "spread",
    "federation",
)


def main() -> int:
    """Run them; the exit code of the first that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Run benchmarks one after the other, each in a process of its own.",
        epilog=f"names: {', '.join(BENCHMARKS)}",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark {', '.join(unknown)}; the names are {', '.join(BENCHMARKS)}")
    flags = ["--quick"] if arguments.quick else []
    for name in arguments.names or BENCHMARKS:
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
    sys.exit(in_scratch(main))
