"""The entry point. Ctrl-C is taken care of before anything heavy is imported."""

from __future__ import annotations

import sys
from typing import NoReturn

from app.cli.interrupts import INTERRUPTED, loading


def main() -> NoReturn:
    """The console script."""
    try:
        with loading():
            from app.cli.program import run  # noqa: PLC0415 - see above

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
