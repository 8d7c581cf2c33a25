"""A program in a pseudo-terminal, and the screen that a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROWS, COLUMNS = 30, 100
# Ctrl-C is a signal only to the session whose terminal this is.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
_SEQUENCE = re.compile(r"\x1b\[(\d*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)|\x1b")


class Screen:
    """The part of a terminal that programs here use: text, CR, LF, home, up, down, erase; no wrapping."""

    def __init__(self) -> None:
        self.lines: list[str] = [""]  # all rows that there ever were
        self._row = self._column = 0

    def feed(self, text: str) -> None:  # noqa: C901 - a case per control sequence
        """Output of the program."""
        for count, command, control, plain in _SEQUENCE.findall(text):
            if plain:
                line = self.lines[self._row].ljust(self._column)
                end = self._column + len(plain)
                self.lines[self._row] = line[: self._column] + plain + line[end:]
                self._column = end
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._row += 1
                self.lines += [""] * (self._row + 1 - len(self.lines))
            elif command == "A":
                self._row = max(self._row - int(count or 1), len(self.lines) - ROWS, 0)
            elif command == "H":
                self._row, self._column = max(len(self.lines) - ROWS, 0), 0
            elif command == "B":
                self._row = min(self._row + int(count or 1), len(self.lines) - 1)
            elif command in "JK" and command:
                self.lines[self._row] = self.lines[self._row][: self._column]
                if command == "J":
                    del self.lines[self._row + 1 :]
            elif command != "m":
                raise AssertionError(f"unknown control sequence {count!r}{command!r}")


class Terminal:
    """A running program; its output is read by a thread."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        columns: int = COLUMNS,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.screen = Screen()
        self._controller, terminal = pty.openpty()
        self.resize(columns)
        own = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", _TAKE_TERMINAL, *command],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=folder,
            env={**own, "LANG": "C.UTF-8", "no_proxy": "*", **(environment or {})},
            start_new_session=True,
        )
        os.close(terminal)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        unread = b""
        while True:
            try:
                unread += os.read(self._controller, 65_536)
            except OSError:  # the program has ended
                return
            text = unread.decode(errors="ignore")
            complete = re.sub(r"\x1b(\[\d*)?$", "", text)
            self.screen.feed(complete)
            unread = text[len(complete) :].encode()

    def resize(self, columns: int) -> None:
        """Change the width of the window."""
        size = struct.pack("HHHH", ROWS, columns, 0, 0)
        fcntl.ioctl(self._controller, termios.TIOCSWINSZ, size)

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._controller, text.encode())

    def shows(self, pattern: str) -> bool:
        """Whether a row matches the regular expression."""
        return any(re.search(pattern, line) for line in list(self.screen.lines))

    def wait(self, *patterns: str, seconds: float = 20.0) -> None:
        """Wait until rows match all the patterns."""
        self.wait_until(lambda: all(map(self.shows, patterns)), seconds, repr(patterns))

    def wait_until(self, is_true: Callable[[], bool], seconds: float, wanted: str) -> None:
        """Wait; fails with the screen."""
        end = time.monotonic() + seconds
        while not is_true():
            if time.monotonic() > end:
                shown = "\n".join(self.screen.lines)
                raise AssertionError(f"{wanted} did not come within {seconds} s:\n{shown}")
            time.sleep(0.02)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.ended()

    def ended(self, seconds: float = 20.0) -> int:
        """Wait for the program's end; its exit status."""
        status = self.process.wait(seconds)
        self._reader.join(seconds)
        os.close(self._controller)
        return status
