"""Files of messages, read and written as streams: length-delimited protobuf, NDJSON, one bare frame.

Length-delimited is the format of protobuf's own libraries (`writeDelimitedTo`): a varint, then as many
bytes of frame, repeated. NDJSON has one message per line, in the form of the node's JSON.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from app.cli.output import CliError, Exit
from app.errors import Code, Problem
from app.ingest.prepare import Publication, read_json_item
from app.server.limits import DEFAULT_LIMITS
from sdstore.sds.codec import MessageError, decode, to_json
from sdstore.sds.model import entry_digest

if TYPE_CHECKING:
    Stream = io.BufferedReader[Any]


LINE_BYTES_MAX = 4 << 20  # a frame of 1 MiB is 1.4 MiB as JSON; hints and names take a little more
NDJSON_SUFFIXES = {".ndjson", ".jsonl", ".json"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A protobuf file whose first frame has 123 bytes begins with "{" too; there the first tag follows.
_NDJSON_BEGINNING = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\{(?![\n\x12])")


STDIO = Path("-")
_STDOUT = {STDIO, Path("/dev/stdout")}


class FileFormat(StrEnum):
    """The formats of a file of messages."""

    AUTO = "auto"
    PROTOBUF = "protobuf"
    NDJSON = "ndjson"
    FRAME = "frame"


def format_of_name(path: Path) -> FileFormat:
    """NDJSON if the file's suffix says so, otherwise protobuf."""
    is_ndjson = path.suffix.lower() in NDJSON_SUFFIXES
    return FileFormat.NDJSON if is_ndjson else FileFormat.PROTOBUF


def format_of_input(stream: Stream, path: Path, asked: FileFormat) -> FileFormat:
    """`asked`, or for AUTO the format that the stream's beginning or the file's name shows."""
    if asked is not FileFormat.AUTO:
        return asked
    if _NDJSON_BEGINNING.match(stream.peek(1)):
        return FileFormat.NDJSON
    return format_of_name(path)


# --- reading -------------------------------------------------------------------------------------


@contextmanager
def open_input(path: Path) -> Iterator[Stream]:
    """A file to read, or stdin for "-"."""
    if str(path) == "-":
        if sys.__stdin__ is None:
            raise CliError(Exit.USAGE, "cannot_read", "stdin is closed")
        yield cast("Stream", sys.stdin.buffer)
        return
    try:
        stream = path.open("rb")
    except OSError as error:
        detail = f"{path} cannot be read: {error.strerror}"
        raise CliError(Exit.USAGE, "cannot_read", detail) from None
    with stream:
        yield stream


def size_of(stream: Stream) -> int | None:
    """Bytes of a file; None for a pipe."""
    if not stream.seekable():
        return None
    start = stream.tell()
    end = stream.seek(0, os.SEEK_END)
    stream.seek(start)
    return end


@dataclass(frozen=True, slots=True)
class BadItem:
    """A part of a file that is not a message; `code` as in problem documents."""

    code: str
    detail: str


class MessageFile:
    """The messages of a stream in order, with a BadItem for each part that is not a message.

    `file_format` is not AUTO: see `format_of_input`. `position` is the byte behind the last item that
    was returned; a stream that can seek may be read from there later.
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
                detail = f"the line is longer than {LINE_BYTES_MAX:,} bytes"
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


def _item_of_line(line: bytes) -> Publication | BadItem:
    try:
        return read_json_item(line)
    except Problem as problem:
        return BadItem(problem.code, problem.detail)


# --- reading a delimited stream that may be damaged ----------------------------------------------
#
# The stream has no marks by which a reader finds its way back. Where a frame does not decode, either
# the frame or the length before it is damaged; in the second case everything behind it is misread.
# So the reader checks whether sound records follow; if not, it searches for the next place where they do.

READ_BYTES = 1 << 16
STEPS_LOOKED_AT = 4  # records ahead, so that one more damaged record among them does not matter
_BEGINNINGS = (b"\x0a", b"\x12")
_VARINT_BYTES_MAX = 5  # lengths stay far below 2^35


class _Record(NamedTuple):
    start: int
    end: int


class DelimitedReader:
    """The frames of a stream in order, with a BadItem for each damaged part.

    `position` is the byte of the stream behind the last item that was returned.
    """

    def __init__(self, stream: Stream, frame_bytes_max: int) -> None:
        self.position = 0
        self._stream = stream
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()

    def __iter__(self) -> Iterator[bytes | BadItem]:
        while self._has(1):
            item, end = self._first()
            self.position += end
            del self._buffer[:end]
            yield item

    def _first(self) -> tuple[bytes | BadItem, int]:
        """The first item of the buffer, and where it ends."""
        record = self._record(0)
        if record is None:
            return self._skipped()
        frame = bytes(self._buffer[record.start : record.end])
        fault = fault_of(frame)
        if fault is None:
            return frame, record.end
        return (fault, record.end) if self._in_step(record.end) else self._skipped()

    def _skipped(self) -> tuple[BadItem, int]:
        """The bytes up to the next place where records follow one another, or up to the end."""
        for at in range(1, self._frame_bytes_max + _VARINT_BYTES_MAX):
            if not self._has(at + 1):
                break
            if self._looks_like_record(at) and self._in_step(at):
                return BadItem("malformed_file", self._described(at)), at
        rest = len(self._buffer)
        while skipped := self._stream.read(READ_BYTES):
            rest += len(skipped)
        return BadItem("malformed_file", self._described(rest)), rest

    def _described(self, count: int) -> str:
        return f"the {count:,} bytes from byte {self.position:,} on are not a message"

    def _looks_like_record(self, at: int) -> bool:
        """A cheap test: in every dialect a frame begins with field 1 or 2, a string or bytes."""
        record = self._record(at)
        return record is not None and self._buffer[record.start : record.start + 1] in _BEGINNINGS

    def _in_step(self, at: int) -> bool:
        """Whether records follow one another from here, or to the end, and half of them are sound."""
        steps = sound = 0
        while steps < STEPS_LOOKED_AT and self._has(at + 1):
            record = self._record(at)
            if record is None:
                return False
            steps += 1
            sound += fault_of(bytes(self._buffer[record.start : record.end])) is None
            at = record.end
        return sound >= (steps + 1) // 2

    def _record(self, at: int) -> _Record | None:
        """The record at `at`; None unless a length and that many bytes are there."""
        length = 0
        for place in range(_VARINT_BYTES_MAX):
            if not self._has(at + place + 1):
                return None
            byte = self._buffer[at + place]
            length |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                start, end = at + place + 1, at + place + 1 + length
                fits = length <= self._frame_bytes_max and self._has(end)
                return _Record(start, end) if fits else None
        return None

    def _has(self, count: int) -> bool:
        """Whether the stream has that many more bytes; reads them into the buffer."""
        while len(self._buffer) < count:
            more = self._stream.read(max(READ_BYTES, count - len(self._buffer)))
            if not more:
                return False
            self._buffer += more
        return True


def fault_of(frame: bytes) -> BadItem | None:
    """Why a frame is not a message; None if it is one."""
    try:
        decode(frame)
    except MessageError as error:
        return BadItem(error.code, error.detail)
    return None


# --- writing -------------------------------------------------------------------------------------


def is_stdout(file: Path) -> bool:
    """Whether writing to this file is writing to stdout."""
    return file in _STDOUT


def require_one_output(file: Path, *, as_json: bool) -> None:
    """Raises CliError if both the messages and --json would be written to stdout."""
    if is_stdout(file) and as_json:
        raise CliError(
            Exit.USAGE,
            "invalid_parameter",
            f"--json and {file} would both write to stdout: give a file",
        )


def record_of(frame: bytes, hints: Sequence[bytes], file_format: FileFormat) -> bytes:
    """A message as a file holds it; only NDJSON has room for hints."""
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


def delimited(frame: bytes) -> bytes:
    """The frame behind its length."""
    length, prefix = len(frame), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + frame


class ExistingMessages:
    """The messages of a file, read once; afterwards `end` is the byte behind the last whole one.

    A part of a message at the end, which an interrupted writer left, is passed over. Raises CliError
    where the file is damaged before its end, or is not a file of messages.
    """

    def __init__(self, file: Path, file_format: FileFormat) -> None:
        self.file = file
        self.file_format = file_format
        self.end = 0

    def __iter__(self) -> Iterator[Publication]:
        if is_stdout(self.file) or not self.file.is_file():
            return
        bad: BadItem | None = None
        with self.file.open("rb") as stream:
            messages = MessageFile(stream, self.file_format, DEFAULT_LIMITS.frame_bytes_max)
            for item in messages:
                if bad is not None:
                    raise self._damaged(bad)
                if isinstance(item, BadItem):
                    bad = item
                else:
                    self.end = messages.position
                    yield item
        if bad is not None and self.end == 0:
            raise self._damaged(bad)

    def _damaged(self, bad: BadItem) -> CliError:
        return CliError(Exit.REFUSED, bad.code, f"{self.file} is damaged: {bad.detail}")


@contextmanager
def continued(existing: ExistingMessages) -> Iterator[IO[bytes]]:
    """The file, opened to append behind its messages and synced to disk at the end; or stdout."""
    file = existing.file
    if is_stdout(file):
        yield sys.stdout.buffer
        return
    if file.exists() and not file.is_file():  # a pipe or a device
        with file.open("wb") as target:
            yield target
        return
    with file.open("r+b" if file.exists() else "wb") as target:
        target.truncate(existing.end)
        _seek_end(target, existing.file_format)
        yield target
        write_through(target)


def write_through(target: IO[bytes]) -> None:
    """Flush a file to disk; a pipe or a device gets what was written."""
    target.flush()
    descriptor = target.fileno()
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fsync(descriptor)


def _seek_end(target: IO[bytes], file_format: FileFormat) -> None:
    """Go to the end; a last line without its newline gets it."""
    size = target.seek(0, os.SEEK_END)
    if size and file_format is FileFormat.NDJSON:
        target.seek(size - 1)
        if target.read(1) != b"\n":
            target.write(b"\n")
