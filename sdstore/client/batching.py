"""Cutting a stream of frames into batches of bounded size."""

from collections.abc import Iterable, Iterator

from sdstore.client.records import PublishItem
from sdstore.sds.codec import encode
from sdstore.sds.model import Message

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
