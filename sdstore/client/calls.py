"""A call of the HTTP interface as a value: the request, and how to read its answer; and batches of frames.

Message IDs and channel IDs are arbitrary strings. They go into the query: a proxy might rewrite a path
that contains "", "..", "a/b" or "%".
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar
from urllib.parse import quote, urlencode

import httpx

from sdstore.client.records import PublishItem, WakuEnvelope
from sdstore.client.replies import Reply
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from sdstore.wire import store_pb2 as wire

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
EVENT_STREAM = "text/event-stream"

Order = Literal["log", "arrival"]
Direction = Literal["asc", "desc"]
MvdsMode = Literal["interactive", "batch"]
Query = str | int | Sequence[str] | None
"""A parameter of a query: none, one or several values."""
_Result_co = TypeVar("_Result_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Call(Generic[_Result_co]):
    """A request that is ready to be sent.

    `target` is relative to the node's address. `is_repeatable` says that sending it twice does
    the same as sending it once.
    """

    method: str
    target: str
    read: Callable[[Reply], _Result_co]
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    is_repeatable: bool = True

    def request(
        self, http: httpx.Client | httpx.AsyncClient, timeout: httpx.Timeout | None = None
    ) -> httpx.Request:
        """The request for httpx; `timeout` in place of the client's."""
        return http.build_request(
            self.method,
            self.target,
            content=self.body,
            headers=self.headers,
            timeout=timeout or http.timeout,
        )


def get(
    path: str, read: Callable[[Reply], _Result_co], accept: str = PROTOBUF, /, **query: Query
) -> Call[_Result_co]:
    """A reading call; parameters that are None are left out."""
    return Call("GET", _target(path, query), read, (("accept", accept),))


def post(
    path: str, read: Callable[[Reply], _Result_co], body: bytes, /, **query: Query
) -> Call[_Result_co]:
    """A call with a protobuf body, of those that can be repeated."""
    headers = (("accept", PROTOBUF), ("content-type", PROTOBUF))
    return Call("POST", _target(path, query), read, headers, body)


def send_json(
    method: str,
    path: str,
    read: Callable[[Reply], _Result_co],
    document: Mapping[str, object],
    *,
    is_repeatable: bool,
) -> Call[_Result_co]:
    """A call with a JSON body."""
    headers = (("accept", JSON), ("content-type", JSON))
    return Call(method, path, read, headers, json.dumps(document).encode(), is_repeatable)


def path_of(*parts: str) -> str:
    """A path whose parts after the first are IDs made by a node."""
    return "/".join((parts[0], *(quote(part, safe="") for part in parts[1:])))


def _target(path: str, query: Mapping[str, Query]) -> str:
    given = urlencode({k: v for k, v in query.items() if v is not None}, doseq=True)
    return f"{path}?{given}" if given else path


# --- frames to publish -------------------------------------------------------------------------------

Publishable = bytes | Message | PublishItem
"""A frame, a message (sent as a frame of the latest dialect), or a frame with hints."""

BATCH_ITEMS_MAX = 1_000
"""Larger batches gain little from group commit; nodes accept 10,000."""

BATCH_BYTES_MAX = 8 * 1024 * 1024
"""400 frames of js-waku's size; nodes accept 32 MiB. A larger frame is sent alone."""

_ITEM_OVERHEAD_BYTES = 16


class Batcher:
    """Collects items; `add` returns the batch when the next item does not fit into it."""

    def __init__(self, items_max: int = BATCH_ITEMS_MAX, bytes_max: int = BATCH_BYTES_MAX) -> None:
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._items: list[PublishItem] = []
        self._bytes = 0

    def add(self, item: Publishable) -> list[PublishItem]:
        """A full batch, or an empty list while there is room.

        `MessageError` for a message that is not valid.
        """
        if isinstance(item, Message):
            item = encode(item)
        if isinstance(item, bytes):
            item = PublishItem(item)
        size_bytes = _size_bytes(item)
        is_full = len(self._items) >= self._items_max or self._bytes + size_bytes > self._bytes_max
        full = self.rest() if is_full else []
        self._items.append(item)
        self._bytes += size_bytes
        return full

    def rest(self) -> list[PublishItem]:
        """Remove and return the waiting items."""
        items, self._items, self._bytes = self._items, [], 0
        return items


def batches(frames: Iterable[Publishable], batcher: Batcher) -> Iterator[list[PublishItem]]:
    """All frames in non-empty batches, in order."""
    for frame in frames:
        if full := batcher.add(frame):
            yield full
    if rest := batcher.rest():
        yield rest


def _size_bytes(item: PublishItem) -> int:
    hints_bytes = sum(map(len, item.retrieval_hints))
    return len(item.frame) + hints_bytes + _ITEM_OVERHEAD_BYTES * (1 + len(item.retrieval_hints))


def publish_item(item: PublishItem) -> wire.PublishItem:
    """A frame for a batch, as the interface has it."""
    return wire.PublishItem(
        frame=item.frame,
        retrieval_hints=item.retrieval_hints,
        waku=None if item.waku is None else _envelope(item.waku),
        without_quarantine=item.without_quarantine,
    )


def _envelope(waku: WakuEnvelope) -> wire.WakuEnvelope:
    return wire.WakuEnvelope(
        pubsub_topic=waku.pubsub_topic,
        content_topic=waku.content_topic,
        meta=waku.meta,
        timestamp_ns=waku.timestamp_ns,
    )
