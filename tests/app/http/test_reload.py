"""Settings are read again on SIGHUP and over HTTP; what takes a restart is named."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.federation.peers import LOOK_S
from app.reload import CHANGEABLE
from app.settings import Settings
from tests.support.cli import cli, command

SECONDS_MAX = 60


def wait_until(is_so: Callable[[], bool]) -> None:
    """Poll until something is so."""
    ends_s = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


@contextmanager
def serving(
    folder: Path, text: str, *flags: object
) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """A node with a settings file: its process, its URL and the file. Its log is FOLDER/log."""
    file = folder / "node.toml"
    file.write_text(text)
    arguments = ("serve", "--port", 0, "--data-dir", folder / "data", "--json", "--config", file)
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command(*arguments, *flags), stdout=subprocess.PIPE, stderr=log) as node,
    ):
        try:
            assert node.stdout is not None
            yield node, json.loads(node.stdout.readline())["url"], file
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait(SECONDS_MAX)


def test_every_changeable_setting_exists() -> None:
    assert set(Settings.model_fields) > CHANGEABLE


def test_a_reload_takes_over_what_can_change_and_names_the_rest(tmp_path: Path) -> None:
    text = 'drain_s = 0\nchannels = ["a"]\npeers = ["http://127.0.0.1:1"]\n'
    with serving(tmp_path, text) as (node, url, file):

        def get(path: str) -> dict[str, object]:
            document: dict[str, object] = httpx.get(
                f"{url}{path}", trust_env=False, timeout=30
            ).json()
            return document

        def peer_urls() -> list[str]:
            return [each["url"] for each in get("/v1/peers")["peers"]]  # type: ignore[attr-defined]

        # The peers are looked at for a while after the start anyway.
        time.sleep(1.2 * LOOK_S)
        assert cli("reload", "--node", url).out == "changed: nothing\n"
        file.write_text(
            'drain_s = 0\nchannels = ["b"]\nlog_level = "debug"\ncors_origins = ["*"]\n'
            'peers = ["http://127.0.0.1:2", "http://127.0.0.1:3"]\n'
        )
        answer = httpx.post(f"{url}/v1/reload", trust_env=False, timeout=30)
        assert answer.json() == {
            "changed": ["peers", "channels", "log_level"],
            "needs_restart": ["cors_origins"],
        }
        assert get("/v1/recon/interests")["channels"] == ["b"]
        wait_until(lambda: set(peer_urls()) == {"http://127.0.0.1:2", "http://127.0.0.1:3"})
        preflight = {"origin": "http://x", "access-control-request-method": "GET"}
        assert (
            httpx.options(f"{url}/v1/info", headers=preflight, trust_env=False).status_code != 200
        )
        file.write_text('drain_s = 0\nchannels = ["c"]\npeers = []\nno_such = 1\n')
        refused = httpx.post(f"{url}/v1/reload", trust_env=False, timeout=30)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_setting")
        assert "no_such" in refused.json()["detail"]
        node.send_signal(signal.SIGHUP)
        wait_until(lambda: "stay as they are" in (tmp_path / "log").read_text())
        assert get("/v1/recon/interests")["channels"] == ["b"]
        assert len(peer_urls()) == 2
        file.write_text('drain_s = 0\nchannels = ["c"]\n')
        node.send_signal(signal.SIGHUP)
        wait_until(lambda: get("/v1/recon/interests")["channels"] == ["c"])
        wait_until(lambda: peer_urls() == [])
    assert "settings read again: peers, channels, log_level" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("way", ["signal", "http"])
def test_all_workers_take_part(tmp_path: Path, way: str) -> None:
    with serving(tmp_path, 'drain_s = 0\nchannels = ["a"]\n', "--workers", 2) as (node, url, file):

        def channels() -> set[str]:
            """What the workers say; each new connection can reach another one."""
            found = set()
            for _ in range(12):
                answer = httpx.get(f"{url}/v1/recon/interests", trust_env=False, timeout=30)
                found |= set(answer.json()["channels"])
            return found

        assert channels() == {"a"}
        file.write_text('drain_s = 0\nchannels = ["b"]\n')
        if way == "signal":
            node.send_signal(signal.SIGHUP)
        else:
            assert httpx.post(f"{url}/v1/reload", trust_env=False, timeout=30).json()[
                "changed"
            ] == ["channels"]
        wait_until(lambda: channels() == {"b"})
        assert node.poll() is None
