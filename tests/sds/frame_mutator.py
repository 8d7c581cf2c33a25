"""Frames that are nearly right: made and changed at the level of fields and wire types.

`frame(seed)` is a pure function of its seed. It composes a frame of either numbering, changes its
fields and those of its history's elements, and in some cases a few bytes at the end.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.support.frame_fields import (
    BYTES,
    FIXED32,
    FIXED64,
    GROUP,
    GROUP_END,
    VARINT,
    group,
    tag,
    varint,
)

_STRINGS = [
    *[b"", b"a", b"id", b"chan", "идент".encode(), b"0", b"i" * 64, b"i" * 127, b"i" * 128],
    *[b"i" * 300, b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"],
    *[b"\0", b"a\0b", b"\n", b"\n\x03abc", b"\n\x01a", b"\x12\x01h\n\x01a", b"\x1a\x01s", b"\x0b"],
]
_HONEST_STRINGS = [b"a", b"id", b"chan", "идент".encode(), b"i" * 64, b"i" * 128]
_INTEGERS = [
    *[0, 1, 5, 127, 128, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1],
    *[2**64 - 2**31, 2**64 - 2**31 - 1, 2**64 - 2**31 + 1, 2**64, 2**64 + 5, 2**70 - 1],
]
_NUMBERS = [*range(14), 19, 20, 20, 21, 15, 16, 2047, 2048, 19_000, 2**29 - 1]
_WIRE_TYPES = [*[VARINT, BYTES, FIXED64, GROUP, FIXED32] * 4, GROUP_END, 6, 7]
_SPEC = {"sender": 1, "id": 2, "channel": 3, "lamport": 10, "history": 11, "bloom": 12}
_NIM = {"sender": 7, "id": 1, "channel": 4, "lamport": 2, "history": 3, "bloom": 6}
_CONTENT = {"spec": 20, "nim": 5}


@dataclass(frozen=True)
class Part:
    """A field to be written. `value` holds parts where they are written into it: an element of a
    history, or a group."""

    number: int
    wire_type: int
    value: "bytes | int | tuple[Part, ...]"
    tag_size: int = 0
    value_size: int = 0

    def written(self) -> bytes:
        """The bytes of the field."""
        head = tag(self.number, self.wire_type, self.tag_size)
        value = self.value
        if isinstance(value, tuple):
            value = b"".join(part.written() for part in value)
        if self.wire_type == VARINT:
            return head + varint(value if isinstance(value, int) else len(value), self.value_size)
        if isinstance(value, int):
            value = varint(value)
        if self.wire_type == BYTES:
            return head + varint(len(value), self.value_size) + value
        if self.wire_type == FIXED64:
            return head + value[:8].ljust(8, b"\x08")
        if self.wire_type == FIXED32:
            return head + value[:4].ljust(4, b"\x08")
        if self.wire_type == GROUP:
            return head + value + tag(self.number, GROUP_END, self.value_size)
        return head + value


def frame(seed: int) -> bytes:
    """The frame of this seed."""
    rng = random.Random(seed)
    parts = _spec_parts(rng) if rng.random() < 0.65 else _nim_parts(rng)
    if rng.random() < 0.05:
        parts += _nim_parts(rng)
    for _ in range(rng.choice([0, 1, 1, 2, 3, 6])):
        parts = _changed(rng, parts)
    written = b"".join(part.written() for part in parts)
    return _with_other_bytes(rng, written) if rng.random() < 0.15 else written


def _spec_parts(rng: random.Random) -> list[Part]:
    return _parts(rng, _SPEC, _CONTENT["spec"], rng.choice([1, 1, 7]))


def _nim_parts(rng: random.Random) -> list[Part]:
    return _parts(rng, _NIM, _CONTENT["nim"], 7)


def _parts(rng: random.Random, numbers: dict[str, int], content: int, sender: int) -> list[Part]:
    parts = [Part(numbers["id"], BYTES, rng.choice(_HONEST_STRINGS))]
    if rng.random() < 0.7:
        parts.append(Part(numbers["channel"], BYTES, rng.choice(_HONEST_STRINGS)))
    if rng.random() < 0.6:
        parts.append(Part(sender, BYTES, rng.choice(_HONEST_STRINGS)))
    if rng.random() < 0.85:
        parts.append(Part(numbers["lamport"], VARINT, rng.choice(_INTEGERS[:12])))
    parts += _history(rng, numbers["history"])
    if rng.random() < 0.3:
        parts.append(Part(numbers["bloom"], BYTES, rng.randbytes(rng.randrange(9))))
    if rng.random() < 0.3:
        parts += _history(rng, 13)
    if rng.random() < 0.8:
        parts.append(Part(content, BYTES, rng.randbytes(rng.randrange(9))))
    return parts


def _history(rng: random.Random, number: int) -> list[Part]:
    makers: list[Callable[[random.Random], Part]] = [
        *[lambda rng: Part(number, BYTES, _entry(rng))] * 4,
        lambda rng: Part(number, BYTES, rng.choice(_STRINGS)),
    ]
    if rng.random() < 0.25:  # a history of plain strings
        makers = [lambda rng: Part(number, BYTES, rng.choice(_HONEST_STRINGS))]
    made = [rng.choice(makers)(rng) for _ in range(rng.choice([0, 0, 1, 1, 2, 3, 5]))]
    return [
        replace(part, value=tuple(_changed(rng, list(part.value))))
        if isinstance(part.value, tuple) and rng.random() < 0.2
        else part
        for part in made
    ]


def _entry(rng: random.Random) -> tuple[Part, ...]:
    parts = [Part(1, BYTES, rng.choice(_HONEST_STRINGS))]
    if rng.random() < 0.4:
        parts.append(Part(2, BYTES, rng.randbytes(rng.choice([0, 1, 32]))))
    if rng.random() < 0.4:
        parts.append(Part(3, BYTES, rng.choice(_HONEST_STRINGS)))
    if rng.random() < 0.1:
        rng.shuffle(parts)
    return tuple(parts)


def _changed(rng: random.Random, parts: list[Part]) -> list[Part]:
    """`parts` with one change."""
    parts = list(parts)
    at = rng.randrange(len(parts)) if parts else 0
    kind = rng.choice(["inside", "inside", *_CHANGES]) if parts else "insert"
    if kind == "inside" and isinstance(parts[at].value, tuple):
        inner = _changed(rng, list(parts[at].value))  # type: ignore[arg-type]
        parts[at] = replace(parts[at], value=tuple(inner))
    elif kind == "drop":
        del parts[at]
    elif kind == "repeat":
        parts.insert(rng.randrange(len(parts) + 1), parts[at])
    elif kind == "move":
        parts.insert(rng.randrange(len(parts)), parts.pop(at))
    elif kind in _FIELD_CHANGES:
        parts[at] = _FIELD_CHANGES[kind](rng, parts[at])
    else:
        parts.insert(rng.randrange(len(parts) + 1), _any_part(rng))
    return parts


def _other_value(rng: random.Random, part: Part) -> Part:
    if part.wire_type == VARINT:
        return replace(part, value=rng.choice(_INTEGERS))
    return replace(part, value=rng.choice(_STRINGS))


def _cut_value(rng: random.Random, part: Part) -> Part:
    """A value without its end; for a nested value, of the bytes that it is written as."""
    if isinstance(part.value, int):
        return part
    value = part.value
    if isinstance(value, tuple):
        value = b"".join(each.written() for each in value)
    return replace(part, value=value[: rng.randrange(len(value) + 1)])


_FIELD_CHANGES: dict[str, Callable[[random.Random, Part], Part]] = {
    "number": lambda rng, part: replace(part, number=rng.choice(_NUMBERS)),
    "wire type": lambda rng, part: replace(part, wire_type=rng.choice(_WIRE_TYPES)),
    "long tag": lambda rng, part: replace(part, tag_size=rng.choice([2, 3, 4, 5, 5, 5, 6])),
    "long value": lambda rng, part: replace(part, value_size=rng.choice([2, 3, 4, 5, 5, 6, 10])),
    "value": _other_value,
    "cut": _cut_value,
    "group": lambda rng, part: Part(rng.choice(_NUMBERS), GROUP, (part,)),
}
_CHANGES = ["drop", "repeat", "move", "insert", *_FIELD_CHANGES]


def _any_part(rng: random.Random) -> Part:
    number = rng.choice(_NUMBERS)
    wire_type = rng.choice(_WIRE_TYPES)
    if wire_type == VARINT:
        return Part(number, VARINT, rng.choice(_INTEGERS))
    if wire_type != GROUP:
        return Part(number, wire_type, rng.choice(_STRINGS))
    inside: tuple[Part, ...] = tuple(_any_part(rng) for _ in range(rng.randrange(3)))
    if rng.random() < 0.5:
        return Part(number, GROUP, inside)
    written = b"".join(part.written() for part in inside)
    return Part(number, GROUP, group(number, written, rng.choice([1, 2, 97, 98, 99, 100])))


def _with_other_bytes(rng: random.Random, written: bytes) -> bytes:
    data = bytearray(written)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 1 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 4))
        else:
            del data[at:]
    return bytes(data)
