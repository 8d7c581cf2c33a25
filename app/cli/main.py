"""The entry point. It handles Ctrl-C before it imports anything that takes long."""

from __future__ import annotations

import gc
import logging
import re
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
    except ModuleNotFoundError as error:
        if not _is_of_extra(error.name or ""):
            raise
        # Without its packages there is neither `print_error` nor `Exit`.
        sys.stderr.write(
            f"sdstore: server_missing: {error}; the command line needs the extra `server`: "
            "pip install 'sdstore[server]', in a checkout '.[server]'\n"
        )
        code = 6
    sys.exit(code)


def _is_of_extra(module: str) -> bool:
    """Whether a module belongs to a package of the extra `server`."""
    from importlib.metadata import requires  # noqa: PLC0415 - for this error only

    name = re.escape(module.partition(".")[0].replace("_", "-"))
    pattern = re.compile(rf"{name}\b(?!-).*; .*extra == 'server'")
    return any(map(pattern.match, requires("sdstore") or ()))


if __name__ == "__main__":
    main()
