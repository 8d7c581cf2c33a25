"""Participants on a driver, as tests run them: an application that reads events, and a faulty network."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, MutableSequence
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

import httpx

from sdstore.client import AsyncStoreClient, ClientOptions, Retry
from sdstore.participant.driver import DriverOptions, ParticipantChannel, ParticipantDriver
from sdstore.participant.events import ChannelEvent, Connection
from sdstore.participant.persistence import MemoryPersistence, Persistence
from sdstore.participant.stores import BackOff
from sdstore.sds.effects import Deliver
from sdstore.sds.options import ParticipantOptions

SECONDS_MAX = 60.0
QUICK_CLIENT = ClientOptions(timeout_s=10, retry=Retry(attempts_max=1))
QUICK = DriverOptions(back_off=BackOff(first_s=0.05, max_s=0.2), client=QUICK_CLIENT)
SMALL = ParticipantOptions(bloom=None, sync_ms=0)
"""Participants without filters and sync messages: only content brings news and acknowledgements."""


class Network(httpx.AsyncBaseTransport):
    """A transport that counts requests and can break.

    `counts` are requests by method and path. Nobody connects while `is_down`, or to a port in
    `ports_down`; `cut` breaks open connections. `answer` can answer in place of the store.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.is_down = False
        self.ports_down: set[int | None] = set()
        self.answer: Callable[[httpx.Request], httpx.Response | None] = lambda _: None
        self._cut = asyncio.Event()
        self._http = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.counts[f"{request.method} {request.url.path}"] += 1
        if self.is_down or request.url.port in self.ports_down:
            raise httpx.ConnectError("the network is down")
        given = self.answer(request)
        if given is not None:
            return httpx.Response(
                given.status_code, headers=given.headers, stream=httpx.ByteStream(given.content)
            )
        response = await self._http.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Cuttable(response.stream, self._cut)
        return response

    def cut(self) -> None:
        """Break all open connections."""
        self._cut.set()
        self._cut = asyncio.Event()

    async def aclose(self) -> None:
        await self._http.aclose()


class _Cuttable(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, cut: asyncio.Event) -> None:
        self._stream = stream
        self._cut = cut

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunks = aiter(self._stream)
        while (chunk := await self._next(chunks)) is not None:
            yield chunk

    async def _next(self, chunks: AsyncIterator[bytes]) -> bytes | None:
        chunk = asyncio.ensure_future(anext(chunks, None))
        cut = asyncio.create_task(self._cut.wait())
        try:
            await asyncio.wait({chunk, cut}, return_when=asyncio.FIRST_COMPLETED)
            if not chunk.done():
                raise httpx.ReadError("the connection was cut")
            return chunk.result()
        finally:
            chunk.cancel()
            cut.cancel()
            await asyncio.gather(chunk, cut, return_exceptions=True)

    async def aclose(self) -> None:
        await self._stream.aclose()


class InOrder(random.Random):
    """Draws the first of the ready stores, and the longest pauses."""

    def shuffle(self, x: MutableSequence[Any]) -> None:
        """Leave the order as it is."""

    def uniform(self, a: float, b: float) -> float:
        """The upper end."""
        return max(a, b)


class App:
    """An application in one channel: reads all events, confirms deliveries, keeps both.

    async with App.joined([url], "ada") as ada:
        await ada.channel.send(b"hello")
    """

    def __init__(
        self, driver: ParticipantDriver, channel: ParticipantChannel, confirms: bool
    ) -> None:
        self.driver = driver
        self.channel = channel
        self.events: list[ChannelEvent] = []
        self._confirms = confirms
        self._changed = asyncio.Event()

    @property
    def deliveries(self) -> list[Deliver]:
        return [each for each in self.events if isinstance(each, Deliver)]

    @property
    def texts(self) -> list[bytes]:
        return [each.message.content for each in self.deliveries]

    @property
    def is_online(self) -> bool:
        states = [each.state for each in self.events if isinstance(each, Connection)]
        return states[-1:] == ["online"]

    def of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.events if isinstance(each, kind)]

    async def read(self) -> None:
        async for event in self.channel.events():
            self.events.append(event)
            if isinstance(event, Deliver) and self._confirms:
                await self.channel.confirm(event.number)
            self._changed.set()

    async def ticks(self, count: int) -> None:
        """Wait until the driver has let the participant do so often what is due."""
        tick, done = self.channel.tick, asyncio.Event()
        left = iter(range(count - 1))

        def counted() -> None:
            tick()
            if next(left, None) is None:
                done.set()

        with patch.object(self.channel, "tick", counted):
            async with asyncio.timeout(SECONDS_MAX):
                await done.wait()

    async def until(self, condition: Callable[[Self], object]) -> None:
        """Wait for a condition; fails with the events so far."""
        try:
            async with asyncio.timeout(SECONDS_MAX):
                while not condition(self):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            shown = [each for each in self.events if not isinstance(each, Deliver)]
            raise AssertionError(f"{len(self.texts)} texts {self.texts[-5:]}, {shown}") from None


class joined:  # noqa: N801 - used like a function
    """An `App` in a channel until the block ends."""

    def __init__(
        self,
        urls: list[str],
        name: str,
        persistence: Persistence | None = None,
        *,
        channel_id: str = "garden",
        network: Network | None = None,
        confirms: bool = True,
        participant: ParticipantOptions = SMALL,
        options: DriverOptions = QUICK,
        is_online: bool = True,
        **driver: Any,
    ) -> None:
        connect = None
        if network is not None:
            connect = lambda url: AsyncStoreClient(  # noqa: E731
                url, options=options.client, transport=network
            )
        self._driver = ParticipantDriver(
            urls, persistence or MemoryPersistence(), options=options, connect=connect, **driver
        )
        self._join = (channel_id, name, participant)
        self._confirms = confirms
        self._is_online = is_online

    async def __aenter__(self) -> App:
        await self._driver.__aenter__()
        channel = await self._driver.join(*self._join)
        app = App(self._driver, channel, self._confirms)
        self._reading = asyncio.create_task(app.read())
        if self._is_online:
            await app.until(lambda app: app.is_online)
        return app

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._driver.__aexit__(exc_type, exc, traceback)
        await asyncio.gather(self._reading, return_exceptions=True)
