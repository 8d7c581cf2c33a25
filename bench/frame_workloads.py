"""Workloads for benchmarks of stores: realistic frames, made from a seed.

Message IDs are hexadecimal hashes, senders are addresses, filters have the size and the way of
growing that js-waku's have (10,000 IDs at an error rate of 1 in 1,000: 150,016 bits, 10 per ID).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from random import Random

from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message

FILTER_BYTES = 18_752
BITS_PER_ID = 10
LONG_HISTORY = 200
_START_MS = 1_763_000_000_000
_TEXT = """
about after again all also and any are back been before but call can come could day did does
down each find first for from get good had has have here how into its just know like long look
made make many may more most much must need new not now off one only other our out over part
people same say see she should some such take tell than that the their them then there they
thing think this time two under use very want was way well went were what when where which who
will with word work would write year you your
"""


def small_frames(
    count: int, *, channels: int = 20, seed: int = 1, history: int = 2
) -> Iterator[bytes]:
    """About 300 bytes each: a line of text and two references, in channels that take turns."""
    random = Random(seed)
    recent: list[deque[str]] = [deque(maxlen=history) for _ in range(channels)]
    for number in range(count):
        channel = random.randrange(channels)
        message_id = random.randbytes(32).hex()
        yield encode(
            Message(
                message_id,
                f"/app/1/room-{channel}/proto",
                sender_id=f"0x{random.randrange(50):040x}",
                lamport_timestamp=_START_MS + 1_000 * number + random.randrange(900),
                causal_history=tuple(map(HistoryEntry, recent[channel])),
                content=" ".join(random.choices(_TEXT.split(), k=10)).encode(),
            )
        )
        recent[channel].append(message_id)


def filter_frames(
    count: int, *, known: int = 0, history: int = 2, hints: bool = False, seed: int = 1
) -> Iterator[bytes]:
    """One conversation, each frame with the filter so far; `known` IDs are in it at the start.

    With two references 19 kB each, with `LONG_HISTORY` and hints 45 kB.
    """
    random = Random(seed)
    bits = bytearray(FILTER_BYTES)
    recent: deque[HistoryEntry] = deque(maxlen=history)
    for _ in range(known):
        _add_id(bits, random)
    for number in range(count):
        message_id = random.randbytes(32).hex()
        sender_id = f"0x{random.randrange(5):040x}"
        yield encode(
            Message(
                message_id,
                "/app/1/conversation/proto",
                sender_id=sender_id,
                lamport_timestamp=_START_MS + 1_000 * number + random.randrange(900),
                causal_history=tuple(recent),
                bloom_filter=bytes(bits),
                content=" ".join(random.choices(_TEXT.split(), k=10)).encode(),
            )
        )
        hint = random.randbytes(32) if hints else b""
        recent.append(HistoryEntry(message_id, hint, sender_id if hints else ""))
        _add_id(bits, random)


def _add_id(bits: bytearray, random: Random) -> None:
    for _ in range(BITS_PER_ID):
        bit = random.randrange(8 * FILTER_BYTES)
        bits[bit >> 3] |= 1 << (bit & 7)
