"""What verbs share: what they print, how they end, their common options, and the client behind --node.

Results go to stdout, notes, errors and bars to stderr, bars on a terminal only. An error is one line with a
stable code, and its code decides the exit code.
"""

from __future__ import annotations

import json
import re
import ssl
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.request import getproxies

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from app.access.operator import token_for
from app.cli.main import EXIT_CODE as INTERRUPTED_CODE
from app.errors import Code, Problem
from app.server.logs import printable
from sdstore.client import StoreClient
from sdstore.client.exchange import ClientOptions, Retry, checked_url
from sdstore.errors import StoreError
from sdstore.sync.report import SegmentState, SyncOutcome

# --- how a verb ends ---------------------------------------------------------------------------


class Exit(IntEnum):
    """The exit codes; docs/cli.md explains each."""

    DONE = 0
    NO = 1
    USAGE = 2
    PARTIAL = 3
    REFUSED = 4
    PEER_FAULT = 5
    LOCAL_FAULT = 6
    INTERRUPTED = INTERRUPTED_CODE


class CliError(Exception):
    """Ends a verb with one line on stderr. `code` is stable, as in problem documents."""

    def __init__(self, exit_code: Exit, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.exit_code = exit_code


_OF_SYNC = {
    SyncOutcome.IN_SYNC: Exit.DONE,
    SyncOutcome.DIFFERENT: Exit.NO,
    SyncOutcome.PARTIAL: Exit.PARTIAL,
    SyncOutcome.REFUSED: Exit.REFUSED,
    SyncOutcome.PEER_FAULT: Exit.PEER_FAULT,
    SyncOutcome.LOCAL_FAULT: Exit.LOCAL_FAULT,
}
_OF_CODE: dict[str, Exit] = {
    Code.NOT_FOUND: Exit.NO,
    Code.PEER_UNREACHABLE: Exit.PEER_FAULT,
    Code.PEER_MISBEHAVED: Exit.PEER_FAULT,
    Code.RECON_BUDGET_SPENT: Exit.PARTIAL,
    Code.SYNC_BUSY: Exit.PARTIAL,
    Code.OVERLOADED: Exit.PARTIAL,
    Code.ORDER_BUDGET_SPENT: Exit.PARTIAL,
    # The server at --node answers, but not as a node does.
    "malformed_reply": Exit.PEER_FAULT,
    "reply_too_large": Exit.PEER_FAULT,
    "digest_mismatch": Exit.PEER_FAULT,
    # Something else is at the URL, or on the way to it.
    "not_a_store": Exit.LOCAL_FAULT,
}


def exit_of_sync(outcome: str) -> Exit:
    """The exit code of a session's outcome."""
    return _OF_SYNC[SyncOutcome(outcome)]


def exit_of(error: StoreError | Problem) -> Exit:
    """The exit code of a refusal: by its code, else by its HTTP status (0 if nobody answered)."""
    if error.code in _OF_CODE:
        return _OF_CODE[error.code]
    return Exit.REFUSED if 400 <= error.status < 500 else Exit.LOCAL_FAULT


# --- results, notes and errors -----------------------------------------------------------------

PIPE_COLUMNS = 1_000_000
"""The width without a terminal: wider than any row of a table, so that no row is folded."""

_UNITS = ("B", "kB", "MB", "GB", "TB")


class _Console(Console):
    """Raises BrokenPipeError, which `program.run` handles; Rich itself would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout() -> Console:
    """The console of results. Without a terminal it neither colours nor folds lines."""
    return _Console(soft_wrap=True, highlight=False)


def stderr() -> Console:
    """The console of notes, bars and errors."""
    return _Console(stderr=True, soft_wrap=True, highlight=False)


def print_json(document: Any) -> None:
    """One JSON document on one line."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
    sys.stdout.flush()  # the reader of a pipe acts on each document as it comes


def print_error(text: str, console: Console | None = None) -> None:
    """An error on one line of stderr; `console` is that of the bar being drawn, if there is one."""
    line = " ".join(text.split())
    message = Text.assemble(("sdstore: ", "bold red"), printable(line))
    with suppress(OSError):  # if stderr is closed, the exit code still says that it failed
        (console or stderr()).print(message)


def print_note(text: str, console: Console | None = None) -> None:
    """A remark on stderr; `console` is that of the bar being drawn, if there is one."""
    with suppress(OSError):
        (console or stderr()).print(printable(text), style="dim", markup=False)


def table(
    *headings: str,
    rows: Iterable[Iterable[str]],
    right: Collection[str] = (),
    whole: Collection[str] = (),
) -> Table:
    """A plain table; the columns named in `right` are right-aligned.

    On a narrow terminal cells have several lines, but not those of the columns named in `whole`; if
    these do not fit, `print_table` prints one line per row.
    """
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading in right else "left"
        grid.add_column(heading, justify=justify, overflow="fold", no_wrap=heading in whole)
    for row in rows:
        # Cells may hold text from anywhere, so they are never parsed as markup.
        grid.add_row(*(Text(printable(cell)) for cell in row))
    return grid


def print_table(grid: Table, console: Console | None = None) -> None:
    """Print a table on the console of results, or on `console`: one line per row without a terminal, and
    where columns that are to stay whole need more than its width."""
    console = console or stdout()
    narrowest = console.measure(
        grid, options=console.options.update(max_width=PIPE_COLUMNS)
    ).minimum
    if console.is_terminal and narrowest <= console.width:
        console.print(grid)
        return
    drawn = StringIO()
    _Console(file=drawn, width=PIPE_COLUMNS, highlight=False).print(grid)
    for line in drawn.getvalue().splitlines():
        console.print(Text(line.rstrip()))


def human_bytes(count: float) -> str:
    """A size with about three digits, as in 34.1 kB."""
    for unit in _UNITS:
        if count < 1_000 or unit == _UNITS[-1]:
            break
        count /= 1_000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def counted(count: int, singular: str, plural: str) -> str:
    """A number with its noun."""
    return f"{count:,} {singular if count == 1 else plural}"


def time_text(ms: int | None) -> str:
    """A time in milliseconds since the epoch, in UTC; None is never."""
    return (
        "never" if ms is None else f"{datetime.fromtimestamp(ms / 1_000, UTC):%Y-%m-%d %H:%M} UTC"
    )


def age_text(age_s: float) -> str:
    """How long ago something was, in its largest whole unit."""
    for unit, unit_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= unit_s:
            return f"{age_s // unit_s:.0f} {unit}"
    return f"{max(age_s, 0):.0f} s"


def print_refusal(document: Mapping[str, Any], console: Console) -> None:
    """One line about a message that was refused, on the console of the bar."""
    print_error(f"message {document['item']}: {document['code']}: {document['detail']}", console)


def print_counts(verb: str, counts: Counter[str]) -> None:
    """One line of results: how many messages were taken, and the outcomes of all."""
    stdout().print(f"{verb} {counts_text(counts)}", markup=False)


def counts_text(counts: Counter[str]) -> str:
    """For example "9 of 10 messages: 1 refused, 9 stored"."""
    parts = [f"{count:,} {outcome}" for outcome, count in sorted(counts.items())]
    total = counted(counts.total(), "message", "messages")
    if refused := counts["refused"]:
        total = f"{counts.total() - refused:,} of {total}"
    return total + (f": {', '.join(parts)}" if parts else "")


# --- bars --------------------------------------------------------------------------------------

BAR_CELLS = 40
BAR_CELLS_MIN = 10
BESIDE_BAR_CELLS = 96  # title, percentage, figures and time
# The states differ in shape as well: NO_COLOR turns colours off, and not everybody sees them.
_LOOKS = {
    SegmentState.IN_SYNC: ("█", "green"),
    SegmentState.SYNCING: ("▒", "yellow"),
    SegmentState.DONT_HAVE: ("░", "cyan"),
}
_UNKNOWN = ("·", "dim")


def progress_bar() -> Progress:
    """A bar on stderr, drawn on a terminal only and removed at the end."""
    console = stderr()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def sync_progress() -> Progress:
    """A live display of one sync on stderr, drawn on a terminal only.

    The figures can have several lines; nothing is shortened.
    """
    console = stderr()
    return Progress(
        TextColumn("{task.description}"),
        RangeBarColumn(max(BAR_CELLS_MIN, min(BAR_CELLS, console.width - BESIDE_BAR_CELLS))),
        TextColumn("{task.percentage:>5.1f} %"),
        TextColumn("{task.fields[figures]}", style="dim", table_column=Column()),
        TimeElapsedColumn(Column(no_wrap=True)),
        console=console,
        disable=not console.is_terminal,
    )


def figures_of(progress: Mapping[str, Any], *pace: str) -> str:
    """Entries and bytes moved so far, and `pace`: on a second line of a narrow terminal."""
    received, sent = progress["entries_received"], progress["entries_sent"]
    up, down = human_bytes(progress["bytes_up"]), human_bytes(progress["bytes_down"])
    moved = f"↓ {received:,} ({down})  ↑ {sent:,} ({up})"
    is_narrow = stderr().width < BESIDE_BAR_CELLS + BAR_CELLS_MIN
    return ("\n" if is_narrow and pace else "  ").join([moved, "  ".join(pace)]).rstrip()


class RangeBarColumn(ProgressColumn):
    """Draws the segments of a task: the mutual interest from its oldest to its newest end."""

    def __init__(self, cells: int) -> None:
        super().__init__(Column(width=cells, no_wrap=True))
        self._cells = cells

    def render(self, task: Task) -> Text:
        """The bar."""
        return range_bar(task.fields.get("segments", ()), self._cells)


def range_bar(segments: Sequence[Mapping[str, Any]], cells: int = BAR_CELLS) -> Text:
    """Segments `{"state", "share"}` as a line of `cells` characters.

    Each cell shows the state at its middle.
    """
    bar = Text()
    ends = list(accumulate(float(segment["share"]) for segment in segments))
    position = 0
    for cell in range(cells):
        middle = (cell + 0.5) / cells
        while position < len(ends) and ends[position] < middle:
            position += 1
        known = position < len(ends)
        look = _LOOKS[SegmentState(segments[position]["state"])] if known else _UNKNOWN
        bar.append(*look)
    return bar


TokenPath = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        envvar="SDSTORE_CLIENT_TOKEN_FILE",
        help="File with an access token, for verbs that call a node.",
    ),
]
CaPath = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        metavar="FILE",
        envvar="SDSTORE_CLIENT_CA_FILE",
        help="CA certificates of the node (PEM), for verbs that call one over https.",
    ),
]


@dataclass(slots=True)
class Access:
    """How the verbs of this command line reach a node: its token and the CAs of its certificate."""

    token_file: Path | None = None
    ca_file: Path | None = None

    def token(self, url: str) -> str | None:
        """The access token for a node: that of `--token-file`, or of a node of this user on this machine.

        Raises CliError.
        """
        self.check_proxies()
        return token_for(url) if self.token_file is None else read_token(self.token_file)

    def tls(self) -> ssl.SSLContext | None:
        """The context for https; None for the system's CAs. Raises CliError."""
        if self.ca_file is None:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            detail = f"{self.ca_file}: {error.strerror or error}"
            raise CliError(Exit.LOCAL_FAULT, "cannot_read", detail) from None

    def check_proxies(self) -> None:
        """Raises CliError for a proxy of the environment that cannot be used; it can hold a password."""
        for name, url in getproxies().items():
            scheme, is_url, _ = url.partition("://")
            if name in {"http", "https", "all"} and is_url and scheme not in {"http", "https"}:
                detail = f"{name.upper()}_PROXY is a {scheme} proxy; use one of http or https, or unset it"
                raise CliError(Exit.USAGE, "invalid_parameter", detail)


access = Access()


def with_remedy(reason: str) -> str:
    """Why a node was not reached, with the option that mends it."""
    if "certificate is not trusted" not in reason:
        return reason
    return f"{reason}; if its CA is your own: sdstore --ca-file FILE VERB …"


def read_token(file: Path) -> str:
    """The token in a file. Raises CliError."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        detail = f"{file}: {getattr(error, 'strerror', None) or error}"
        raise CliError(Exit.LOCAL_FAULT, "cannot_read", detail) from None
    if not text or any(each.isspace() for each in text):
        raise CliError(Exit.USAGE, "invalid_parameter", f"{file} does not contain one token")
    return text


DEFAULT_NODE = "http://127.0.0.1:8000"


def node_url(text: str) -> str:
    """The URL, if it is one that a node can have. Raises CliError."""
    try:
        url = checked_url(text)
    except ValueError as error:
        raise CliError(Exit.USAGE, "invalid_parameter", f"--node {error}") from error
    # By name, the call could reach another program that listens on [::1] (`app.access.operator`).
    return re.sub(r"^http://localhost(?=[:/]|$)", "http://127.0.0.1", url)


NodeUrl = Annotated[
    str,
    typer.Option(
        "--node",
        metavar="URL",
        envvar="SDSTORE_CLIENT_NODE",
        help="URL of the node.",
        callback=node_url,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ChannelId = Annotated[
    str | None, typer.Option("--channel", metavar="C", help="Look in this channel only.")
]
ChannelIds = Annotated[
    list[str] | None,
    typer.Option("--channel", metavar="C", help="Only this channel; may be repeated."),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database", metavar="URL", help="URL of the database: sqlite:///PATH or postgresql://…"
    ),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", metavar="DIR", help="Folder of the node's data.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file with settings.")
]

# One more attempt for a node that is just starting, but no minutes of silence: a person waits.
PATIENCE = ClientOptions(retry=Retry(attempts_max=2))


@contextmanager
def node_client(url: str) -> Iterator[StoreClient]:
    """A client of the node at `url`, whose URL becomes part of errors that are not the node's own."""
    with StoreClient(url, token=access.token(url), tls=access.tls(), options=PATIENCE) as client:
        try:
            yield client
        except StoreError as error:
            if error.status:
                raise
            raise CliError(
                Exit.PEER_FAULT if error.code == "reply_too_large" else Exit.LOCAL_FAULT,
                error.code,
                f"{url}: {with_remedy(error.detail)}",
            ) from None


def is_known(client: StoreClient, channel_id: str) -> bool:
    """Whether the node has messages of a channel; True also where it cannot tell."""
    try:
        client.channel(channel_id)
    except StoreError as error:
        return error.code != Code.NOT_FOUND
    return True
