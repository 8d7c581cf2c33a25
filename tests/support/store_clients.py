"""Both clients behind one interface, so that every test runs on both."""

import asyncio
import inspect
from collections.abc import AsyncIterable, Callable, Iterator
from types import TracebackType
from typing import Any, Self

import httpx

from sdstore.client import AsyncStoreClient, StoreClient


class EitherClient:
    """Calls a client's methods and gives back plain results; iterators are read to their end."""

    def __init__(self, client: StoreClient | AsyncStoreClient) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **kwargs: self._plain(method(*args, **kwargs))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._plain(self._client.close())
        self._loop.close()

    def _plain(self, result: Any) -> Any:
        if isinstance(result, AsyncIterable):
            return self._loop.run_until_complete(_collected(result))
        if inspect.isawaitable(result):
            return self._loop.run_until_complete(_awaited(result))
        return list(result) if isinstance(result, Iterator) else result


def played_by(handler: Callable[[httpx.Request], httpx.Response]) -> httpx.MockTransport:
    """A transport whose answers come from `handler` and can still be streamed."""

    def answer(request: httpx.Request) -> httpx.Response:
        given = handler(request)
        stream = httpx.ByteStream(given.content)
        return httpx.Response(given.status_code, headers=given.headers, stream=stream)

    return httpx.MockTransport(answer)


async def _collected(items: AsyncIterable[Any]) -> list[Any]:
    return [item async for item in items]


async def _awaited(result: Any) -> Any:
    return await result
