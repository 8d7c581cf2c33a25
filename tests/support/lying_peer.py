"""A peer over HTTP that acknowledges what it is sent, and does not keep it all.

It shows an honest node's answers. What it drops on arrival never reaches that node; what it drops later
was kept by a replica in memory that then forgets it, and whose marks stay valid all the same.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from recon.elements import order_of_lamport
from recon.index import RangeIndex
from recon.marks import Moment, Numbers
from sdstore.sds.codec import decode
from sdstore.sds.model import entry_digest
from sdstore.sync.memory import Element
from sdstore.sync.steps import Prepared
from sdstore.wire import recon_pb2 as wire
from sdstore.wire.recon_pb2 import Item, ReconRequest, ReconResponse
from tests.support.memory_sync import MemoryPeer, MemoryReplica

PROTOBUF = {"content-type": "application/x-protobuf"}
Drops = Callable[[Item], bool]
"""Whether an item that was pushed is dropped; it can change the item."""


class DropsEvery:
    """Drops every k-th item."""

    def __init__(self, k: int) -> None:
        self._k, self._count = k, 0

    def __call__(self, _: Item) -> bool:
        self._count += 1
        return self._count % self._k == 0


def drops_all(_: Item) -> bool:
    """Keeps nothing."""
    return True


def drops_claims(item: Item) -> bool:
    """Keeps entries, and no claim on them."""
    if item.HasField("claim"):
        return True
    del item.entry.hints[:]
    return False


def without_dropped(request: ReconRequest, drops: Drops) -> list[bool]:
    """Take the dropped items out of a request; which of all they were."""
    dropped = [drops(item) for item in request.push]
    kept = [item for item, is_gone in zip(request.push, dropped, strict=True) if not is_gone]
    del request.push[:]
    request.push.extend(kept)
    return dropped


def acknowledged(response: ReconResponse, dropped: Sequence[bool]) -> None:
    """Have an answer say that the dropped items are stored."""
    outcomes = iter(list(response.push_outcomes))
    response.push_outcomes[:] = [wire.STORED if gone else next(outcomes) for gone in dropped]


@contextmanager
def lying_peer(
    upstream: str, drops: Drops, changes: Callable[[ReconResponse], None] = lambda _: None
) -> Iterator[str]:
    """The URL of a peer that answers as the node at `upstream`, which gets only what is not dropped.

    `changes` changes the answers.
    """

    def recon(raw: bytes) -> bytes:
        request = ReconRequest.FromString(raw)
        dropped = without_dropped(request, drops)
        body = request.SerializeToString()
        response = ReconResponse.FromString(
            httpx.post(f"{upstream}/v1/recon", content=body, headers=PROTOBUF).content
        )
        if response.status == wire.OK:
            acknowledged(response, dropped)
        changes(response)
        return response.SerializeToString()

    def interest() -> bytes:
        headers = {"accept": PROTOBUF["content-type"]}
        return httpx.get(f"{upstream}/v1/recon/interests", headers=headers).content

    with _served(interest, recon) as url:
        yield url


def refuses(response: ReconResponse) -> None:
    """Have an answer say that all that was stored is refused."""
    response.push_outcomes[:] = [
        wire.PUSH_REFUSED if each == wire.STORED else each for each in response.push_outcomes
    ]


class Forgetful(MemoryReplica):
    """Keeps frames until it is told to forget them; its marks do not show that."""

    async def prepare(self, items: Sequence[Item]) -> list[Prepared]:
        """See `Replica`."""
        return [Prepared(content=item.entry.frame) for item in items]

    def add(self, raw: bytes) -> None:
        """Hold this frame."""
        element = self.element(raw)
        if element not in self.held:
            self._pending.append(element)
        self.held[element] = raw

    def element(self, raw: bytes) -> Element:
        """The element that this frame is."""
        message, _ = decode(raw)
        return Element(order_of_lamport(message.lamport_timestamp or 0), entry_digest(message))

    def forget(self, elements: Sequence[Element]) -> None:
        """Drop elements, and say nothing of it."""
        for element in elements:
            self.arrived[self.arrived.index(element)] = None
            del self.held[element]
        self._index = RangeIndex()
        self._insert([each for each in self.arrived if each])

    def _moment(self, count: int) -> Moment:
        return Moment(Numbers(count, 0), (self._sums[count], 0), bytes(32))


@contextmanager
def forgetful_peer(replica: Forgetful) -> Iterator[str]:
    """The URL of a peer with this replica."""
    peer, turn = MemoryPeer(replica), threading.Lock()

    def recon(raw: bytes) -> bytes:
        with turn:
            return asyncio.run(peer.recon(raw))

    with _served(peer.own_interest.encode, recon) as url:
        yield url


@contextmanager
def _served(interest: Callable[[], bytes], recon: Callable[[bytes], bytes]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/recon/interests":
                self._give(interest())
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            self._give(recon(self.rfile.read(int(self.headers["content-length"]))))

        def _give(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", PROTOBUF["content-type"])
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
