"""js-waku's SDS participant, live: `@waku/sds` in a node process, driven step by step.

js-waku leaves the timing to its application, so `JsPeer.sweep` does what an application does every
few seconds. All peers of a process read one clock, `JsWaku.clock`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdstore.sds.model import HistoryEntry
from tests.support.node import NodeProcess, node_process, node_project

PROJECT = Path(__file__).parents[1] / "sds" / "js_waku"
Event = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class JsSweep:
    """What a sweep of both buffers gives: entries to fetch, and frames to send."""

    missing: list[HistoryEntry]
    repairs: list[bytes]
    unacknowledged: list[bytes]
    possibly: list[bytes]


@dataclass(frozen=True, slots=True)
class JsState:
    """What a js-waku participant keeps. `log` is in its log order."""

    lamport: int
    log: list[str]
    incoming: list[str]
    outgoing: list[str]
    filter: bytes


@dataclass
class JsPeer:
    """One participant. `events` grows with every call: (name, message ID or IDs)."""

    node: NodeProcess
    name: str
    events: list[Event] = field(default_factory=list)

    def send(self, content: bytes, *, lost: bool = False) -> tuple[str, bytes, bytes]:
        """Message ID, frame and retrieval hint; with `lost` its transport reports a failure."""
        answer = self._call("send", content=content.hex(), lost=lost)
        return answer["id"], bytes.fromhex(answer["frame"]), bytes.fromhex(answer["hint"])

    def ephemeral(self, content: bytes) -> bytes:
        """The frame."""
        return bytes.fromhex(self._call("ephemeral", content=content.hex())["frame"])

    def sync(self) -> bytes | None:
        """The frame of a sync message; `None` where js-waku sends none."""
        frame = self._call("sync")["frame"]
        return None if frame is None else bytes.fromhex(frame)

    def receive(self, frame: bytes, hint: bytes | None = None) -> str | None:
        """The ID of the message; `None` if js-waku cannot decode it."""
        decoded: str | None = self._call(
            "receive", frame=frame.hex(), hint=None if hint is None else hint.hex()
        )["decoded"]
        return decoded

    def sweep(self) -> JsSweep:
        """Both buffers, and the repairs that are due."""
        answer = self._call("sweep")
        return JsSweep(
            [
                HistoryEntry(message_id, bytes.fromhex(hint or ""), sender or "")
                for message_id, hint, sender in answer["missing"]
            ],
            *([bytes.fromhex(f) for f in answer[key]] for key in ("repairs", "unacknowledged")),
            possibly=[bytes.fromhex(f) for f in answer["possibly"]],
        )

    def state(self) -> JsState:
        """What it keeps now."""
        answer = self.node.call(op="state", peer=self.name)
        return JsState(
            int(answer["lamport"]),
            answer["log"],
            answer["incoming"],
            answer["outgoing"],
            bytes.fromhex(answer["filter"]),
        )

    def ids_of(self, event: str) -> list[Any]:
        """The details of all events with this name so far."""
        return [detail for name, detail in self.events if name == event]

    @property
    def delivered(self) -> list[str]:
        """The IDs that it delivered, in order, repeats included."""
        return self.ids_of("sds:in:message-delivered")

    def _call(self, op: str, **given: Any) -> dict[str, Any]:
        answer = self.node.call(op=op, peer=self.name, **given)
        self.events.extend((name, detail) for name, detail in answer["events"])
        return answer


class JsWaku:
    """A node process with js-waku participants in it."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self._opened = 0

    def clock(self, now_ms: int) -> None:
        """Set what js-waku reads as the time."""
        self._node.call(op="clock", now_ms=now_ms)

    def open(self, channel_id: str, sender_id: str, **options: Any) -> JsPeer:
        """A new participant; `options` as in js-waku's `MessageChannelOptions`."""
        self._opened += 1
        name = f"{sender_id}-{self._opened}"
        self._node.call(op="open", peer=name, channel=channel_id, sender=sender_id, options=options)
        return JsPeer(self._node, name)

    def bloom(self, message_ids: Sequence[str]) -> bytes:
        """The filter that contains these IDs, as js-waku writes it."""
        return bytes.fromhex(self._node.call(op="bloom", ids=list(message_ids))["filter"])


@contextmanager
def js_waku() -> Iterator[JsWaku]:
    """js-waku until the block ends; the first run installs it."""
    with node_process(node_project(PROJECT) / "peer.mjs") as process:
        yield JsWaku(process)
