"""A second decoder, written from docs/identity.md alone: no protobuf library, nothing of `sdstore`.

It is slow and plain, each function is a section of that document, and it is compared with
`sdstore.sds` on the published vectors and on generated frames.
"""

import struct
from dataclasses import dataclass, field

from blake3 import blake3

GROUPS_OPEN_MAX = 100


class RefusedError(Exception):
    """The frame is refused; `code` is that of section 1.5."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class MalformedError(Exception):
    """Bytes that break section 1.1."""


@dataclass(frozen=True)
class Field:
    """`value` is a number for wire type 0, bytes for wire type 2, nothing of use for others."""

    number: int
    wire_type: int
    value: int | bytes = b""


@dataclass(frozen=True)
class Entry:
    """An entry as found: its strings are not yet text."""

    message_id: bytes
    hint: bytes = b""
    sender: bytes = b""


@dataclass
class Decoded:
    """The contents of a frame. Strings are text."""

    dialect: str
    message_id: str = ""
    channel: str = ""
    sender: str = ""
    lamport: int | None = None
    history: list[tuple[str, bytes, str]] = field(default_factory=list)
    repair: list[tuple[str, bytes, str]] = field(default_factory=list)
    bloom: bytes = b""
    content: bytes = b""


# --- 1.1 From bytes to fields --------------------------------------------------------------------


def fields_of(data: bytes) -> list[Field]:
    """All fields of `data`, groups as fields of wire type 3."""
    found = []
    at = 0
    while at < len(data):
        number, wire_type, at = read_tag(data, at)
        if number == 0:
            raise MalformedError
        value, at = read_value(data, at, number, wire_type, groups_open=0)
        found.append(Field(number, wire_type, value))
    return found


def read_varint(data: bytes, at: int, bytes_max: int) -> tuple[int, int]:
    number = 0
    for place in range(bytes_max):
        if at >= len(data):
            raise MalformedError
        byte = data[at]
        at += 1
        number += (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return number, at
    raise MalformedError


def read_tag(data: bytes, at: int) -> tuple[int, int, int]:
    tag, at = read_varint(data, at, 5)
    if tag >= 2**32:
        raise MalformedError
    return tag >> 3, tag & 7, at


def read_value(
    data: bytes, at: int, number: int, wire_type: int, groups_open: int
) -> tuple[int | bytes, int]:
    if wire_type == 0:
        value, at = read_varint(data, at, 10)
        return value % 2**64, at
    if wire_type == 2:
        length, at = read_varint(data, at, 5)
        if length >= 2**31:
            raise MalformedError
    elif wire_type == 1:
        length = 8
    elif wire_type == 5:
        length = 4
    elif wire_type == 3:
        return b"", skip_group(data, at, number, groups_open + 1)
    else:
        raise MalformedError
    if at + length > len(data):
        raise MalformedError
    return data[at : at + length], at + length


def skip_group(data: bytes, at: int, number: int, groups_open: int) -> int:
    if groups_open > GROUPS_OPEN_MAX:
        raise MalformedError
    while True:
        inner, wire_type, at = read_tag(data, at)
        if wire_type == 4:
            if inner != number:
                raise MalformedError
            return at
        _, at = read_value(data, at, inner, wire_type, groups_open)


def last_bytes(fields: list[Field], number: int) -> bytes:
    found = b""
    for each in fields:
        if each.number == number and each.wire_type == 2:
            assert isinstance(each.value, bytes)
            found = each.value
    return found


def last_varint(fields: list[Field], number: int) -> int | None:
    found = None
    for each in fields:
        if each.number == number and each.wire_type == 0:
            assert isinstance(each.value, int)
            found = each.value
    return found


def all_bytes(fields: list[Field], number: int) -> list[bytes]:
    return [
        each.value
        for each in fields
        if each.number == number and each.wire_type == 2 and isinstance(each.value, bytes)
    ]


# --- 1.3 Causal history and repair request -------------------------------------------------------


def is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def entry_fields(element: bytes) -> list[Field] | None:
    try:
        return fields_of(element)
    except MalformedError:
        return None


def is_strict(element: bytes) -> bool:
    fields = entry_fields(element)
    if fields is None:
        return False
    for each in fields:
        if each.number not in (1, 2, 3) or each.wire_type != 2:
            return False
    numbers = [each.number for each in fields]
    if len(numbers) != len(set(numbers)):
        return False
    message_id = last_bytes(fields, 1)
    return message_id != b"" and is_utf8(message_id)


def entry_of(element: bytes) -> Entry:
    fields = entry_fields(element)
    assert fields is not None
    return Entry(last_bytes(fields, 1), last_bytes(fields, 2), last_bytes(fields, 3))


def is_kept_of_a_later_version(element: bytes) -> bool:
    fields = entry_fields(element)
    return element[0] == 0x0A and fields is not None and last_bytes(fields, 1) != b""


def read_elements(elements: list[bytes], *, may_be_plain: bool) -> tuple[list[Entry], bool]:
    """The entries, and whether they were plain strings."""
    present = [element for element in elements if element != b""]
    if all(is_strict(element) for element in present):
        return [entry_of(element) for element in present], False
    if (
        may_be_plain
        and all(is_utf8(element) for element in present)
        and any(element[0] != 0x0A for element in present)
    ):
        return [Entry(element) for element in present], True
    return [entry_of(element) for element in present if is_kept_of_a_later_version(element)], False


# --- 1.2 Dialects --------------------------------------------------------------------------------


@dataclass
class Found:
    """The raw fields of a frame, before any value is interpreted."""

    dialect: str
    message_id: bytes
    channel: bytes
    sender: bytes
    varint: int | None
    history: list[Entry]
    repair: list[Entry]
    bloom: bytes
    content: bytes


def read_numbering(fields: list[Field]) -> Found:
    """The fields by the numbering that the frame tells."""
    repair, _ = read_elements(all_bytes(fields, 13), may_be_plain=False)
    if last_bytes(fields, 2) != b"":
        sender = last_bytes(fields, 1)
        is_from_field_7 = sender == b""
        if is_from_field_7:
            sender = last_bytes(fields, 7)
        history, is_plain = read_elements(all_bytes(fields, 11), may_be_plain=True)
        if is_plain:
            dialect = "v1"
        elif is_from_field_7 and sender != b"":
            dialect = "chat_proto"
        else:
            dialect = "v2"
        return Found(
            dialect,
            message_id=last_bytes(fields, 2),
            channel=last_bytes(fields, 3),
            sender=sender,
            varint=last_varint(fields, 10),
            history=history,
            repair=repair,
            bloom=last_bytes(fields, 12),
            content=last_bytes(fields, 20),
        )
    if last_varint(fields, 2) is not None:
        history, _ = read_elements(all_bytes(fields, 3), may_be_plain=True)
        return Found(
            "nim",
            message_id=last_bytes(fields, 1),
            channel=last_bytes(fields, 4),
            sender=last_bytes(fields, 7),
            varint=last_varint(fields, 2),
            history=history,
            repair=repair,
            bloom=last_bytes(fields, 6),
            content=last_bytes(fields, 5),
        )
    raise RefusedError("missing_message_id")


# --- 1.4 Values, 1.5 Refusals --------------------------------------------------------------------


def decode(frame: bytes) -> Decoded:
    """The message in `frame`; `RefusedError` with the code of the first line that fits."""
    try:
        fields = fields_of(frame)
    except MalformedError:
        raise RefusedError("malformed_frame") from None
    found = read_numbering(fields)

    lamport = found.varint
    if lamport is not None and lamport >= 2**63:
        lamport -= 2**64
    refuse(found, lamport)
    return Decoded(
        found.dialect,
        found.message_id.decode(),
        found.channel.decode(),
        found.sender.decode(),
        lamport,
        [(entry.message_id.decode(), entry.hint, entry.sender.decode()) for entry in found.history],
        [(entry.message_id.decode(), entry.hint, entry.sender.decode()) for entry in found.repair],
        found.bloom,
        found.content,
    )


def refuse(found: Found, lamport: int | None) -> None:
    """Lines 3 to 8 of section 1.5, one after the other."""
    strings = [found.message_id, found.channel, found.sender]
    entries = found.history + found.repair
    entry_strings = [s for entry in entries for s in (entry.message_id, entry.sender)]
    if not all(is_utf8(string) for string in strings + entry_strings):
        raise RefusedError("invalid_utf8")
    if found.message_id == b"":
        raise RefusedError("missing_message_id")
    if any(b"\0" in string for string in strings):
        raise RefusedError("nul_character")
    if found.content == b"" and lamport is None:
        raise RefusedError("no_content_no_lamport")
    if lamport is not None and lamport < -(2**31):
        raise RefusedError("lamport_out_of_range")
    if any(b"\0" in string for string in entry_strings):
        raise RefusedError("nul_character")


# --- 2 Digest ------------------------------------------------------------------------------------


def layout(message: Decoded) -> bytes:
    """The bytes that the digest hashes."""

    def counted(data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + data

    out = counted(message.message_id.encode())
    out += counted(message.channel.encode())
    out += counted(message.sender.encode())
    if message.lamport is None:
        out += bytes(9)
    else:
        out += b"\x01" + struct.pack(">q", message.lamport)
    out += len(message.history).to_bytes(4, "big")
    for message_id, hint, sender in message.history:
        out += counted(message_id.encode()) + counted(hint) + counted(sender.encode())
    return out + counted(message.content)


def digest(message: Decoded) -> bytes:
    """The 32 bytes that name the entry."""
    return blake3(layout(message), derive_key_context="sdstore entry digest v1").digest()
