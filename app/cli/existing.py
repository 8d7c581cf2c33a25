"""Files of messages that are continued: what is there already, and appending to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from app.cli.delimited import BadItem
from app.cli.exits import CliError, Exit
from app.cli.frames import FileFormat, MessageFile
from app.ingest.prepare import Publication
from app.limits import DEFAULT_LIMITS

STDIO = Path("-")
_STDOUT = {STDIO, Path("/dev/stdout")}


def is_stdout(file: Path) -> bool:
    """Whether what goes to this file leaves no room on stdout for anything else."""
    return file in _STDOUT


def require_one_output(file: Path, *, as_json: bool) -> None:
    """Raises CliError where a document would end up among what goes to the file."""
    if is_stdout(file) and as_json:
        raise CliError(Exit.USAGE, "invalid_parameter", "--json and - both want stdout")


class ExistingMessages:
    """The messages of a file, read once; afterwards `end` is the byte behind the last whole one.

    What an interrupted writer left behind it does not count. Raises CliError where the file is
    damaged further up, or is something else.
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
    """The file behind its messages, on disk when the block ends; stdout for "-"."""
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
        target.flush()
        os.fsync(target.fileno())


def _seek_end(target: IO[bytes], file_format: FileFormat) -> None:
    """Go to the end; a last line that lacks its newline gets it."""
    size = target.seek(0, os.SEEK_END)
    if size and file_format is FileFormat.NDJSON:
        target.seek(size - 1)
        if target.read(1) != b"\n":
            target.write(b"\n")
