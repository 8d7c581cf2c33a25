"""A node that is killed at any moment of a reload starts with the settings of before or after it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from sdstore.sds.codec import encode
from tests.support.cli import command
from tests.support.federation import message
from tests.support.server import PROTOBUF

PEERS = [f"http://127.0.0.1:{port}" for port in (9, 10, 11)]


@contextmanager
def serving(config: Path, data_dir: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A process that is killed at the end, and a client with the rights of its machine."""
    arguments = ("--port", 0, "--data-dir", data_dir, "--config", config, "--json")
    with subprocess.Popen(
        command("serve", *arguments, "--log-level", "error"), stdout=subprocess.PIPE
    ) as running:
        try:
            assert running.stdout is not None
            url = json.loads(running.stdout.readline())["url"]
            with httpx.Client(base_url=url, trust_env=False) as http:
                yield running, http
        finally:
            running.kill()


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_a_node_killed_in_a_reload_starts_again_and_keeps_what_it_acknowledged(
    tmp_path: Path, rounds: int
) -> None:
    seed = int.from_bytes(os.urandom(4))
    print("seed", seed)
    draw = random.Random(seed)
    config = tmp_path / "sdstore.toml"
    config.write_text("")
    for number in range(rounds):
        with serving(config, tmp_path / "data") as (running, http):
            for earlier in range(number):
                assert http.get(f"/v1/messages/m{earlier}").status_code == 200
            body = encode(message(number))
            assert http.post("/v1/messages", content=body, headers=PROTOBUF).status_code == 201
            listed = ", ".join(f'"{each}"' for each in draw.sample(PEERS, draw.randint(0, 3)))
            channels = ", ".join(f'"{each}"' for each in draw.sample("cdef", draw.randint(1, 4)))
            config.write_text(f"peers = [{listed}]\nchannels = [{channels}]\n")
            running.send_signal(signal.SIGHUP)
            time.sleep(draw.uniform(0, 0.05))
    with serving(config, tmp_path / "data") as (_, http):
        for earlier in range(rounds):
            assert http.get(f"/v1/messages/m{earlier}").status_code == 200
        wanted = http.get("/v1/recon/interests").json()["channels"]
        assert [f'"{each}"' for each in wanted] == sorted(channels.split(", "))
