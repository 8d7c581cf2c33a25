"""Messages for the demo: conversations in every dialect, and frames of real implementations."""

from __future__ import annotations

import io
import random
from hashlib import sha256
from importlib.resources import files

from app.cli.files import DelimitedReader
from app.server.limits import DEFAULT_LIMITS
from sdstore.client.records import PublishItem
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, HistoryEntry, Message

# One channel per dialect; version 1 and chat_proto write 32-bit Lamport timestamps.
CHANNELS = {
    "/garden/1/weather/proto": (Dialect.V2, 1_767_225_600_000),
    "/garden/1/harvest/proto": (Dialect.V1, 1_700),
    "/garden/1/watering/proto": (Dialect.CHAT_PROTO, 4_200),
    "/garden/1/bees/proto": (Dialect.NIM, 1_767_225_600),
}
SENDERS = ("ada", "bert", "cleo", "dora", "emil")
_WORDS = (
    "rain", "sun", "beans", "after", "before", "the", "kale", "early", "late", "again",
    "bees", "fence", "south", "more", "less", "than", "frost", "tonight", "maybe", "ripe",
)  # fmt: skip


def conversation(count: int, seed: int) -> list[PublishItem]:
    """`count` messages over four channels, each with a retrieval hint its publisher knows."""
    chance = random.Random(seed)
    channels = [_Channel(name, *style) for name, style in CHANNELS.items()]
    return [chance.choice(channels).next(chance) for _ in range(count)]


def real_frames() -> list[PublishItem]:
    """Frames that js-waku, nim-sds and the official schemas wrote."""
    raw = files("app.demo").joinpath("frames.ldp").read_bytes()
    stream = io.BufferedReader(io.BytesIO(raw))
    frames = DelimitedReader(stream, DEFAULT_LIMITS.frame_bytes_max)
    return [PublishItem(frame) for frame in frames if isinstance(frame, bytes)]


class _Channel:
    """Writes one channel's messages, each naming the two before it."""

    def __init__(self, name: str, dialect: Dialect, lamport: int) -> None:
        self._name = name
        self._dialect = dialect
        self._lamport = lamport
        self._history: list[HistoryEntry] = []

    def next(self, chance: random.Random) -> PublishItem:
        self._lamport += chance.randint(1, 4)
        sender = chance.choice(SENDERS) if self._dialect is not Dialect.V1 else ""
        content = " ".join(chance.choices(_WORDS, k=chance.randint(3, 30))).encode()
        message_id = sha256(f"{self._name}{sender}{self._lamport}".encode() + content).hexdigest()
        frame = encode(
            Message(
                message_id=message_id,
                channel_id=self._name,
                sender_id=sender,
                lamport_timestamp=self._lamport,
                causal_history=tuple(self._history),
                content=content,
            ),
            self._dialect,
        )
        hint = sha256(b"waku" + frame).digest()
        self._history = [*self._history[-1:], self._entry(message_id, hint, sender)]
        return PublishItem(frame, (hint,))

    def _entry(self, message_id: str, hint: bytes, sender: str) -> HistoryEntry:
        if self._dialect is Dialect.V1:
            return HistoryEntry(message_id)
        return HistoryEntry(message_id, hint, sender)


def overlapping_halves(
    items: list[PublishItem], seed: int
) -> tuple[list[PublishItem], list[PublishItem]]:
    """Two parts that together hold everything: for stretches one node was away, or the other."""
    chance = random.Random(seed)
    left: list[PublishItem] = []
    right: list[PublishItem] = []
    at = 0
    while at < len(items):
        stretch = items[at : at + chance.randint(1, max(len(items) // 12, 1))]
        at += len(stretch)
        who = chance.choice(("left", "right", "both", "both"))
        left += stretch if who != "right" else []
        right += stretch if who != "left" else []
    return left, right
