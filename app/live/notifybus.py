"""The bus of the processes that share a PostgreSQL database, on any host: LISTEN and NOTIFY.

They tell each other at once, without reading the database, three kinds of notices: a frame to relay, that
messages of some channels were committed, and that a process is there. Notices are best effort: one that is lost
costs a relayed message, or makes a commit known at the next poll only.

A payload of NOTIFY is text of less than 8,000 bytes, so a notice travels in base64, in numbered parts.
The parts of one notice are sent by one statement, so they arrive together, in order, or not at all. A
listening connection and a sending one are opened beside the pool's, and again when they break. A
connection pooler between the node and the server must hold sessions (PgBouncer: `session`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import orjson
import psycopg

from app.live.relay import Presence, Relay
from app.server.limits import Limits
from app.server.supervisor import Supervisor
from app.store.postgres import parameters_of

CHANNEL = "sdstore_bus"
"""The channel of NOTIFY; each database has its own."""

PART_CHARS = 7_800
"""Base64 in one payload. With the numbers before it a payload stays below 8,000 bytes."""

BATCH_BYTES_MAX = 1 << 20
"""Bytes of notices in one statement, unless one alone has more."""

RETRY_S = 1.0
"""From one attempt to connect to the next."""

REPORTED_AFTER_S = 60.0
"""From the first failed attempt to the line in the log: longer than a restart of the server."""

_SEND = """
SELECT pg_notify(%s, part)
FROM unnest(%s::text[]) WITH ORDINALITY AS parts(part, number)
ORDER BY number
"""
_NOTICE_BYTES_MAX = 2 << 20

COMMIT_PAUSE_S = 0.02
"""The shortest time between two sendings; commits and frames of that time travel together."""

CHANNELS_BYTES_MAX = 4_096
"""Bytes of channel IDs in a notice of a commit; one with more names none, which means any."""

_FRAME, _PATH, _COMMIT, _PUSHED, _PRESENCE = b"f", b"w", b"c", b"p", b"l"

_log = logging.getLogger(__name__)


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
        """The oldest frames are dropped where too many wait."""
        name = origin.encode()
        notice = _FRAME + bytes([len(name)]) + name + frame
        if via:
            notice = _PATH + len(via).to_bytes(2, "big") + via + notice
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
        """Commits that wait share one notice."""
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
        """A newer one takes the place of one that waits."""
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


def hand_over(notice: bytes, relay: Relay) -> bool:
    """Give a notice to the relay; False if it is not a notice."""
    kind, rest = notice[:1], notice[1:]
    via = b""
    if kind == _PATH:
        length = 2 + int.from_bytes(rest[:2], "big")
        via, kind, rest = rest[2:length], rest[length : length + 1], rest[length + 1 :]
    if kind == _FRAME and rest:
        length = 1 + rest[0]
        relay.on_notified_frame(rest[length:], rest[1:length].decode("ascii", "replace"), via)
        return True
    try:
        document = orjson.loads(rest)
    except orjson.JSONDecodeError:
        return False
    match kind, document:
        case (b"c", None | [*_] as channels) if _are_texts(channels):
            relay.on_notified_commit(channels, "")
        case (b"p", [str() as source, None | [*_] as channels]) if _are_texts(channels):
            relay.on_notified_commit(channels, source)
        case (b"l", [str() as process, [*_] as peers, [*_] as reads, bool() as is_leaving]) if (
            _are_texts(peers) and _are_texts(reads)
        ):
            relay.on_notified_presence(Presence(process, peers, reads, is_leaving))
        case _:
            return False
    return True


def _are_texts(channels: list[object] | None) -> bool:
    return all(isinstance(each, str) for each in channels or ())


class Parts:
    """Splits notices into payloads, and joins those of other processes again.

    A payload is `SENDER NUMBER PART PARTS BASE64`. The server delivers the payloads of a transaction
    together, so one notice at a time is incomplete.
    """

    def __init__(self) -> None:
        self._own = secrets.token_hex(8)
        self._numbers = count()
        self._begun = ""
        self._joined: list[str] = []

    def split(self, notice: bytes) -> list[str]:
        """The payloads of one notice. All differ: the server would send equal ones once."""
        text = b64encode(notice).decode()
        number = next(self._numbers)
        parts = -(-len(text) // PART_CHARS)
        return [
            f"{self._own} {number} {n} {parts} {text[n * PART_CHARS : (n + 1) * PART_CHARS]}"
            for n in range(parts)
        ]

    def join(self, payload: str) -> bytes | None:
        """The notice that ends with this payload; None while it is incomplete, and for garbage."""
        fields = payload.split(" ")
        if len(fields) != 5 or fields[0] == self._own:
            return None
        sender, number, part, parts, text = fields
        name = f"{sender} {number} {parts}"
        if part == "0":
            self._begun, self._joined = name, []
        if name != self._begun or part != str(len(self._joined)):
            self._begun, self._joined = "", []
            return None
        self._joined.append(text)
        if parts != str(len(self._joined)):
            if len(self._joined) * PART_CHARS > 2 * _NOTICE_BYTES_MAX:
                self._begun, self._joined = "", []
            return None
        joined, self._joined, self._begun = "".join(self._joined), [], ""
        try:
            return b64decode(joined, validate=True)
        except (Base64Error, ValueError):
            return None


class NotifyBus(Outgoing):
    """See the module. `dropped_count`: frames that were not sent, because too many waited."""

    def __init__(self, url: str, limits: Limits, relay: Relay) -> None:
        super().__init__(limits)
        self._parameters = parameters_of(url)
        self._relay = relay
        self._parts = Parts()
        self._listening = asyncio.Event()

    @asynccontextmanager
    async def running(self, supervisor: Supervisor) -> AsyncIterator[None]:
        """Listen and send while the block runs. It begins when the first LISTEN has been answered."""
        async with (
            supervisor.keeping("bus: listen", partial(self._kept, self._listen)),
            supervisor.keeping("bus: send", partial(self._kept, self._send)),
        ):
            await self._listening.wait()
            yield

    async def _kept(self, work: Callable[[psycopg.AsyncConnection[object]], object]) -> None:
        """Do `work` on a connection; on a new one whenever it breaks."""
        broken_since_s: float | None = None
        is_reported = False
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(**self._parameters) as connection:
                    if is_reported:
                        _log.info("processes of this database hear from each other again")
                    broken_since_s, is_reported = None, False
                    await work(connection)  # type: ignore[misc]
            except (psycopg.Error, OSError) as error:
                broken_since_s = broken_since_s or time.monotonic()
                # Readiness reports a database that is away.
                if not is_reported and time.monotonic() - broken_since_s > REPORTED_AFTER_S:
                    reason = " ".join(str(error).split())
                    _log.warning("processes of this database do not hear each other: %s", reason)
                    is_reported = True
            # Readers of the feed poll meanwhile, so the node starts and serves without the bus.
            self._listening.set()
            await asyncio.sleep(RETRY_S)

    async def _listen(self, connection: psycopg.AsyncConnection[object]) -> None:
        await connection.execute(f"LISTEN {CHANNEL}")
        self._listening.set()
        # Commits of the time without a connection.
        self._relay.on_notified_commit(None, "")
        async for notice in connection.notifies():
            whole = self._parts.join(notice.payload)
            if whole is not None and not hand_over(whole, self._relay):
                _log.warning("a notice on the channel %s is not of this service", CHANNEL)

    async def _send(self, connection: psycopg.AsyncConnection[object]) -> None:
        while True:
            notices = await self.next(BATCH_BYTES_MAX)
            payloads = [part for notice in notices for part in self._parts.split(notice)]
            await connection.execute(_SEND, [CHANNEL, payloads])
            await asyncio.sleep(COMMIT_PAUSE_S)
