"""What the processes that share one PostgreSQL database tell each other at once, without reading it.

Three kinds of notices: a frame to relay, that messages of some channels were committed, and that a process
is there. Notices are best effort: one that is lost costs a relayed message, or makes a commit known at
the next poll only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import orjson

from app.server.limits import Limits

COMMIT_PAUSE_S = 0.02
"""The shortest time between two sendings; commits and frames of that time travel together."""

CHANNELS_BYTES_MAX = 4_096
"""Bytes of channel IDs in a notice of a commit; one with more names none, which means any."""

_FRAME, _WAY, _COMMIT, _PUSHED, _PRESENCE = b"f", b"w", b"c", b"p", b"l"


class Presence(NamedTuple):
    """A process that is there, and is about to stop if `is_leaving`.

    `settings_peers`: the IDs of the peers of its settings. `reads`: the instance IDs of the stores whose
    streams it reads.
    """

    process: str
    settings_peers: Sequence[str]
    reads: Sequence[str]
    is_leaving: bool = False


class Listener(Protocol):
    """Takes the notices of other processes."""

    def on_notified_frame(self, frame: bytes, origin: str, via: bytes) -> None:
        """A frame to relay; `origin` and `via` as in `app.live.relay`."""

    def on_notified_commit(self, channels: Collection[str] | None, source: str) -> None:
        """Messages of these channels were committed; None: of any.

        `source` as in `app.ingest.committer.Committed`, if all have the same; otherwise empty.
        """

    def on_notified_presence(self, presence: Presence) -> None:
        """A process announces itself."""


class Bus(Protocol):
    """Sends notices to the other processes. No method waits.

    `dropped_count`: frames that were not sent, because too many waited.
    """

    @property
    def dropped_count(self) -> int: ...

    def send_frame(self, frame: bytes, origin: str, via: bytes = b"") -> None:
        """See `Listener`."""

    def send_commit(self, channels: Collection[str] | None, source: str = "") -> None:
        """See `Listener`."""

    def send_presence(self, presence: Presence) -> None:
        """See `Listener`."""


class NoBus:
    """The bus of a process that shares its database with no other."""

    dropped_count = 0

    def send_frame(self, frame: bytes, origin: str, via: bytes = b"") -> None:
        """Nobody listens."""

    def send_commit(self, channels: Collection[str] | None, source: str = "") -> None:
        """Nobody listens."""

    def send_presence(self, presence: Presence) -> None:
        """Nobody listens."""


class Outgoing:
    """Notices that wait to be sent: a bounded queue of frames, one notice of all commits, one presence."""

    def __init__(self, limits: Limits) -> None:
        self.dropped_count = 0
        self._limits = limits
        self._frames: deque[bytes] = deque()
        self._frames_bytes = 0
        self._has_commit = False
        self._channels: set[str] | None = set()
        self._source = ""
        self._presence = b""
        self._filled = asyncio.Event()

    def send_frame(self, frame: bytes, origin: str, via: bytes = b"") -> None:
        """See `Bus`. The oldest frames are dropped where too many wait."""
        name = origin.encode()
        notice = _FRAME + bytes([len(name)]) + name + frame
        if via:
            notice = _WAY + len(via).to_bytes(2, "big") + via + notice
        self._frames.append(notice)
        self._frames_bytes += len(notice)
        while (
            len(self._frames) > self._limits.relay_queue_items_max
            or self._frames_bytes > self._limits.relay_queue_bytes_max
        ):
            self._frames_bytes -= len(self._frames.popleft())
            self.dropped_count += 1
        self._filled.set()

    def send_commit(self, channels: Collection[str] | None, source: str = "") -> None:
        """See `Bus`. Commits that wait share one notice."""
        self._source = source if source == self._source or not self._has_commit else ""
        self._has_commit = True
        if channels is None:
            self._channels = None
        elif self._channels is not None:
            self._channels.update(channels)
            if sum(map(len, self._channels)) > CHANNELS_BYTES_MAX // 4:
                self._channels = None
        self._filled.set()

    def send_presence(self, presence: Presence) -> None:
        """See `Bus`. A newer one takes the place of one that waits."""
        self._presence = _PRESENCE + orjson.dumps(list(presence))
        self._filled.set()

    async def next(self, bytes_max: int) -> list[bytes]:
        """The next notices, up to `bytes_max` bytes, but one at least."""
        await self._filled.wait()
        notices: list[bytes] = []
        bytes_count = 0
        if self._has_commit:
            channels = None if self._channels is None else sorted(self._channels)
            if self._source:
                notices.append(_PUSHED + orjson.dumps([self._source, channels]))
            else:
                notices.append(_COMMIT + orjson.dumps(channels))
            self._has_commit, self._channels = False, set()
        if self._presence:
            notices.append(self._presence)
            self._presence = b""
        while self._frames and (not notices or bytes_count + len(self._frames[0]) <= bytes_max):
            notice = self._frames.popleft()
            self._frames_bytes -= len(notice)
            bytes_count += len(notice)
            notices.append(notice)
        if not self._frames:
            self._filled.clear()
        return notices


def hand_over(notice: bytes, listener: Listener) -> bool:
    """Give a notice to the listener; False if it is not a notice."""
    kind, rest = notice[:1], notice[1:]
    via = b""
    if kind == _WAY:
        length = 2 + int.from_bytes(rest[:2], "big")
        via, kind, rest = rest[2:length], rest[length : length + 1], rest[length + 1 :]
    if kind == _FRAME and rest:
        length = 1 + rest[0]
        listener.on_notified_frame(rest[length:], rest[1:length].decode("ascii", "replace"), via)
        return True
    try:
        document = orjson.loads(rest)
    except orjson.JSONDecodeError:
        return False
    match kind, document:
        case (b"c", None | [*_] as channels) if _are_texts(channels):
            listener.on_notified_commit(channels, "")
        case (b"p", [str() as source, None | [*_] as channels]) if _are_texts(channels):
            listener.on_notified_commit(channels, source)
        case (b"l", [str() as process, [*_] as peers, [*_] as reads, bool() as is_leaving]) if (
            _are_texts(peers) and _are_texts(reads)
        ):
            listener.on_notified_presence(Presence(process, peers, reads, is_leaving))
        case _:
            return False
    return True


def _are_texts(channels: list[object] | None) -> bool:
    return all(isinstance(each, str) for each in channels or ())
