"""An archive of Spark's classes as the JVM loads them, which halves the CPU time of a Spark start.

Made once from a run of Spark, which takes half a minute, and kept in `.cache/jvm/`. A JVM for which it does
not fit, or that finds none, starts as ever.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark

from pipeline.session import java_home

CACHE = Path(__file__).parents[2] / ".cache" / "jvm"
MAKING_SECONDS_MAX = 280
# Reads and shuffles a few rows, writes the class path to the file that is its argument.
_RUN = """
import sys
from pathlib import Path
from pipeline.session import spark_session
with spark_session("local[2]") as spark:
    rows = spark.createDataFrame([(1, "a"), (2, "b")], "number int, word string")
    folder = str(Path(sys.argv[1]).with_name("rows"))
    rows.groupBy("word").count().write.parquet(folder)
    spark.read.parquet(folder).orderBy("word").collect()
    jvm = spark.sparkContext._jvm
    Path(sys.argv[1]).write_text(jvm.java.lang.System.getProperty("java.class.path"))
"""


def options_with_archive(options: str) -> str:
    """Options for JVMs like `options`, with the archive; made first where there is none."""
    archive = CACHE / f"{_key()}.jsa"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _make(Path(scratch), options).rename(archive)
    # The JVM says on its output why it does not use an archive; Spark's scripts read that output.
    return f'{options} "-XX:SharedArchiveFile={archive}" -Xlog:disable -Xlog:all=off'


def _key() -> str:
    """Another Spark, Java or place has other classes."""
    with tempfile.TemporaryDirectory() as scratch:
        version = subprocess.run(
            [_java(Path(scratch)), "-version"], capture_output=True, check=True, timeout=30
        ).stderr
    place = f"{pyspark.__version__}\0{pyspark.__file__}".encode()
    return hashlib.sha256(version + b"\0" + place).hexdigest()[:16]


def _make(scratch: Path, options: str) -> Path:
    classes, class_path, archive = (scratch / name for name in ("classes", "path", "archive"))
    subprocess.run(
        [sys.executable, "-c", _RUN, class_path],
        env=os.environ
        | {"JDK_JAVA_OPTIONS": f'{options} -Xshare:off "-XX:DumpLoadedClassList={classes}"'},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=True,
        timeout=MAKING_SECONDS_MAX,
    )
    dump = (f"-XX:SharedClassListFile={classes}", f"-XX:SharedArchiveFile={archive}")
    subprocess.run(
        [_java(scratch), "-Xshare:dump", *dump, "-cp", class_path.read_text()],
        env=os.environ | {"JDK_JAVA_OPTIONS": options},
        capture_output=True,
        check=True,
        timeout=MAKING_SECONDS_MAX,
    )
    return archive


def _java(scratch: Path) -> str:
    home = java_home(os.environ, scratch)
    found = shutil.which("java") if home is None else f"{home}/bin/java"
    assert found is not None
    return found
