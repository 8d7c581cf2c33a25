"""Files of messages: length-delimited protobuf and NDJSON, read and written as streams.

Length-delimited is what protobuf's own libraries write (`writeDelimitedTo`): a varint, then so many
bytes of frame, again and again. NDJSON is one message a line, as the node's JSON has it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from app.cli.delimited import BadItem, DelimitedReader
from sdstore.client.records import PublishItem
from sdstore.sds.codec import MessageError, encode
from sdstore.sds.jsonform import from_json

LINE_BYTES_MAX = 4 << 20  # a frame of 1 MiB as JSON is 1.4 MiB, its hints and names a little more

if TYPE_CHECKING:
    # Generic for type checkers only.
    Stream = io.BufferedReader[Any]


class FileFormat(StrEnum):
    """How messages lie in a file."""

    AUTO = "auto"
    PROTOBUF = "protobuf"
    NDJSON = "ndjson"
    FRAME = "frame"


def read_items(
    stream: Stream, file_format: FileFormat, frame_bytes_max: int
) -> Iterator[PublishItem | BadItem]:
    """The messages of a file, in order, and a BadItem for each that is none."""
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


def _read_delimited(stream: Stream, frame_bytes_max: int) -> Iterator[PublishItem | BadItem]:
    for item in DelimitedReader(stream, frame_bytes_max):
        yield item if isinstance(item, BadItem) else PublishItem(item)


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
