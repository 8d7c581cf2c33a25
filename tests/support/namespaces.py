"""Hosts with networks of their own: Linux network namespaces on one switch, and a tap on its wire."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

NETWORK = "10.211.7"

# Writes every packet at the ports of the switch to a file, until it is ended.
_TAP = """
import socket, sys
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
with open(sys.argv[1], "wb", buffering=0) as file:
    print("listens", flush=True)
    while True:
        file.write(wire.recv(1 << 17))
"""


class Network:
    """Namespaces by the names of their hosts; each host reaches all others and nothing else."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = {name: f"sdstore-{os.getpid()}-{name}" for name in ("switch", *names)}
        self._addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}

    def address(self, host: str) -> str:
        """The address of a host."""
        return self._addresses[host]

    def at(self, host: str) -> list[str]:
        """What to put before a command line to run it on a host."""
        return ["ip", "netns", "exec", self._names[host]]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The network, until the end of the block; skips without the right to make one."""
        if shutil.which("ip") is None or os.geteuid() != 0:
            pytest.skip("network namespaces need iproute2 and root")
        with ExitStack() as closing:
            for name in self._names.values():
                _ip("netns", "add", name)
                closing.callback(_ip, "netns", "del", name)
            switch = self._names["switch"]
            _ip("-n", switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", switch, "link", "set", "switch", "up")
            for host, address in self._addresses.items():
                there = self._names[host]
                _ip("-n", there, "link", "set", "lo", "up")
                port = ("peer", "name", f"to-{host}"[:15], "netns", switch)
                _ip("-n", there, "link", "add", "eth0", "type", "veth", *port)
                _ip("-n", switch, "link", "set", f"to-{host}"[:15], "master", "switch", "up")
                _ip("-n", there, "address", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", there, "link", "set", "eth0", "up")
            yield

    @contextmanager
    def tapped(self, file: Path) -> Iterator[None]:
        """Record every packet between hosts in `file`, until the end of the block."""
        tap = subprocess.Popen(
            [*self.at("switch"), sys.executable, "-c", _TAP, str(file)], stdout=subprocess.PIPE
        )
        assert tap.stdout is not None
        try:
            assert tap.stdout.readline() == b"listens\n"
            yield
            time.sleep(0.2)  # the last packets are on their way to the file
        finally:
            tap.kill()
            tap.wait(60)
            tap.stdout.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)
