"""The command line as tests run it: inside the process where that is enough, else as a real one."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

from app.cli.program import run

PROCESS_SECONDS_MAX = 60


@dataclass(frozen=True, slots=True)
class Result:
    """How a command line ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its only line of output, as JSON."""
        (line,) = self.out.splitlines()
        return json.loads(line)

    @property
    def lines(self) -> list[Any]:
        """Its lines of output, each as JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


def cli(*arguments: object, stdin: bytes = b"") -> Result:
    """Run `sdstore ARGUMENTS` in this process."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    source = io.TextIOWrapper(io.BufferedReader(io.BytesIO(stdin)))
    with redirect_stdout(out), redirect_stderr(err), patch("sys.stdin", source):
        code = run([str(each) for each in arguments])
    out.flush()
    return Result(code, out.buffer.getvalue().decode(), err.getvalue())


def command(*arguments: object) -> list[str]:
    """`sdstore ARGUMENTS` as a process's command line."""
    return [sys.executable, "-m", "sdstore", *map(str, arguments)]


def process(*arguments: object, stdin: bytes = b"", **environment: str) -> Result:
    """Run `sdstore ARGUMENTS` as a process of its own, without a terminal."""
    done = subprocess.run(
        command(*arguments),
        input=stdin,
        capture_output=True,
        timeout=PROCESS_SECONDS_MAX,
        env=os.environ | environment,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def http_server(status: int, body: bytes, headers: dict[str, str] | None = None) -> Iterator[str]:
    """A server that gives everybody the same answer; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815 - the names http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
