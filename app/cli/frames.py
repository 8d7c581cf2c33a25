"""Files of messages: length-delimited protobuf and NDJSON, read and written as streams.

Length-delimited is what protobuf's own libraries write (`writeDelimitedTo`): a varint, then so many
bytes of frame, again and again. NDJSON is one message a line, as the node's JSON has it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sdstore.client.records import PublishItem
from sdstore.sds.codec import MessageError, encode
from sdstore.sds.jsonform import from_json

LINE_BYTES_MAX = 4 << 20  # a frame of 1 MiB as JSON is 1.4 MiB, its hints and names a little more
_VARINT_BYTES_MAX = 5  # lengths stay far below 2^35

if TYPE_CHECKING:
    # Generic for type checkers only.
    Stream = io.BufferedReader[Any]


class FileFormat(StrEnum):
    """How messages lie in a file."""

    AUTO = "auto"
    PROTOBUF = "protobuf"
    NDJSON = "ndjson"
    FRAME = "frame"


@dataclass(frozen=True, slots=True)
class BadItem:
    """Something in a file that is no message; `code` as in problem documents."""

    code: str
    detail: str


def read_items(
    stream: Stream, file_format: FileFormat, frame_bytes_max: int
) -> Iterator[PublishItem | BadItem]:
    """The messages of a file, in order. A frame is not decoded here: the node judges it.

    A file that cannot be read any further ends with a BadItem.
    """
    if file_format is FileFormat.AUTO:
        # A frame of 123 bytes starts a protobuf file with "{" too, but none goes on with a quote.
        is_json = stream.peek(2)[:2] in (b'{"', b"{ ")
        file_format = FileFormat.NDJSON if is_json else FileFormat.PROTOBUF
    if file_format is FileFormat.NDJSON:
        yield from _read_ndjson(stream)
    elif file_format is FileFormat.PROTOBUF:
        yield from _read_delimited(stream, frame_bytes_max)
    else:
        yield PublishItem(stream.read(frame_bytes_max + 1))


def delimited(frame: bytes) -> bytes:
    """A frame with its length before it."""
    length, prefix = len(frame), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + frame


def _read_delimited(stream: Stream, frame_bytes_max: int) -> Iterator[PublishItem | BadItem]:
    while stream.peek(1):
        length = _read_length(stream)
        if length is None or length > frame_bytes_max:
            yield BadItem("malformed_file", f"no length of a frame before byte {stream.tell()}")
            return
        frame = stream.read(length)
        if len(frame) < length:
            yield BadItem("truncated_file", f"the file ends {length - len(frame)} bytes early")
            return
        yield PublishItem(frame)


def _read_length(stream: Stream) -> int | None:
    length = 0
    for shift in range(0, 7 * _VARINT_BYTES_MAX, 7):
        byte = stream.read(1)
        if not byte:
            return None
        length |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return length
    return None


def _read_ndjson(stream: Stream) -> Iterator[PublishItem | BadItem]:
    while line := stream.readline(LINE_BYTES_MAX):
        if len(line) == LINE_BYTES_MAX:
            yield BadItem("malformed_file", f"a line is longer than {LINE_BYTES_MAX} bytes")
            return
        if line.strip():
            yield _item_of_line(line)


def _item_of_line(line: bytes) -> PublishItem | BadItem:
    try:
        document: Any = json.loads(line)
        hints = [bytes.fromhex(each) for each in document.get("retrieval_hints", ())]
        return PublishItem(encode(from_json(document.get("message"))), tuple(hints))
    except MessageError as error:
        return BadItem(error.code, error.detail)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        return BadItem("invalid_json_message", str(error))
