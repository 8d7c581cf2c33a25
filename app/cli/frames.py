"""Files of messages: length-delimited protobuf and NDJSON, read and written as streams.

Length-delimited is what protobuf's own libraries write (`writeDelimitedTo`): a varint, then so many
bytes of frame, again and again. NDJSON is one message a line, as the node's JSON has it.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.delimited import BadItem, DelimitedReader, delimited
from app.errors import Code, Problem
from app.ingest.prepare import Publication, read_json_item
from sdstore.sds.codec import decode
from sdstore.sds.digest import entry_digest
from sdstore.sds.jsonform import to_json

LINE_BYTES_MAX = 4 << 20  # a frame of 1 MiB as JSON is 1.4 MiB, its hints and names a little more
NDJSON_SUFFIXES = {".ndjson", ".jsonl", ".json"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A frame of 123 bytes starts a protobuf file with "{" too; what follows there is its first tag.
_NDJSON_BEGINNING = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\{(?![\n\x12])")

if TYPE_CHECKING:
    # Generic for type checkers only.
    Stream = io.BufferedReader[Any]


class FileFormat(StrEnum):
    """How messages lie in a file."""

    AUTO = "auto"
    PROTOBUF = "protobuf"
    NDJSON = "ndjson"
    FRAME = "frame"


def format_of_name(path: Path) -> FileFormat:
    """The format that a file's name asks for: NDJSON by its suffix, else protobuf."""
    is_ndjson = path.suffix.lower() in NDJSON_SUFFIXES
    return FileFormat.NDJSON if is_ndjson else FileFormat.PROTOBUF


def format_of_input(stream: Stream, path: Path, asked: FileFormat) -> FileFormat:
    """The format asked for, or NDJSON by the file's name, else what the stream begins like."""
    if asked is not FileFormat.AUTO:
        return asked
    if _NDJSON_BEGINNING.match(stream.peek(1)):
        return FileFormat.NDJSON
    return format_of_name(path)


class MessageFile:
    """The messages of a stream in order, and a BadItem for each that is none.

    `file_format` is not AUTO: see `format_of_input`.

    `position` is the byte behind the last item that was given; a stream that can be rewound may be
    read from there on.
    """

    def __init__(self, stream: Stream, file_format: FileFormat, frame_bytes_max: int) -> None:
        self.position = stream.tell() if stream.seekable() else 0
        self._stream = stream
        self._format = file_format
        self._frame_bytes_max = frame_bytes_max

    def __iter__(self) -> Iterator[Publication | BadItem]:
        if self._format is FileFormat.NDJSON:
            return self._lines()
        return self._records() if self._format is FileFormat.PROTOBUF else self._whole()

    def _records(self) -> Iterator[Publication | BadItem]:
        start = self.position
        reader = DelimitedReader(self._stream, self._frame_bytes_max)
        for item in reader:
            self.position = start + reader.position
            yield item if isinstance(item, BadItem) else Publication(item)

    def _lines(self) -> Iterator[Publication | BadItem]:
        while line := self._stream.readline(LINE_BYTES_MAX):
            self.position += len(line)
            if len(line) == LINE_BYTES_MAX and not line.endswith(b"\n"):
                self._skip_line()
                detail = f"a line of more than {LINE_BYTES_MAX} bytes"
                yield BadItem(Code.FRAME_TOO_LARGE, detail)
            elif text := line.removeprefix(_BYTE_ORDER_MARK).strip():
                yield _item_of_line(text)

    def _skip_line(self) -> None:
        while part := self._stream.readline(LINE_BYTES_MAX):
            self.position += len(part)
            if part.endswith(b"\n"):
                return

    def _whole(self) -> Iterator[Publication | BadItem]:
        yield Publication(self._stream.read(self._frame_bytes_max + 1))


def record_of(frame: bytes, hints: Sequence[bytes], file_format: FileFormat) -> bytes:
    """A message as it lies in a file; only NDJSON has room for hints."""
    if file_format is not FileFormat.NDJSON:
        return delimited(frame)
    message, dialect = decode(frame)
    document: dict[str, Any] = {
        "message": to_json(message),
        "meta": {"digest": entry_digest(message).hex(), "dialect": dialect.label},
    }
    if hints:
        document["retrieval_hints"] = [each.hex() for each in hints]
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def _item_of_line(line: bytes) -> Publication | BadItem:
    try:
        return read_json_item(line)
    except Problem as problem:
        return BadItem(problem.code, problem.detail)
