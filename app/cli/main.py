"""The entry point. It handles Ctrl-C before it imports anything that takes long."""

from __future__ import annotations

import gc
import logging
import sys
from io import TextIOWrapper
from typing import NoReturn

from app.cli.interrupts import EXIT_CODE, loading

# Loading a thousand modules makes many objects and next to no cycles: collections take an eighth of the
# time. Here, because each worker of a service loads this module first.
gc.set_threshold(50_000)


def main() -> NoReturn:
    """The console script."""
    # A verb reports its errors itself, once; only `serve` logs.
    logging.getLogger("app").addHandler(logging.NullHandler())
    try:
        with loading():
            from app.cli.program import run  # noqa: PLC0415 - see above

        if isinstance(sys.stdout, TextIOWrapper):
            # File names may hold any bytes; the escape is valid in JSON, too.
            sys.stdout.reconfigure(errors="backslashreplace")
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = EXIT_CODE
    sys.exit(code)


if __name__ == "__main__":
    main()
