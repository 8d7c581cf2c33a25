"""The search of all logs of a test run for access tokens (`tests.support.leaks`) finds them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from app.tokens import TokenFile
from tests.support.leaks import Leaks


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
    log = logging.getLogger("app.tokens")
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
        "an access token in a log record of app.tokens",
        "an access token in a log record of a library",
        "an access token in a log record of httpx",
        "an access token in stderr of a process",
        "an access token in node.log",
    ]
    assert secret not in "".join(found)
