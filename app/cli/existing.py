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
from app.ingest.records import Publication
from app.limits import DEFAULT_LIMITS

STDIO = Path("-")


class ExistingMessages:
    """The messages of a file, read once; afterwards `end` is the byte behind the last whole one.

    What an interrupted writer left behind it does not count. Raises CliError where the file is
    damaged further up, or is something else.
    """

    def __init__(self, file: Path, file_format: FileFormat) -> None:
        self.end = 0
        self._file = file
        self._format = file_format

    def __iter__(self) -> Iterator[Publication]:
        if not self._file.is_file():
            return
        bad: BadItem | None = None
        with self._file.open("rb") as stream:
            messages = MessageFile(stream, self._format, DEFAULT_LIMITS.frame_bytes_max)
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
        return CliError(Exit.REFUSED, bad.code, f"{self._file} is damaged: {bad.detail}")


@contextmanager
def continued(file: Path, end: int) -> Iterator[IO[bytes]]:
    """The file from `end` on, on disk when the block ends; stdout for "-"."""
    if file == STDIO:
        yield sys.stdout.buffer
        return
    with file.open("r+b" if file.exists() else "wb") as target:
        target.seek(end)
        target.truncate()
        yield target
        target.flush()
        os.fsync(target.fileno())
