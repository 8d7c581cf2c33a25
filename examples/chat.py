"""A chat in the terminal, over a store node, that survives restarts and absence.

    sdstore serve                                 # in one terminal
    python examples/chat.py ada                   # in a second one
    python examples/chat.py bob                   # in a third one

Everything that was written and read is in a file (NAME.chat.db by default). The state of a message of
your own is shown behind it: `sent` (it is in your file, and leaves as soon as a store answers),
`stored` (a store has it), `acknowledged` (another participant has it). Ctrl-D or Ctrl-C ends.
"""

# ruff: noqa: E402 - Ctrl-C must end the program without a traceback also during its imports.

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import asyncio
import codecs
import os
import re
import shutil
import sys
import termios
import time
import tty
import unicodedata
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate

from sdstore.participant import (
    Acknowledged,
    Acknowledgement,
    BackOff,
    Connection,
    Deliver,
    DriverError,
    DriverOptions,
    GaveUp,
    Message,
    ParticipantChannel,
    ParticipantDriver,
    ParticipantFile,
    ParticipantFileError,
    PublishedAgain,
    Rejected,
    SavedAgain,
    StoredRemotely,
    Unpublished,
    Unsaved,
)

HISTORY_LINES = 50  # earlier messages shown at the start
LINES_KEPT = 500  # shown messages whose state can still change
INPUT_CHARS_MAX = 10_000  # of a line; the rest of a longer one is cut, and the chat says so
UNSENT_LINES_MAX = 100  # typed while the disk is full; then typing waits
RECONNECT_S_MAX = 5.0  # between attempts: a person waits in front of it

CTRL_D, CTRL_U, CTRL_W = "\x04", "\x15", "\x17"
BACKSPACE = "\x7f\b"
ESCAPE_SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|O.|.)?")
CHANGES_OF_DIRECTION = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
TAB_SHOWN = "    "
ERASE_BOTTOM = "\r\x1b[1A\x1b[J"  # two rows, with the cursor in the second one
ERASE_SCREEN = "\x1b[H\x1b[J"


def main() -> int:
    """Parse the command line and chat; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="your name in the chat")
    parser.add_argument("channel", nargs="?", default="lobby", help="default: lobby")
    parser.add_argument(
        "--store",
        action="append",
        metavar="URL",
        help="may be repeated; default: http://127.0.0.1:8000",
    )
    parser.add_argument("--file", help="default: NAME.chat.db")
    arguments = parser.parse_args()
    stores = arguments.store or ["http://127.0.0.1:8000"]
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        parser.error("this is a chat for a terminal")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            ParticipantFile(arguments.file or f"{arguments.name}.chat.db") as file,
            screen() as view,
        ):
            asyncio.run(chat(file, view, arguments.name, arguments.channel, stores))
    except KeyboardInterrupt:
        return 0
    except (DriverError, ParticipantFileError, ValueError) as error:  # also for a wrong URL
        print(f"chat.py: {error}", file=sys.stderr)
        return 1
    return 0


async def chat(
    file: ParticipantFile, view: Screen, name: str, channel_id: str, stores: list[str]
) -> None:
    """Join the channel; show what arrives and send what is typed, until the input ends."""
    options = DriverOptions(back_off=BackOff(max_s=RECONNECT_S_MAX))
    async with ParticipantDriver(stores, file, options=options) as driver:
        channel = await driver.join(channel_id, name)
        shown = show_history(view, channel)
        lines: asyncio.Queue[str] = asyncio.Queue(UNSENT_LINES_MAX)
        tasks = [
            asyncio.create_task(show_events(view, channel, shown)),
            asyncio.create_task(read_lines(view, lines)),
            asyncio.create_task(send_lines(view, channel, lines)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()


def show_history(view: Screen, channel: ParticipantChannel) -> set[str]:
    """Show the newest messages of the log; returns their IDs."""
    shown = set()
    for message in channel.newest(HISTORY_LINES):
        view.show(line_of(message), message.message_id, state_of(channel, message.message_id))
        shown.add(message.message_id)
    view.show(f"-- {plain(channel.channel_id)}: {len(channel.log):,} messages so far --")
    return shown


async def show_events(view: Screen, channel: ParticipantChannel, shown: set[str]) -> None:
    """Show deliveries and news, and confirm what was shown."""
    connection = ["connecting"]
    failing: dict[str, str] = {}
    async for event in channel.events():
        match event:
            case Deliver(number, message, after_gap):
                if message.message_id not in shown:  # else it comes again: it was not confirmed
                    gap = " (after a lost message)" if after_gap else ""
                    view.show(line_of(message) + gap)
                await channel.confirm(number)
            case StoredRemotely(message_id) | Acknowledged(message_id) | GaveUp(message_id):
                view.mark(message_id, state_of(channel, message_id))
            case Rejected(message_id, code, detail):
                view.mark(message_id, f"refused by the store: {plain(detail or code)}")
            case Connection():
                connection = connection_texts(event)
            case Unsaved() | SavedAgain() | Unpublished() | PublishedAgain():
                show_failing(failing, event)
        view.show_status(status_texts(channel, "".join(failing.values()), connection))


def show_failing(
    failing: dict[str, str], event: Unsaved | SavedAgain | Unpublished | PublishedAgain
) -> None:
    """Keep what fails now in words."""
    match event:
        case Unsaved(code):
            failing["save"] = f"NOT SAVED ({code}), "
        case Unpublished(code):
            failing["store"] = f"NOT STORED ({code}), "
        case _:
            failing.pop("save" if isinstance(event, SavedAgain) else "store", None)


def connection_texts(event: Connection) -> list[str]:
    """The connection in words, the longest text first."""
    url = plain(event.store_url)
    if event.state == "online":
        return [f"connected to {url}", "connected"]
    if event.state == "catching_up":
        return [f"catching up with {url}", "catching up"]
    down = f"{url} is down ({event.code})"
    return [f"{down}, trying again; messages wait here", down, f"down ({event.code})", "down"]


def status_texts(channel: ParticipantChannel, failing: str, connection: list[str]) -> list[str]:
    """The status in words, the longest text first; what matters most comes first in the short ones."""
    status, waiting = channel.status, channel.status.unacknowledged
    known = replace(status, obstacle="")  # the connection and what fails are shown in any case
    said = "" if status.obstacle and known.is_synced else f"{known}, "
    unacknowledged = f"{waiting} not yet acknowledged, " if waiting else ""
    texts = [f"{failing}{said}{unacknowledged}{each}" for each in connection]
    return [*texts, f"{failing}{connection[-1]}, {said}".removesuffix(", ")]


async def read_lines(view: Screen, lines: asyncio.Queue[str]) -> None:
    """Take typed lines until the input ends; typing goes on while one waits to be saved."""
    async for line in view.lines():
        await lines.put(line)
    while not lines.empty():
        view.show(f"-- not sent: {lines.get_nowait()}")


async def send_lines(view: Screen, channel: ParticipantChannel, lines: asyncio.Queue[str]) -> None:
    """Send each typed line."""
    while True:
        line = await lines.get()
        message_id = await channel.send(line.encode())
        text = line_of(channel.message(message_id))
        view.show(text, message_id, state_of(channel, message_id))


def state_of(channel: ParticipantChannel, message_id: str) -> str:
    """The state of a message of ours in words; empty for others'."""
    known = channel.participant.sent_state(message_id)
    if known is None:
        return ""
    if known.acknowledgement is Acknowledgement.ACKNOWLEDGED:
        return "acknowledged"
    if known.acknowledgement is Acknowledgement.GIVEN_UP:
        return "stored, nobody acknowledged it" if known.is_stored else "nobody has it"
    if known.is_rejected:
        return "refused by the store"
    return "stored" if known.is_stored else "sent"


def line_of(message: Message) -> str:
    """Time, sender and text of a message."""
    text = f"{plain(message.sender_id)}: {plain(message.content.decode(errors='replace'))}"
    try:  # a Lamport timestamp is the sender's clock in milliseconds, or anything
        at = time.localtime((message.lamport_timestamp or 0) / 1_000)
    except (ValueError, OverflowError, OSError):
        return f"      {text}"
    return f"{time.strftime('%H:%M', at)} {text}"


def plain(text: str) -> str:
    """Text without what controls a terminal: others must not control this one. A tab takes some columns."""
    shown = ("\ufffd" if is_harmful(each) else each for each in text.replace("\t", TAB_SHOWN))
    return "".join(shown)


def is_harmful(char: str) -> bool:
    """Whether a character controls a terminal: control characters, new lines, and changes of direction.

    Others belong to the text, also invisible ones: Persian needs U+200C, and many emoji U+200D.
    """
    return unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or char in CHANGES_OF_DIRECTION


# --- the terminal ------------------------------------------------------------------------------


@contextmanager
def screen() -> Iterator[Screen]:
    """The terminal, with keys instead of lines as input; restored at the end."""
    before = termios.tcgetattr(0)
    tty.setcbreak(0)
    view = Screen()
    try:
        yield view
    finally:
        view.close()
        termios.tcsetattr(0, termios.TCSADRAIN, before)


class Screen:
    """Messages that scroll, and below them two rows: the status, and the line being typed.

    The state behind a message is written anew while the message is visible. After a change of the
    terminal's size all that is visible is written anew.
    """

    def __init__(self) -> None:
        self._status = ["connecting"]
        self._typed = ""
        self._is_cut = False  # there was more than the typed line can hold
        self._shown: deque[list[str]] = deque(maxlen=LINES_KEPT)  # text, message ID, state
        sys.stdout.write(self._bottom())
        sys.stdout.flush()

    def show(self, text: str, message_id: str = "", state: str = "") -> None:
        """Add a line."""
        self._shown.append([text, message_id, state])
        self._write(_styled(text, state) + "\n")

    def mark(self, message_id: str, state: str) -> None:
        """Change the state of a message."""
        width, height = shutil.get_terminal_size()
        above = 0
        for line in reversed(self._shown):
            rows = _rows(line, width)
            above += rows
            if line[1] != message_id:
                continue
            line[2] = state
            if above > height - 2:
                return  # it scrolled away
            if _rows(line, width) == rows:
                down = above - rows + 1
                changed = f"{_styled(line[0], state)}\x1b[K\r\x1b[{down}B"
                self._write(f"\x1b[{above}A{changed}")
            else:
                self.show(f"  {line[0]}", "", state)
            return

    def show_status(self, texts: list[str]) -> None:
        """Replace the status; the first of the texts that fits is shown."""
        if texts != self._status:
            self._status = texts
            self._write("")

    def redraw(self) -> None:
        """Write everything for the terminal's present size."""
        width, height = shutil.get_terminal_size()
        visible: list[str] = []
        rows = 0
        for line in reversed(self._shown):
            rows += _rows(line, width)
            if rows > height - 2:
                break
            visible.append(_styled(line[0], line[2]) + "\n")
        sys.stdout.write(ERASE_SCREEN + "".join(reversed(visible)) + self._bottom())
        sys.stdout.flush()

    async def lines(self) -> AsyncIterator[str]:
        """Typed lines, until Ctrl-D or the end of the input."""
        typed: asyncio.Queue[bytes] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        loop.add_reader(0, lambda: typed.put_nowait(os.read(0, 65_536)))
        loop.add_signal_handler(signal.SIGWINCH, self.redraw)
        try:
            while data := await typed.get():
                # Arrows and function keys send escape sequences, which do nothing here.
                for key in ESCAPE_SEQUENCE.sub("", decoder.decode(data)):
                    if key == CTRL_D and not self._typed:
                        return
                    if key in "\r\n":
                        line, self._typed = self._typed.strip(), ""
                        if line:
                            yield line
                    elif key in BACKSPACE:
                        self._typed = self._typed[:-1]
                    elif key == CTRL_U:
                        self._typed = ""
                    elif key == CTRL_W:
                        self._typed = self._typed.rstrip().rpartition(" ")[0]
                    elif key == "\t" or not is_harmful(key):
                        self._type(key)
                self._write("")
        finally:
            loop.remove_reader(0)
            loop.remove_signal_handler(signal.SIGWINCH)

    def _type(self, key: str) -> None:
        if len(self._typed) < INPUT_CHARS_MAX:
            self._typed += key
            self._is_cut = False
        elif not self._is_cut:
            self._is_cut = True
            self.show(f"-- cut: a message has at most {INPUT_CHARS_MAX:,} characters --")

    def close(self) -> None:
        """Remove the two rows below the messages."""
        sys.stdout.write(ERASE_BOTTOM)
        sys.stdout.flush()

    def _write(self, text: str) -> None:
        """Write above the two rows."""
        sys.stdout.write(ERASE_BOTTOM + text + self._bottom())
        sys.stdout.flush()

    def _bottom(self) -> str:
        width = shutil.get_terminal_size().columns - 1
        texts = [f"[{text}]" for text in self._status]
        status = next((text for text in texts if _width(text) <= width), texts[-1])
        typed = _clipped(plain(self._typed)[::-1], width - 2)[::-1]
        return f"\x1b[2m{_clipped(status, width)}\x1b[0m\n{_clipped('> ', width)}{typed}"


def _styled(text: str, state: str) -> str:
    return f"{text}  \x1b[2m({state})\x1b[0m" if state else text


def _rows(line: list[str], terminal_width: int) -> int:
    text, _, state = line
    width = _width(f"{text}  ({state})" if state else text)
    return max(-(-width // terminal_width), 1)


def _width(text: str) -> int:
    """The columns of a text."""
    return sum(map(_columns, text))


def _columns(char: str) -> int:
    """Letters of East Asian scripts take two columns, combining marks and joiners none."""
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _clipped(text: str, width: int) -> str:
    """The start of a text that fits into so many columns."""
    for length, columns in enumerate(accumulate(map(_columns, text))):
        if columns > width:
            return text[:length]
    return text


if __name__ == "__main__":
    sys.exit(main())
