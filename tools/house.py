"""Statistics of the code: modules, lines, functions, and the modules that one operation crosses.

`python -m tools.house`: run it in any checkout. Generated code and tests are left out. A module is
crossed by an operation if the request makes a function of it run, in any thread of the node; what runs in
the background meanwhile does not count. A sync counts both nodes, initiator and responder.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from types import FrameType
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import httpx

from app.ingest.door import GroupCommitter
from app.server.connection import Connection
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, HistoryEntry, Message
from tests.support.server import PROTOBUF, WANTS_PROTOBUF, running_node

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("recon", "sdstore", "app", "pipeline")
HEADER = "sdstore-house"
"""Names the operation of a request, from one node to the other."""

_operation: ContextVar[str] = ContextVar("operation", default="")


def main() -> None:
    """Print the counts."""
    lines = lines_of_modules()
    modules = list(lines)
    largest = max(lines, key=lambda path: lines[path])
    print(f"modules                {len(modules)}")
    print(f"lines                  {sum(lines.values()):,}")
    print(f"median module          {median(lines.values()):.0f} lines")
    print(f"largest module         {lines[largest]} lines, {largest.relative_to(ROOT)}")
    print(f"modules under 60 lines {sum(1 for count in lines.values() if count < 60)}")
    functions = [length for path in modules for length in _functions(path)]
    p95 = quantiles(functions, n=20)[-1]
    print(
        f"functions              {len(functions):,}; median {median(functions):.0f} lines, "
        f"95 % below {p95:.0f}, longest {max(functions)}"
    )
    for name, paths in crossed().items():
        label = f"crossed by a {name}"
        print(f"{label:22} {len(paths)} modules, {sum(lines[path] for path in paths):,} lines")
        if "-v" in sys.argv:
            print(*(f"    {path.relative_to(ROOT)}" for path in sorted(paths)), sep="\n")


def lines_of_modules() -> dict[Path, int]:
    """The product's modules, without generated and empty ones, and their lines."""
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    texts = {path: path.read_text() for path in found if "_pb2" not in path.name}
    return {path: text.count("\n") for path, text in texts.items() if text.strip()}


def _functions(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


class Recorder:
    """The source files whose functions run for a named operation, in any thread of the nodes.

    A context variable names the operation that runs. It follows a request as any context variable does: into
    tasks, timers and `asyncio.to_thread`. Over HTTP and to the writer's thread it is taken here.
    """

    def __init__(self) -> None:
        self._files: defaultdict[str, set[str]] = defaultdict(set)

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and (name := _operation.get()):
            self._files[name].add(frame.f_code.co_filename)

    def of(self, name: str) -> set[Path]:
        """The modules of ours that ran."""
        paths = {Path(each) for each in self._files[name]}
        return {
            path
            for path in paths
            if path.is_relative_to(ROOT)
            and path.relative_to(ROOT).parts[0] in PACKAGES
            and "_pb2" not in path.name
        }


@contextmanager
def _recording() -> Iterator[Recorder]:
    recorder = Recorder()
    threading.setprofile(recorder)
    try:
        with _followed_over_http(), _followed_to_the_writer():
            yield recorder
    finally:
        threading.setprofile(None)


@contextmanager
def _followed_over_http() -> Iterator[None]:
    """A header names the operation of a request."""
    of_connection: WeakKeyDictionary[object, str] = WeakKeyDictionary()
    read, send = Connection.buffer_updated, httpx.AsyncClient.send

    def received(connection: Any, nbytes: int) -> None:
        if found := re.search(HEADER.encode() + rb": (.*)\r\n", connection.buffer[:nbytes]):
            of_connection[connection] = found[1].decode()
        _call(of_connection.get(connection, ""), read, connection, nbytes)

    async def sent(client: Any, request: httpx.Request, **options: Any) -> Any:
        if name := _operation.get():
            request.headers[HEADER] = name
        return await send(client, request, **options)

    with (
        patch.object(Connection, "buffer_updated", received),
        patch.object(httpx.AsyncClient, "send", sent),
    ):
        yield


@contextmanager
def _followed_to_the_writer() -> Iterator[None]:
    """A job of the writer's thread belongs to the operation that waits for it."""
    of_job: WeakKeyDictionary[object, str] = WeakKeyDictionary()
    writer: Any = GroupCommitter
    admit, write, finish = writer._admit, writer._write_or_retry, writer._finish  # noqa: SLF001

    def admitted(committer: Any, job: Any) -> None:
        name = of_job[job.future] = _operation.get()
        if job.call is not None:
            job.call = partial(_call, name, job.call)
        admit(committer, job)

    def name_of(group: Any) -> str:
        # A transaction of several requests runs for each of them.
        return next(filter(None, (of_job[job.future] for job in group)), "")

    def written(committer: Any, group: Any) -> Any:
        return _call(name_of(group), write, committer, group)

    def finished(committer: Any, group: Any, answers: Any) -> None:
        _call(name_of(group), finish, committer, group, answers)

    with (
        patch.object(GroupCommitter, "_admit", admitted),
        patch.object(GroupCommitter, "_write_or_retry", written),
        patch.object(GroupCommitter, "_finish", finished),
    ):
        yield


def _call(name: str, do: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function for an operation, or for none."""
    token = _operation.set(name)
    try:
        return do(*arguments)
    finally:
        _operation.reset(token)


def crossed() -> dict[str, set[Path]]:
    """The modules that run for each of some operations, between two nodes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _recording() as recorder,
        running_node(Path(folder) / "a") as ours,
        running_node(Path(folder) / "b") as theirs,
    ):
        for number in range(200):
            for node in (ours, theirs)[: 1 if number % 10 == 0 else 2]:
                node.publish(_message(number))

        def send(name: str, method: str, path: str, **options: Any) -> httpx.Response:
            # On a connection of its own, so that its first bytes belong to the operation too.
            headers = {**options.pop("headers", {}), HEADER: name}
            with httpx.Client(base_url=ours.url, auth=ours.http.auth, trust_env=False) as client:
                return client.request(method, path, headers=headers, **options)

        frame = encode(_message(1_000), Dialect.V2)
        # Warm up: one-time work is not part of an operation.
        for name in ("", "GET"):
            send(name, "GET", "/v1/messages/m1", headers=WANTS_PROTOBUF)
        for name in ("", "page"):
            send(name, "GET", "/v1/channels/c/messages", headers=WANTS_PROTOBUF)
        send("POST", "POST", "/v1/messages", content=frame, headers=PROTOBUF)
        started = send("sync", "POST", "/v1/syncs", json={"peer_url": theirs.url}).json()
        while ours.http.get(f"/v1/syncs/{started['id']}").json()["state"] != "finished":
            time.sleep(0.05)
    # The nodes have ended, and with them what ran after an answer.
    return {name: recorder.of(name) for name in ("POST", "GET", "page", "sync")}


def _message(number: int) -> Message:
    return Message(
        f"m{number}",
        "c",
        sender_id="ada",
        lamport_timestamp=1_763_000_000_000 + number,
        causal_history=(HistoryEntry(f"m{number - 1}", b"hint"),) if number else (),
        content=b"content",
    )


if __name__ == "__main__":
    main()
