"""Ctrl-C ends every verb that can take long: with 130, and without a traceback."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cli import command

PYTHON_CPU_S = 0.2  # an interpreter that has used so much has long reached our own first line
PYTHON_WAIT_S_MAX = 60.0
STARTED_S = 6.0  # all of them together, on two cores
VERBS = [
    ("import", "{fifo}", "--data-dir", "{folder}"),
    ("publish", "{fifo}", "--node", "{node}"),
    ("tail", "c", "--node", "{node}"),
    ("indexer", "c", "--as", "x", "--file", "{folder}/x.db", "--node", "{silent}"),
    ("sync", "{silent}", "--node", "{node}"),
    ("backfill", "c", "--into", "{folder}/x.ldp", "--node", "{silent}"),
    ("get", "x", "--node", "{silent}"),
    ("channels", "--node", "{silent}"),
    ("serve", "--port", "0", "--data-dir", "{folder}/served"),
    ("demo", "--messages", "50000"),
]


def test_ctrl_c_ends_any_verb_with_130_and_no_traceback(
    node: str, silent: str, tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    names = {"fifo": fifo, "folder": tmp_path, "node": node, "silent": silent}
    with ExitStack() as stack:
        running = []
        for verb in VERBS:
            arguments = command(*(each.format(**names) for each in verb))
            pipe = subprocess.PIPE
            process = stack.enter_context(subprocess.Popen(arguments, stdout=pipe, stderr=pipe))
            stack.callback(process.kill)
            running.append(process)
        wait_for_python([process.pid for process in running])
        time.sleep(STARTED_S)
        for process in running:
            process.send_signal(signal.SIGINT)
        ends = [(each.communicate(timeout=30)[1], each.returncode) for each in running]
    for verb, (errors, code) in zip(VERBS, ends, strict=True):
        assert (verb[0], code, b"Traceback" in errors) == (verb[0], 130, False), errors


@pytest.mark.parametrize("after_s", [0.3, 0.6, 0.9, 1.2, 1.5])
def test_ctrl_c_while_modules_are_loaded_is_not_lost(after_s: float, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    arguments = command("import", str(fifo), "--data-dir", str(tmp_path))
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(arguments, stderr=subprocess.PIPE))
        stack.callback(process.kill)
        wait_for_python([process.pid])
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=30)[1]
    assert (process.returncode, b"Traceback" in errors) == (130, False), errors


def wait_for_python(pids: list[int]) -> None:
    """On a busy machine an interpreter takes its time, and knows no exit codes of ours until then."""
    deadline = time.monotonic() + PYTHON_WAIT_S_MAX
    while any(cpu_s(pid) < PYTHON_CPU_S for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def cpu_s(pid: int) -> float:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_demo_leaves_no_node_behind_however_it_ends(number: int, tmp_path: Path) -> None:
    with subprocess.Popen(
        command("demo", "--messages", "50000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "200"},
    ) as demo:
        assert demo.stdout is not None
        demo.stdout.readline()
        urls = re.findall(r"http://\S+", demo.stdout.readline().decode())
        assert len(urls) == 2
        demo.send_signal(number)
        demo.wait(timeout=30)
    deadline = time.monotonic() + 60
    while any(is_reached(url) for url in urls):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if number != signal.SIGKILL:
        assert not list(tmp_path.iterdir())


def is_reached(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        return connection.connect_ex((host, int(port))) == 0
