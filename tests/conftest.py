"""Setup for every test."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings

from bench.scratch import NotEnoughRoomError, scratch_folder
from tests.support.leaks import Leaks

FREE_BYTES_MIN = 5 << 30
"""What the tests write at a time, and the gibibyte that nodes keep free on their disk."""

# Nodes that tests stop need not wait until a load balancer has noticed.
os.environ.setdefault("SDSTORE_DRAIN_S", "0")

# Tests start hundreds of processes. Each would compile our modules anew, which takes 0.3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts its background jobs deaf to Ctrl-C, nohup starts its own deaf to SIGHUP, and children
# inherit that. The processes that tests start, and stop, shall hear both however the tests were started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The first draw of text in a fresh checkout builds a table of Unicode, which takes seconds.
settings.register_profile("sdstore", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sdstore")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Search the logs for tokens; put what the tests leave into one folder that goes away with them."""
    config.pluginmanager.register(Leaks(), "leaks")
    # Our loggers write everything for the plugin; tests that look at records ask for a level.
    config.option.log_level = config.option.log_level or "WARNING"
    closing = ExitStack()
    config.add_cleanup(closing.close)
    try:
        folder = closing.enter_context(scratch_folder(FREE_BYTES_MIN))
    except NotEnoughRoomError as error:
        raise pytest.UsageError(str(error)) from None
    if config.option.basetemp is None:
        config.option.basetemp = folder / "pytest"
    # Where nodes leave word for the commands of their user.
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    # For jobs on a few rows, the JVM spends most of its time on compiling what then runs once.
    java = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    os.environ.setdefault("JDK_JAVA_OPTIONS", f"{java} -Djava.io.tmpdir={folder}")


@pytest.fixture(scope="session", autouse=True)
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give each client of httpx one certificate to load instead of all of certifi's.

    A client loads them when it is made, which takes 20 ms; no test trusts any of them.
    """
    end = "-----END CERTIFICATE-----\n"
    first = Path(certifi.where()).read_text().partition(end)
    path = tmp_path_factory.mktemp("authorities") / "one.pem"
    path.write_text(first[0] + end)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(certifi, "where", lambda: str(path))
        yield


@pytest.fixture(scope="session")
def quick_spark() -> Iterator[None]:
    """Spark's own processes load their classes from an archive; for tests that start many of them."""
    from tests.support.class_archive import options_with_archive  # noqa: PLC0415 - imports Spark

    with pytest.MonkeyPatch.context() as patched:
        options = options_with_archive(os.environ["JDK_JAVA_OPTIONS"])
        patched.setenv("JDK_JAVA_OPTIONS", options)
        yield
