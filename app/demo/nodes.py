"""Nodes as processes of their own, on free ports, gone without a trace afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO

from app.cli.output import CliError, Exit
from app.server.settings import ENVIRONMENT_PREFIX

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0


@contextmanager
def running_node(data_dir: Path, *flags: str) -> Iterator[str]:
    """Start a node over `data_dir` and stop it at the end; its URL."""
    process = subprocess.Popen(  # noqa: S603 - this program itself
        [
            *(sys.executable, "-m", "app.cli.main", "serve", "--json", "--until-eof"),
            *("--port", "0", "--data-dir", str(data_dir), "--log-level", "warning", *flags),
        ],
        # Closed when this process ends, however it ends: the node goes with it.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)},
        # Ctrl-C at the terminal is for the demo, which then stops its nodes in order.
        start_new_session=True,
    )
    try:
        yield _url_of(process)
    finally:
        _stop(process)


def _url_of(process: subprocess.Popen[bytes]) -> str:
    """The first line a node prints says where it is."""
    lines: Queue[bytes] = Queue()
    Thread(target=_put_first_line, args=(process.stdout, lines), daemon=True).start()
    try:
        return str(json.loads(lines.get(timeout=START_TIMEOUT_S))["url"])
    except (Empty, ValueError, KeyError):
        process.kill()
        _, errors = process.communicate()
        detail = errors.decode(errors="replace").strip() or "it said nothing"
        raise CliError(Exit.LOCAL_FAULT, "node_did_not_start", detail[-500:]) from None


def _put_first_line(stream: IO[bytes], lines: Queue[bytes]) -> None:
    lines.put(stream.readline())


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
