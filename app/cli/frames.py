"""Files of messages: length-delimited protobuf and NDJSON, read and written as streams.

Length-delimited is what protobuf's own libraries write (`writeDelimitedTo`): a varint, then so many
bytes of frame, again and again. NDJSON is one message a line, as the node's JSON has it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.delimited import BadItem, DelimitedReader, delimited
from app.errors import Problem
from app.ingest.jsonitem import read_json_item
from app.ingest.records import Publication
from sdstore.sds.codec import decode
from sdstore.sds.digest import entry_digest
from sdstore.sds.jsonform import to_json

LINE_BYTES_MAX = 4 << 20  # a frame of 1 MiB as JSON is 1.4 MiB, its hints and names a little more
NDJSON_SUFFIXES = {".ndjson", ".jsonl", ".json"}

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
    return FileFormat.NDJSON if path.suffix in NDJSON_SUFFIXES else FileFormat.PROTOBUF


class MessageFile:
    """The messages of a stream in order, and a BadItem for each that is none.

    `position` is the byte behind the last item that was given; a stream that can be rewound may be
    read from there on.
    """

    def __init__(self, stream: Stream, file_format: FileFormat, frame_bytes_max: int) -> None:
        self.position = stream.tell() if stream.seekable() else 0
        self._stream = stream
        self._format = file_format
        self._frame_bytes_max = frame_bytes_max

    def __iter__(self) -> Iterator[Publication | BadItem]:
        if self._format is FileFormat.AUTO:
            # A frame of 123 bytes starts a protobuf file with "{" too, but no quote follows it.
            is_json = self._stream.peek(2)[:2] in (b'{"', b"{ ")
            self._format = FileFormat.NDJSON if is_json else FileFormat.PROTOBUF
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
            if line.strip():
                yield _item_of_line(line)

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
