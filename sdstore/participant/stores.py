"""The stores of a `ParticipantDriver`: which of them to use next, and when to try a failed one again.

All work goes to one store, the home, which is drawn at random among the healthy ones; if it fails, another
one is drawn. All times are of a monotonic clock: a jump of the wall clock changes nothing.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sdstore.client.aio import AsyncStoreClient
from sdstore.client.errors import StoreError
from sdstore.client.exchange import without_password

NODE = "node"
"""The scope of a failure that concerns everything that a store does."""

PUBLISHING = "publishing"
"""The scope of a store that does not let this participant publish."""


def channel_scope(channel_id: str) -> str:
    """The scope of a store that does not serve a channel to this participant."""
    return f"channel {channel_id}"


@dataclass(frozen=True, slots=True)
class BackOff:
    """The pause before a failed store is tried again.

    It doubles from `first_s` to `max_s` and is drawn between half and all of it, so that participants
    do not return together. A longer `Retry-After` counts, up to `retry_after_max_s`.
    """

    first_s: float = 0.5
    max_s: float = 60.0
    retry_after_max_s: float = 300.0

    def pause_s(self, failures_count: int, error: StoreError, draw: random.Random) -> float:
        """The pause after so many failures in a row, the last of them `error`."""
        pause_s = min(self.max_s, self.first_s * 2.0 ** min(failures_count - 1, 30))
        asked_s = min(error.retry_after_s or 0.0, self.retry_after_max_s)
        return max(pause_s * draw.uniform(0.5, 1.0), asked_s)


class Store:
    """One store. Its health is kept per scope: a store that refuses one channel may serve others."""

    def __init__(self, url: str, client: AsyncStoreClient) -> None:
        self.name = without_password(url)  # for people and files
        self.client = client
        self.failures_count: dict[str, int] = {}
        self.retry_at_s: dict[str, float] = {}

    def ready_at_s(self, scope: str) -> float:
        """The time from which the store can be tried for `scope`."""
        retry_at_s = self.retry_at_s
        return max(retry_at_s.get(NODE, 0.0), retry_at_s.get(scope, 0.0))


class Stores:
    """See the module."""

    def __init__(
        self, stores: Sequence[Store], back_off: BackOff, draw: random.Random | None = None
    ) -> None:
        self.all = tuple(stores)
        self._back_off = back_off
        self._draw = draw or random.Random()
        self._home: Store | None = None
        self._changed = asyncio.Event()

    def ready(self, scope: str) -> list[Store]:
        """The stores that can be tried now, the home first, the others in random order."""
        now_s = time.monotonic()
        found = [store for store in self.all if store.ready_at_s(scope) <= now_s]
        self._draw.shuffle(found)
        # A home that only lacks this scope stays the home for the others.
        is_homeless = self._home is None or self._home.ready_at_s(NODE) > now_s
        if found and is_homeless:
            self._home = found[0]
        found.sort(key=lambda store: store is not self._home)
        return found

    async def choose(self, scope: str, among: Sequence[Store] | None = None) -> Store:
        """The home, or another store if the home does not serve `scope`; waits until one can be tried.

        `among`: only these.
        """
        allowed = self.all if among is None else among
        while not (found := [each for each in self.ready(scope) if each in allowed]):
            self._changed.clear()
            ready_at_s = min(store.ready_at_s(scope) for store in allowed)
            try:
                async with asyncio.timeout(max(ready_at_s - time.monotonic(), 0.001)):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return found[0]

    def failed(self, store: Store, scope: str, error: StoreError) -> None:
        """Leave the store alone for a while: for everything, if the error is not about `scope`."""
        if not concerns_the_request(error):
            scope = NODE
        count = store.failures_count[scope] = store.failures_count.get(scope, 0) + 1
        pause_s = self._back_off.pause_s(count, error, self._draw)
        store.retry_at_s[scope] = time.monotonic() + pause_s

    def succeeded(self, store: Store, scope: str) -> None:
        """Try the store at once from now on, and let the next pause be the first again."""
        for each in (NODE, scope):
            store.failures_count.pop(each, None)
            if store.retry_at_s.pop(each, None) is not None:
                self._changed.set()

    async def close(self) -> None:
        """Close the connections to all stores."""
        for store in self.all:
            await store.client.close()


def concerns_the_request(error: StoreError) -> bool:
    """Whether the store refused this request, and may accept others (4xx but 401, 408, 429)."""
    return 400 <= error.status < 500 and error.status not in (401, 408, 429)
