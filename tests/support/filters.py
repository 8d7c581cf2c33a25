"""Frames of participants whose bloom filters roll over at different times, made from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from sdstore.sds.bloom import CAPACITY, KEPT_SHARE, BloomFilter
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message

_WORDS = ("about", "good", "have", "here", "little", "message", "never", "people", "right", "see")


def staggered_frames(count: int, senders: int, *, seed: int = 1) -> Iterator[bytes]:
    """One conversation of js-waku participants, 19 kB a frame; any of the senders writes next.

    All receive everything. A filter holds the newest 5,000 to 10,000 IDs: how many depends on when its
    owner's last rolled over.
    """
    random = Random(seed)
    filters = [BloomFilter() for _ in range(senders)]
    ids = [random.randbytes(32).hex() for _ in range(CAPACITY)]
    for bloom_filter in filters:
        bloom_filter.rebuild(ids[random.randrange(int(CAPACITY * KEPT_SHARE)) :])
    for number in range(count):
        sender = random.randrange(senders)
        message_id = random.randbytes(32).hex()
        yield encode(
            Message(
                message_id,
                "/app/1/conversation/proto",
                f"0x{sender:040x}",
                1_763_000_000_000 + 1_000 * number + random.randrange(900),
                tuple(HistoryEntry(each) for each in ids[-2:]),
                filters[sender].to_bytes(),
                content=" ".join(random.choices(_WORDS, k=10)).encode(),
            )
        )
        ids = [ids[-1], message_id]
        for bloom_filter in filters:
            bloom_filter.add(message_id)
            if bloom_filter.is_full:
                bloom_filter.roll_over()
