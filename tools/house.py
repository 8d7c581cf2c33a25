"""Statistics of the code: modules, lines, functions, and the modules that one operation crosses.

`python -m tools.house`: run it in any checkout. Generated code and tests are left out. A module is
crossed by an operation if a function of it runs between the request's arrival and its answer, in
any thread of the node; a sync counts both nodes, initiator and responder.
"""

from __future__ import annotations

import ast
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from types import FrameType

from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, HistoryEntry, Message
from tests.support.server import PROTOBUF, WANTS_PROTOBUF, RunningNode, running_node

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("recon", "sdstore", "app", "pipeline")


def main() -> None:
    """Print the counts."""
    modules = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    modules = [p for p in modules if "_pb2" not in p.name and p.read_text().strip()]
    lines = {path: path.read_text().count("\n") for path in modules}
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
    for name, crossed in _crossed().items():
        print(f"{name:22} {len(crossed)} modules, {sum(lines[path] for path in crossed):,} lines")
        if "-v" in sys.argv:
            print(*(f"    {path.relative_to(ROOT)}" for path in sorted(crossed)), sep="\n")


def _functions(path: Path) -> Iterator[int]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


class _Recorder:
    """The source files whose functions ran, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if self.is_on and event == "call":
            self.files.add(frame.f_code.co_filename)

    def during(self, work: Callable[[], object]) -> set[Path]:
        """The modules of ours that run during `work`."""
        self.files, self.is_on = set(), True
        work()
        time.sleep(0.3)  # include work after the answer
        self.is_on = False
        paths = {Path(each) for each in self.files}
        return {
            path
            for path in paths
            if path.is_relative_to(ROOT)
            and path.relative_to(ROOT).parts[0] in PACKAGES
            and "_pb2" not in path.name
        }


@contextmanager
def _recording() -> Iterator[_Recorder]:
    recorder = _Recorder()
    threading.setprofile(recorder)
    try:
        yield recorder
    finally:
        threading.setprofile(None)


def _crossed() -> dict[str, set[Path]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        _recording() as recorder,
        running_node(Path(folder) / "a") as ours,
        running_node(Path(folder) / "b") as theirs,
    ):
        for number in range(200):
            for node in (ours, theirs)[: 1 if number % 10 == 0 else 2]:
                node.publish(_message(number))
        # Warm up: one-time work is not part of an operation.
        get = lambda: ours.http.get("/v1/messages/m1", headers=WANTS_PROTOBUF)  # noqa: E731
        page = lambda: ours.http.get("/v1/channels/c/messages", headers=WANTS_PROTOBUF)  # noqa: E731
        get(), page()
        frame = encode(_message(1_000), Dialect.V2)
        return {
            "crossed by a POST": recorder.during(
                lambda: ours.http.post("/v1/messages", content=frame, headers=PROTOBUF)
            ),
            "crossed by a GET": recorder.during(get),
            "crossed by a page": recorder.during(page),
            "crossed by a sync": recorder.during(lambda: _sync(ours, theirs)),
        }


def _message(number: int) -> Message:
    return Message(
        f"m{number}",
        "c",
        sender_id="ada",
        lamport_timestamp=1_763_000_000_000 + number,
        causal_history=(HistoryEntry(f"m{number - 1}", b"hint"),) if number else (),
        content=b"content",
    )


def _sync(ours: RunningNode, theirs: RunningNode) -> None:
    started = ours.http.post("/v1/syncs", json={"peer_url": theirs.url}).json()
    while ours.http.get(f"/v1/syncs/{started['id']}").json()["state"] != "finished":
        time.sleep(0.05)


if __name__ == "__main__":
    main()
