"""The search of all logs of a test run for access tokens (`tests.support.leaks`) finds them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from app.access.tokens import TokenFile
from tests.support.leaks import Leaks

ROOT = Path(__file__).parent.parent


@pytest.fixture
def leaks(request: pytest.FixtureRequest) -> Leaks:
    """The plugin of this session."""
    plugin = request.config.pluginmanager.getplugin("leaks")
    assert isinstance(plugin, Leaks)
    return plugin


def taken(leaks: Leaks) -> list[str]:
    """What was found since the last call, so that this test does not fail for it."""
    found = leaks.found[:]
    leaks.found.clear()
    return found


def test_a_token_or_its_secret_in_any_log_is_found_and_not_repeated(
    leaks: Leaks, tmp_path: Path
) -> None:
    _, text = TokenFile(tmp_path / "tokens.json").create(scopes=["read"])
    secret = text.rpartition("_")[2]
    log = logging.getLogger("app.access.tokens")
    log.debug("digest %s, token sds_%s", "a" * 64, text[4:16])
    assert taken(leaks) == []
    log.debug("%s", secret)
    logging.getLogger("a library").error("failed", exc_info=ValueError(f"Bearer {text}"))
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200))) as client:
        client.get(f"http://node/v1/live?token={text}")
    writing = [sys.executable, "-S", "-c", "import sys; sys.stderr.write(sys.argv[1])", text]
    subprocess.run(writing, capture_output=True, check=True)
    with (tmp_path / "node.log").open("wb") as file:
        subprocess.run(writing, stderr=file, check=True)
    found = taken(leaks)
    assert [each.partition(":")[0] for each in found] == [
        "an access token in a log record of app.access.tokens",
        "an access token in a log record of a library",
        "an access token in a log record of httpx",
        "an access token in stderr of a process",
        "an access token in node.log",
    ]
    assert secret not in "".join(found)


LATE_TOKEN = '''
import subprocess, sys
from pathlib import Path
import pytest
from tests.support.leaks import Leaks

class Late:
    """Writes a token to the log of a process after the last test, where that ran."""

    log = Path(__file__).with_name("node.log")
    ran = False

    @pytest.hookimpl
    def pytest_runtest_setup(self):
        self.ran = True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if self.ran:
            assert hasattr(session.config, "workerinput") == {in_other_process}
            self.log.write_text("sds_" + "a" * 12 + "_" + "b" * 64 + "\\n")

def pytest_configure(config):
    config.pluginmanager.register(Leaks(), "leaks")
    config.pluginmanager.register(Late())
'''
STARTS_A_PROCESS = """
import subprocess, sys

def test_a_process():
    with open("node.log", "wb") as file:
        subprocess.run([sys.executable, "-S", "-c", ""], stderr=file, check=True)
"""


@pytest.mark.parametrize("processes", [0, 2])
def test_a_token_that_is_logged_after_the_last_test_fails_the_run(
    tmp_path: Path, processes: int
) -> None:
    (tmp_path / "conftest.py").write_text(
        LATE_TOKEN.replace("{in_other_process}", str(processes > 0))
    )
    (tmp_path / "test_one.py").write_text(STARTS_A_PROCESS)
    spread = ["-p", "xdist", "-n", str(processes)] if processes else []
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", tmp_path, *spread, tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in ran.stdout
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED
    assert "an access token in node.log: ***" in ran.stdout
