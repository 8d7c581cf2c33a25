"""A store node as a process of its own, which tests kill and start again."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.cli import command, free_port


class StoreProcess:
    """`sdstore serve` on a port of its own, which can be killed and started again.

    `runner`: what to put before its command line; `host`: the address that it listens on.
    """

    def __init__(
        self,
        data_dir: Path,
        *options: object,
        runner: Sequence[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        self.data_dir = data_dir
        self.options = options
        self.runner = runner
        self.host = host
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        address = ("--host", self.host, "--port", self.port)
        arguments = ("serve", *address, "--data-dir", self.data_dir, "--json")
        self.process = subprocess.Popen(
            [*self.runner, *command(*arguments, "--log-level", "error", *self.options)],
            stdout=subprocess.PIPE,
            env=os.environ | {"SDSTORE_DRAIN_S": "0"},
        )
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["url"] == self.url

    def end(self, number: signal.Signals) -> None:
        """Send a signal, and wait until the process has ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.send_signal(number)
        self.process.wait(30)
        self.process.stdout.close()
        self.process = None

    @property
    def url(self) -> str:
        """Its address, the same after a restart."""
        scheme = "https" if "--tls-cert" in self.options else "http"
        return f"{scheme}://{self.host}:{self.port}"
