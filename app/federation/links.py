"""Links: one long-lived connection to each peer of this node, for nudges and relayed messages.

Down the link comes the peer's stream `GET /v1/relay`: `nudge` (something arrived there that this node
may read; no content), `relayed` (one frame) and `reading` (whether the peer reads this node's stream).
Up the link go the relayed messages of this node, in batches to `POST /v1/relay`, unless the peer reads
this node's stream anyway. So a pair hears each other whichever of the two has the other as its peer.

A link that breaks is opened again after a pause that doubles, with jitter. What a peer sends is taken at
a bounded rate, one small piece at a time, between which others are served: a peer that floods waits in
its own connection.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

import httpx
import orjson
import zstandard

from app.errors import Code, Problem
from app.federation.client import url_text
from app.federation.peer import Peer
from app.federation.peers import Peers
from app.live.relay import Passing, Presence, Relay, RelayReader
from app.server.limits import Limits
from app.server.supervisor import Supervisor, ended
from sdstore.client.exchange import CONNECT_TIMEOUT_S, network_reason
from sdstore.client.live import EventReader, ServerEvent
from sdstore.client.transport import (
    BUSY_STATUS,
    ERROR_BODY_BYTES_MAX,
    INSTANCE_HEADER,
    PROTOBUF,
)
from sdstore.errors import StoreError, error_of_reply
from sdstore.sync.report import SyncError, misbehaved
from sdstore.wire import store_pb2 as wire

LOOK_S = 0.5
"""From one look at the list of peers to the next; a new one gets its link after this at the latest."""

RETRY_S_MIN = 1.0
RETRY_JITTER = 0.5  # nodes that lost the same peer do not come back together
STEADY_S = 10.0  # after this time the pause before the next attempt is short again
POST_S_MAX = 10.0  # an older message is of no use
EVENT_OVERHEAD = 1.5  # base64, and the names around it

WINDOW_BITS_MAX = 20
"""Of a compressed stream: 1 MiB of memory; a node of ours uses 17 bits."""

PACKED_PIECE_BYTES = 256
"""Unpacked at once: 64 blocks of 128 KiB at most, so a peer can make this node hold 8 MiB."""

PARSED_PIECE_BYTES = 16 * 1024
"""Of the unpacked stream, parsed before others are served: empty lines cost most, 10 ms a piece."""

PARSING_SHARE = 0.1
"""Of a core, for parsing the stream of one peer, whatever it consists of."""

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class Links:
    """The links of a node. Call `start` before and `close` after use.

    `nudge` is called with the ID of a peer that has news, or may have some: its link is new.
    """

    def __init__(
        self,
        relay: Relay,
        peers: Peers,
        limits: Limits,
        instance_id: str,
        nudge: Callable[[str], None],
    ) -> None:
        self._relay = relay
        self._peers = peers
        self._limits = limits
        self._instance_id = instance_id
        self._nudge = nudge
        self._links: dict[str, tuple[Link, asyncio.Task[None]]] = {}
        self._watching: asyncio.Task[None] | None = None

    def start(self, supervisor: Supervisor) -> None:
        """Keep a link with each peer from now on."""
        self._watching = supervisor.keep("links", partial(self._watch, supervisor))

    async def close(self) -> None:
        """End all links."""
        await ended(self._watching, *(task for _, task in self._links.values()))
        self._links.clear()

    @property
    def count(self) -> int:
        """Links that are up."""
        return sum(link.is_up for link, _ in self._links.values())

    def reads(self, instance_id: str) -> bool:
        """Whether a process of this database has a link with the store of this instance ID."""
        return bool(instance_id) and (
            any(link.peer.instance == instance_id for link, _ in self._links.values())
            or self._peers.processes.reads(instance_id, asyncio.get_running_loop().time())
        )

    def on_presence(self, presence: Presence) -> None:
        """Another process of the database announces itself."""
        if self._peers.processes.heard(presence, asyncio.get_running_loop().time()):
            self._relay.wake()

    async def _watch(self, supervisor: Supervisor) -> None:
        while True:
            self._look(supervisor)
            await asyncio.sleep(LOOK_S)

    def _look(self, supervisor: Supervisor) -> None:
        wanted = {peer.peer_id: peer for peer in self._peers.held()}
        # Also where the peer was removed and added again, perhaps with another token.
        for peer_id in [
            each for each, (link, _) in self._links.items() if link.peer is not wanted.get(each)
        ]:
            self._links.pop(peer_id)[1].cancel()
        for peer_id, peer in wanted.items():
            if peer_id not in self._links:
                link = Link(peer, self._peers, self._relay, self._limits, self._instance_id)
                keeping = supervisor.keep("link", partial(link.keep, self._nudge))
                self._links[peer_id] = (link, keeping)


class Link:
    """The link with one peer; `Peer.instance` names the store at its other end."""

    def __init__(
        self,
        peer: Peer,
        peers: Peers,
        relay: Relay,
        limits: Limits,
        own_instance: str,
    ) -> None:
        self.is_up = False
        self.peer = peer
        self._peers = peers
        self._relay = relay
        self._limits = limits
        self._own_instance = own_instance
        self._is_read = False
        self._ahead_s = 0.0

    async def keep(self, nudge: Callable[[str], None]) -> None:
        """Keep the link up for as long as the task runs."""
        try:
            await self._keep(nudge)
        finally:
            self.peer.instance = ""

    async def _keep(self, nudge: Callable[[str], None]) -> None:
        failures = 0
        while True:
            began_s = time.monotonic()
            try:
                await self._connect(nudge)
            except (Problem, SyncError, StoreError) as error:
                reason = error.detail
            except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError) as error:
                reason = network_reason(error)
            except Exception as error:
                self._end(type(error).__name__)
                raise
            self._end(reason)
            failures = 1 if time.monotonic() - began_s > STEADY_S else failures + 1
            pause_s = min(RETRY_S_MIN * 2 ** min(failures - 1, 16), self._limits.relay_retry_s_max)
            await asyncio.sleep(pause_s * random.uniform(1 - RETRY_JITTER, 1))

    async def _connect(self, nudge: Callable[[str], None]) -> None:
        """Open the link, and work on it until it breaks."""
        silence_s_max = 3 * self._limits.live_heartbeat_s
        timeout = httpx.Timeout(silence_s_max, connect=CONNECT_TIMEOUT_S)
        headers = {
            "accept": "text/event-stream",
            "accept-encoding": "zstd",
            INSTANCE_HEADER: self._own_instance,
        }
        async with (
            self._peers.client(self.peer) as client,
            client.stream("GET", "v1/relay", headers=headers, timeout=timeout) as response,
        ):
            self._check(response, await _refusal(response))
            self._begin(response.headers.get(INSTANCE_HEADER, ""))
            # Nudges of the time without a link are lost.
            nudge(self.peer.peer_id)
            sending = asyncio.create_task(self._send(client))
            receiving = asyncio.create_task(self._receive(response, nudge))
            try:
                done, _ = await asyncio.wait(
                    {sending, receiving}, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
            finally:
                for task in (sending, receiving):
                    task.cancel()
                await asyncio.gather(sending, receiving, return_exceptions=True)

    def _check(self, response: httpx.Response, refusal: StoreError | None) -> None:
        if refusal is not None:
            raise refusal
        if response.headers.get(INSTANCE_HEADER) == self._own_instance:
            raise Problem(Code.PEER_URL_REFUSED, "this URL leads to this node itself")
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            raise misbehaved("the answer is not a stream of events")

    def _begin(self, instance: str) -> None:
        self.is_up, self._is_read, self._ahead_s = True, False, 0.0
        self.peer.meet(instance)
        _log.info("the link with %s is up", url_text(self.peer.url))
        self._peers.announce()
        self._relay.wake()

    def _end(self, reason: str) -> None:
        # The state of the peer reports why it cannot be reached; here only the end of a link is news.
        level = logging.INFO if self.is_up else logging.DEBUG
        _log.log(level, "the link with %s is down: %s", url_text(self.peer.url), reason)
        self.is_up, self.peer.instance = False, ""
        self._peers.announce()
        self._relay.wake()

    # ---- down the link

    async def _receive(self, response: httpx.Response, nudge: Callable[[str], None]) -> None:
        events = EventReader(int(EVENT_OVERHEAD * self._limits.frame_bytes_max))
        unpack = _unpacking(response.headers.get("content-encoding", "identity"))
        async for raw in response.aiter_raw():
            # Even a chunk that unpacks to nothing costs the HTTP client as much as an event.
            await self._pace(1 / self._limits.relay_messages_per_s)
            for piece in unpack(raw):
                began_s = time.thread_time()
                arrived = events.feed(piece)
                came = [each for event in arrived if (each := self._read(event, nudge)) is not None]
                parsing_s = time.thread_time() - began_s
                frames = [frame for frame, _ in came]
                if frames:
                    paths = [via for _, via in came]
                    await self._relay.take(frames, self.peer.instance, paths=paths)
                await self._pace(
                    max(
                        len(arrived) / self._limits.relay_messages_per_s,
                        sum(map(len, frames)) / self._limits.relay_bytes_per_s,
                        parsing_s / PARSING_SHARE,
                    )
                )
        raise misbehaved("the stream ended")

    def _read(self, event: ServerEvent, nudge: Callable[[str], None]) -> tuple[bytes, bytes] | None:
        """The frame of an event and its path, if it has one; the others are done at once."""
        match event.name:
            case "nudge":
                self._relay.counters.nudges_received += 1
                nudge(self.peer.peer_id)
            case "reading":
                self._is_read = _member(event, "is_read", bool)
            case "relayed":
                try:
                    frame = b64decode(_member(event, "frame", str), validate=True)
                except ValueError:
                    raise misbehaved("a frame that is not in base64") from None
                try:
                    return frame, bytes.fromhex(_member(event, "via", str, ""))
                except ValueError:
                    raise misbehaved("a path that is not in hex") from None
        return None  # also for an event of a later version

    async def _pace(self, cost_s: float) -> None:
        """Serve others, for as long as the peer is ahead of its share; it waits in its connection."""
        now_s = time.monotonic()
        # A share of one second can be used at once.
        self._ahead_s = max(self._ahead_s, now_s - 1) + cost_s
        await asyncio.sleep(max(0, self._ahead_s - now_s))

    # ---- up the link

    async def _send(self, client: httpx.AsyncClient) -> None:
        """Send what is relayed here, while the peer does not read this node's own stream."""
        relay, limits = self._relay, self._limits
        reader: RelayReader = relay.reader(_everything, self.peer.instance)
        while True:
            changed = relay.changed
            batch = reader.take(limits.relay_age_s, limits.relay_batch_items_max)
            if not batch:
                await changed.wait()
            elif not self._is_read:
                await self._post(client, batch)

    async def _post(self, client: httpx.AsyncClient, batch: list[Passing]) -> None:
        """Send one batch. If the peer is too busy for it, it is dropped and the next one waits."""
        body = wire.PublishBatch(
            items=[wire.PublishItem(frame=each.relayed.frame, via=each.via) for each in batch]
        ).SerializeToString()
        headers = {
            "content-type": PROTOBUF,
            "accept": PROTOBUF,
            INSTANCE_HEADER: self._own_instance,
        }
        try:
            async with (
                asyncio.timeout(POST_S_MAX),
                client.stream("POST", "v1/relay", content=body, headers=headers) as response,
            ):
                refusal = await _refusal(response)
        except TimeoutError:
            refusal = StoreError("request_timeout", httpx.codes.REQUEST_TIMEOUT, "no answer")
        if refusal is None:
            return
        self._relay.counters.dropped += len(batch)
        if refusal.status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            _log.warning(
                "%s takes no relayed messages of this node: %s",
                url_text(self.peer.url),
                refusal.detail,
            )
            # Its stream is still of use. A new token is tried with the next connection.
            await asyncio.Event().wait()
        if refusal.status not in BUSY_STATUS:
            raise refusal
        await asyncio.sleep(RETRY_S_MIN)


async def _refusal(response: httpx.Response) -> StoreError | None:
    """The peer's refusal; None if it answers. Reads a bounded part of the body."""
    if response.status_code == httpx.codes.OK:
        return None
    raw = b""
    async for chunk in response.aiter_raw(ERROR_BODY_BYTES_MAX):
        raw = chunk
        break
    return error_of_reply(response.status_code, response.headers, raw)


def _unpacking(encoding: str) -> Callable[[bytes], Iterable[bytes]]:
    """Unpacks the chunks of a stream, in pieces of bounded size; SyncError for damaged ones."""
    if encoding == "identity":
        return _pieces
    if encoding != "zstd":
        raise misbehaved(f"a stream in {encoding[:32]}, which this node did not request")
    unpacking = zstandard.ZstdDecompressor(max_window_size=1 << WINDOW_BITS_MAX).decompressobj()

    def unpack(raw: bytes) -> Iterator[bytes]:
        for at in range(0, len(raw), PACKED_PIECE_BYTES):
            try:
                unpacked = unpacking.decompress(raw[at : at + PACKED_PIECE_BYTES])
            except zstandard.ZstdError as error:
                raise misbehaved(f"a damaged stream ({error})") from None
            yield from _pieces(unpacked)

    return unpack


def _pieces(raw: bytes) -> Iterator[bytes]:
    for at in range(0, len(raw), PARSED_PIECE_BYTES):
        yield raw[at : at + PARSED_PIECE_BYTES]


def _member(event: ServerEvent, name: str, kind: type[_T], default: _T | None = None) -> _T:
    try:
        document = orjson.loads(event.data)
    except orjson.JSONDecodeError:
        document = None
    value = document.get(name, default) if isinstance(document, dict) else None
    if not isinstance(value, kind):
        raise misbehaved(f"an event {event.name[:32]!r} without a valid {name!r}")
    return value


def _everything(_channel_id: str) -> bool:
    return True
