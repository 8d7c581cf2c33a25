"""The servers that are measured, each in a process of its own.

`node URL FOLDER [SYNC_INTERVAL_S]`: a store node as `sdstore serve` runs it. `naive URL FOLDER`: the same node, but
every look-up by ID is a query of its own on the same pool. `bare FILE`: an ASGI application that
gives one answer (pickled status, headers, body) to everything.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from app.cli.server import bind, run_node, url_of
from app.server.node import Node
from app.server.settings import Settings


@dataclass(frozen=True, slots=True)
class Served:
    """A server in a process of its own."""

    url: str
    process_id: int

    def cpu_s(self) -> float:
        """Seconds of CPU it has used so far; other work on the machine does not change them."""
        fields = Path(f"/proc/{self.process_id}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def cpu_ns(self) -> int:
        """As `cpu_s`, in nanoseconds, of the threads that run: for short loads."""
        tasks = Path(f"/proc/{self.process_id}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)

    def memory_bytes(self) -> int:
        """Memory of its own: without files that are mapped."""
        status = Path(f"/proc/{self.process_id}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@contextmanager
def serving(kind: str, *arguments: str) -> Iterator[Served]:
    """A server that runs until the block ends."""
    command = [sys.executable, "-m", "bench.http_servers", kind, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise RuntimeError(f"the {kind} server did not start")
            yield Served(url, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def as_operator(data_dir: Path) -> dict[str, str]:
    """The headers of the operator of a node that runs; none for versions whose operators need no token."""
    file = data_dir / "operator.token"
    return {"authorization": f"Bearer {file.read_text().strip()}"} if file.exists() else {}


def _node(database_url: str, folder: str, sync_interval_s: str = "30", *, is_naive: bool) -> None:
    settings = Settings(
        database_url=database_url,
        data_dir=Path(folder),
        port=0,
        sync_interval_s=float(sync_interval_s),
    )
    with bind(settings) as listener:

        def ready(node: Node) -> None:
            if is_naive:
                _query_each(node)
            print(url_of(listener, settings), flush=True)

        run_node(settings, listener, ready)


def _query_each(node: Node) -> None:
    database: Any = node.store._database  # noqa: SLF001 - what is compared is this very inside

    async def single(query: Any, arguments: Any) -> Any:
        return [row[1:] for row in await database.each(query, [arguments])]

    database.single = single


def _bare(file: str) -> None:
    status, headers, body = pickle.loads(Path(file).read_bytes())
    start = {"type": "http.response.start", "status": status, "headers": headers}
    end = {"type": "http.response.body", "body": body}

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send(start)
        await send(end)

    async def serve() -> None:
        settings = Settings(port=0)
        with bind(settings) as listener:
            config = uvicorn.Config(
                app, http="httptools", ws="none", lifespan="off", log_config=None,
                log_level="warning", access_log=False, server_header=False, proxy_headers=False,
            )  # fmt: skip
            print(url_of(listener, settings), flush=True)
            await uvicorn.Server(config).serve(sockets=[listener])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


if __name__ == "__main__":
    # The parent may be gone before this process ends.
    sys.stdout = os.fdopen(os.dup(1), "w")
    kind, *rest = sys.argv[1:]
    if kind == "bare":
        _bare(*rest)
    else:
        _node(*rest, is_naive=kind == "naive")
