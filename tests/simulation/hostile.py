"""An attacker in the channel: it overhears everything and sends what it likes."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from sdstore.sds import LAMPORT_MAX, Dialect, HistoryEntry, Message, decode, encode

DAY_MS = 86_400_000
OVERHEARD_MAX = 50


class Attacker:
    """Makes a few frames at a time, of one kind."""

    def __init__(self, random: Random, channel_id: str) -> None:
        self._random, self._channel_id = random, channel_id
        self._overheard: list[bytes] = []
        self._count = 0
        self._kinds = (
            self._noise,
            self._mutated,
            self._self_reference,
            self._cycle,
            self._orphans,
            self._saturated_filter,
            self._malformed_filter,
            self._far_clock,
            self._variant,
            self._long_history,
            self._forged_acknowledgement,
            self._sync_flood,
            self._repair_flood,
            self._impersonation,
            self._other_channel,
        )

    def overhears(self, frame: bytes) -> None:
        """Remember a frame, for later use."""
        self._overheard.append(frame)
        if len(self._overheard) > OVERHEARD_MAX:
            del self._overheard[self._random.randrange(OVERHEARD_MAX)]

    def frames(self) -> list[bytes]:
        """The frames of one attack."""
        made = self._random.choice(self._kinds)()
        return [each if isinstance(each, bytes) else encode(each) for each in made]

    # --- parts --------------------------------------------------------------------------------------
    def _id(self) -> str:
        self._count += 1
        return f"hostile {self._count}"

    def _sender(self) -> str:
        return self._random.choice(["", "mallory", f"mallory {self._random.randint(0, 99)}", "p0"])

    def _victim(self) -> Message | None:
        """A message of somebody else."""
        if not self._overheard:
            return None
        return decode(self._random.choice(self._overheard))[0]

    def _lamport(self) -> int:
        victim = self._victim()
        near = (victim and victim.lamport_timestamp) or 1_763_000_000_000
        return min(max(near + self._random.randint(-1_000, 1_000), 0), LAMPORT_MAX - 3 * DAY_MS)

    def _message(self, history: tuple[HistoryEntry, ...] = ()) -> Message:
        return Message(
            self._id(), self._channel_id, self._sender(), self._lamport(), history, content=b"spam"
        )

    # --- attacks ------------------------------------------------------------------------------------
    def _noise(self) -> list[bytes]:
        return [self._random.randbytes(self._random.randint(0, 60)) for _ in range(5)]

    def _mutated(self) -> list[bytes]:
        if not self._overheard:
            return []
        frame = bytearray(self._random.choice(self._overheard)[:2_000])
        for _ in range(self._random.randint(1, 3)):
            frame[self._random.randrange(len(frame))] = self._random.randrange(256)
        return [bytes(frame), bytes(frame[: self._random.randrange(len(frame))])]

    def _self_reference(self) -> list[Message]:
        message_id = self._id()
        return [replace(self._message((HistoryEntry(message_id),)), message_id=message_id)]

    def _cycle(self) -> list[Message]:
        ids = [self._id() for _ in range(self._random.randint(2, 4))]
        return [
            replace(self._message((HistoryEntry(ids[i - 1]),)), message_id=message_id)
            for i, message_id in enumerate(ids)
        ]

    def _orphans(self) -> list[Message]:
        return [
            self._message((HistoryEntry(f"never {self._id()}", b"hint", "p1"),))
            for _ in range(self._random.randint(1, 60))
        ]

    def _saturated_filter(self) -> list[Message]:
        return [replace(self._message(), bloom_filter=b"\xff" * size) for size in (8, 304, 18_752)]

    def _malformed_filter(self) -> list[Message]:
        absurd = b"\x0a\x08" + b"\xff" * 8 + b"\x10\x01\x18\x01\x20\xff\xff\xff\x0f\x28\x00"
        filters = (b"\x00", b"\xff" * 7, absurd, self._random.randbytes(200), b"\x0a\x00")
        return [replace(self._message(), bloom_filter=each) for each in filters]

    def _far_clock(self) -> list[Message]:
        now = self._lamport()
        return [
            replace(self._message(), lamport_timestamp=each)
            for each in (LAMPORT_MAX, now + DAY_MS - 60_000, now + 2 * DAY_MS, 0, -1, -(2**31))
        ]

    def _variant(self) -> list[Message]:
        victim = self._victim()
        if victim is None or not victim.content:
            return []
        lamport = (victim.lamport_timestamp or 0) + self._random.choice([-1, 0, 1])
        return [
            replace(victim, content=b"forged", lamport_timestamp=min(max(lamport, 0), LAMPORT_MAX))
        ]

    def _long_history(self) -> list[Message]:
        return [
            self._message(tuple(HistoryEntry(f"{self._id()} {n}") for n in range(count)))
            for count in (255, 256, 257, 3_000)
        ]

    def _forged_acknowledgement(self) -> list[Message]:
        victim = self._victim()
        if victim is None:
            return []
        history = (HistoryEntry(victim.message_id),)
        return [self._message(history), replace(self._message(history), content=b"")]

    def _sync_flood(self) -> list[Message]:
        history = tuple(HistoryEntry(f"never {self._id()}") for _ in range(200))
        return [replace(self._message(history), content=b"") for _ in range(5)]

    def _repair_flood(self) -> list[Message]:
        victim = self._victim()
        wanted = victim.message_id if victim else "nothing"
        asked = tuple(HistoryEntry(wanted, b"", sender) for sender in ("p0", "p1", "", "mallory"))
        many = tuple(HistoryEntry(f"{self._id()}", b"", "p0") for _ in range(200))
        return [
            replace(self._message(), content=b"", repair_request=each) for each in (asked, many)
        ]

    def _impersonation(self) -> list[Message]:
        victim = self._victim()
        return [replace(self._message(), sender_id=victim.sender_id if victim else "p0")]

    def _other_channel(self) -> list[bytes | Message]:
        victim = self._victim()
        ephemeral = replace(self._message(), lamport_timestamp=None)
        other = replace(victim or self._message(), channel_id="other")
        senderless = replace(self._message(), sender_id="")
        return [other, ephemeral, encode(senderless, Dialect.V1)]
