"""Frames written field by field, as no encoder would: any wire type, any length of a varint."""

VARINT, FIXED64, BYTES, GROUP, GROUP_END, FIXED32 = range(6)  # wire types


def varint(number: int, size: int = 0) -> bytes:
    """`number` as a varint of `size` bytes, or of as many as it needs."""
    out = bytearray()
    while number > 0x7F or len(out) + 1 < size:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def tag(number: int, wire_type: int, size: int = 0) -> bytes:
    """The tag of a field."""
    return varint(number << 3 | wire_type, size)


def field(number: int, value: bytes | int, tag_size: int = 0, value_size: int = 0) -> bytes:
    """One field: a varint for an integer, else length-delimited. `value_size` is that of the
    varint or of the length.
    """
    if isinstance(value, int):
        return tag(number, VARINT, tag_size) + varint(value, value_size)
    return tag(number, BYTES, tag_size) + varint(len(value), value_size) + value


def group(number: int, inside: bytes = b"", depth: int = 1) -> bytes:
    """`inside` in a group, in a group, … `depth` times."""
    return tag(number, GROUP) * depth + inside + tag(number, GROUP_END) * depth
