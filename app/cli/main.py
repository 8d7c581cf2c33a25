"""The entry point. Ctrl-C is taken care of before anything heavy is imported."""

from __future__ import annotations

import logging
import sys
from io import TextIOWrapper
from typing import NoReturn

from app.cli.interrupts import EXIT_CODE, loading


def main() -> NoReturn:
    """The console script."""
    # What a verb could not do is said once, by the verb; `serve` alone logs.
    logging.getLogger("app").addHandler(logging.NullHandler())
    try:
        with loading():
            from app.cli.program import run  # noqa: PLC0415 - see above

        if isinstance(sys.stdout, TextIOWrapper):
            # Names of files may be any bytes; the escape is one of JSON too.
            sys.stdout.reconfigure(errors="backslashreplace")
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = EXIT_CODE
    sys.exit(code)


if __name__ == "__main__":
    main()
