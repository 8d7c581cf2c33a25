"""Verbs that publish to a running node and read from it: publish, get, hint, channels, gaps, tail, order."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table
from rich.text import Text

from app.cli.files import (
    BadItem,
    FileFormat,
    MessageFile,
    format_of_input,
    is_stdout,
    open_input,
    require_one_output,
    size_of,
)
from app.cli.output import (
    DEFAULT_NODE,
    PATIENCE,
    AsJson,
    ChannelId,
    CliError,
    Exit,
    NodeUrl,
    access,
    counted,
    counts_text,
    exit_of,
    human_bytes,
    is_known,
    node_client,
    print_counts,
    print_json,
    print_note,
    print_refusal,
    print_table,
    progress_bar,
    stderr,
    stdout,
    table,
)
from app.errors import Code
from app.hexadecimal import not_a_hex_hint
from app.ingest.prepare import Publication
from app.server.limits import DEFAULT_LIMITS
from app.server.logs import printable
from sdstore.client import StoreClient
from sdstore.client.exchange import (
    Batcher,
    BoundedBody,
    EmptyPages,
    base_headers,
    batches,
    network_reason,
)
from sdstore.client.live import EventReader, ServerEvent, is_stream, not_a_stream
from sdstore.client.records import (
    Channel,
    OrderItem,
    OrderPage,
    PublishItem,
    PublishOutcome,
    StoredMessage,
    WakuEnvelope,
)
from sdstore.errors import StoreError
from sdstore.ordering import Roles, RolesChange
from sdstore.sds.codec import decode, to_json
from sdstore.sds.model import VOTE, frame_hash

verbs = typer.Typer()

HINT_HELP = "The retrieval hint, in hexadecimal (inside a message in JSON hints are base64)."
HINT_PAGE = 100
HINT_CANDIDATES_MAX = 1_000  # as many as a node ranks

CHANNELS_PAGE = 1_000  # as many as a node gives at once
CHANNEL_LINE = "{:>12}  {:>16}  {:>16}  {}\n"

LAST_DEFAULT = 10
LAST_MAX = 1_000
RECONNECT_S = 1.0
SILENCE_S_MAX = 60.0  # a node sends a comment, if nothing else, more often than that
CONNECT_S_MAX = 5.0
EVENT_BYTES_MAX = 4 << 20  # a frame of 1 MiB as JSON, with its names

WHOLE_IDS = ("message ID", "channel", "digest", "missing message", "hints")
"""Columns of what is copied into another command."""

PREVIEW_CHARS = 400
HISTORY_SHOWN = 4

# --- publish -------------------------------------------------------------------------------------

Numbered = tuple[int, PublishOutcome | BadItem]

AGAIN = "Publishing the same again is safe: messages that the node has already count as duplicates."


class _NodeFaultError(StoreError):
    """A message of a batch was not stored, for a reason that is not the message's."""


@verbs.command()
def publish(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Messages to publish; - is stdin.")],
    file_format: Annotated[
        FileFormat, typer.Option("--format", help="Format of the file.")
    ] = FileFormat.AUTO,
    hint: Annotated[
        list[str] | None,
        typer.Option(
            "--hint",
            metavar="HEX",
            help="A retrieval hint of the message, in hexadecimal; with --format frame only; "
            "may be repeated.",
        ),
    ] = None,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> int:
    """Publish messages: length-delimited protobuf, NDJSON, or one bare frame."""
    hints = tuple(hint_argument(each, "--hint") for each in hint or ())
    if hints and file_format is not FileFormat.FRAME:
        raise CliError(
            Exit.USAGE, "invalid_parameter", "--hint is allowed only with --format frame"
        )
    counts: Counter[str] = Counter()
    try:
        with node_client(node) as client, open_input(file) as stream:
            file_format = format_of_input(stream, file, file_format)
            items = MessageFile(stream, file_format, DEFAULT_LIMITS.frame_bytes_max)
            _report(_outcomes(client, items, hints), items, size_of(stream), counts, as_json)
    except _NodeFaultError as fault:
        detail = f"{fault.detail}; published {counts_text(counts)}. {AGAIN}"
        raise CliError(exit_of(fault), fault.code, detail) from None
    except (KeyboardInterrupt, CliError, StoreError) as error:
        if counts or isinstance(error, KeyboardInterrupt):
            print_note(f"published {counts_text(counts)}; the node may have stored more. {AGAIN}")
        raise
    if not as_json:
        print_counts("published", counts)
    return Exit.REFUSED if counts["refused"] else Exit.DONE


def _outcomes(
    client: StoreClient, items: Iterable[Publication | BadItem], hints: tuple[bytes, ...]
) -> Iterator[Numbered]:
    """One outcome per item, with its number counted from 1. Unreadable items are not sent.

    Raises `_NodeFaultError` behind the outcomes of the first batch that the node could not store.
    """
    numbers: deque[int] = deque()
    unreadable: deque[Numbered] = deque()

    def readable() -> Iterator[PublishItem]:
        for number, item in enumerate(items, 1):
            if isinstance(item, BadItem):
                unreadable.append((number, item))
            else:
                numbers.append(number)
                yield _to_send(item, hints)

    for batch in batches(readable(), Batcher()):
        fault: StoreError | None = None
        for outcome in client.publish_batch(batch):
            number = numbers.popleft()
            while unreadable and unreadable[0][0] < number:
                yield unreadable.popleft()
            yield number, outcome
            fault = fault or _node_fault(outcome)
        if fault is not None:
            raise _NodeFaultError(fault.code, fault.status, fault.detail)
    yield from unreadable


def _node_fault(outcome: PublishOutcome | BadItem) -> StoreError | None:
    """The fault of the node for which a message was not stored: the next messages would fail too."""
    error = outcome.error if isinstance(outcome, PublishOutcome) else None
    return error if error is not None and error.status >= 500 else None


def _to_send(item: Publication, hints: tuple[bytes, ...]) -> PublishItem:
    waku = None if item.envelope is None else WakuEnvelope(**asdict(item.envelope))
    return PublishItem(item.frame, item.hints + hints, waku)


def _report(
    outcomes: Iterator[Numbered],
    items: MessageFile,
    size: int | None,
    counts: Counter[str],
    as_json: bool,
) -> None:
    with progress_bar() as bar:
        task = bar.add_task("publishing", total=size, figures="")
        for number, outcome in outcomes:
            document = outcome_document(number, outcome)
            is_node_fault = _node_fault(outcome) is not None
            if not is_node_fault:
                counts[document["outcome"]] += 1
            if as_json:
                print_json(document)
            elif document["outcome"] == "refused" and not is_node_fault:
                print_refusal(document, bar.console)
            bar.update(task, completed=items.position, figures=f"{counts.total():,} messages")


def outcome_document(number: int, outcome: PublishOutcome | BadItem) -> dict[str, Any]:
    """What became of the message with this number, as JSON."""
    if isinstance(outcome, BadItem):
        return {
            "item": number,
            "outcome": "refused",
            "code": outcome.code,
            "detail": outcome.detail,
        }
    document: dict[str, Any] = {"item": number, "outcome": outcome.outcome}
    if outcome.error is not None:
        return document | {"code": outcome.error.code, "detail": outcome.error.detail}
    digest = outcome.digest.hex() if outcome.digest else None
    return document | {
        "message_id": outcome.message_id,
        "channel_id": outcome.channel_id,
        "digest": digest,
    }


# --- get, hint, channels, gaps -------------------------------------------------------------------


@verbs.command()
def get(
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message ID.")],
    channel: ChannelId = None,
    digest: Annotated[
        str | None,
        typer.Option("--digest", metavar="HEX", help="Fetch the variant with this digest."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the frame to this file; - is stdout."),
    ] = None,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """Fetch a message by its ID."""
    if out is not None:
        require_one_output(out, as_json=as_json)
    variant = None if digest is None else hex_argument(digest, "--digest")
    with node_client(node) as client:
        found = client.get(message_id, channel, variant)
    document = message_document(
        found.frame, found.digest, found.dialect, variants_count=found.variants_count
    )
    if out is not None:
        _write_frame(out, found.frame)
    if as_json:
        print_json(document)
    elif out is None:
        print_table(message_table(document))


@verbs.command()
def hint(
    hint_hex: Annotated[str, typer.Argument(metavar="HEX", help=HINT_HELP)],
    channel: ChannelId = None,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> int:
    """Find the messages that a retrieval hint may mean, the likeliest first."""
    with node_client(node) as client:
        found = _candidates(client, hint_argument(hint_hex, "the hint"), channel)
    if not found:
        raise CliError(Exit.NO, "not_found", f"the node has no message under hint {hint_hex}")
    documents = [
        message_document(m.frame, m.digest, m.dialect, hints=m.retrieval_hints) for m in found
    ]
    if as_json:
        for document in documents:
            print_json(document)
        return Exit.DONE
    rows = [_row(document) for document in documents]
    print_table(
        table(
            "message ID",
            "channel",
            "Lamport",
            "digest",
            rows=rows,
            right=["Lamport"],
            whole=WHOLE_IDS,
        )
    )
    return Exit.DONE


@verbs.command()
def channels(
    prefix: Annotated[
        str | None,
        typer.Option("--prefix", metavar="P", help="Only channels whose names begin with P."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="This many channels at most.")
    ] = None,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """List the channels that a node has messages of, by name."""
    page_size = min(limit or CHANNELS_PAGE, CHANNELS_PAGE)
    with node_client(node) as client:
        found = islice(client.channels(prefix, page_size=page_size), limit)
        if as_json:
            for each in found:
                print_json(_channel_document(each))
            return
        # Lines, not a table: it would have to see all rows before its first. An error comes before the head.
        first = list(islice(found, 1))
        sys.stdout.write(
            CHANNEL_LINE.format("messages", "first Lamport", "last Lamport", "channel")
        )
        for each in chain(first, found):
            numbers = (f"{each.count:,}", each.lamport_first, each.lamport_last)
            sys.stdout.write(CHANNEL_LINE.format(*numbers, printable(each.channel_id)))


@verbs.command()
def gaps(
    channel_id: Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel.")],
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """List the messages that a channel's histories name and the node lacks."""
    with node_client(node) as client:
        found: list[dict[str, Any]] = [
            {
                "message_id": each.message_id,
                "hints": [hint.hex() for hint in each.retrieval_hints],
                "met_as_sync": each.met_as_sync,
            }
            for each in client.gaps(channel_id)
        ]
        if not found:
            client.channel(channel_id)  # raises not_found where the node has no such channel
    if as_json:
        for document in found:
            print_json(document)
    elif found:
        rows = [
            (
                str(each["message_id"]),
                "a sync message had this ID" if each["met_as_sync"] else "",
                ", ".join(each["hints"]),
            )
            for each in found
        ]
        print_table(table("missing message", "note", "hints", rows=rows, whole=WHOLE_IDS))
    else:
        print_note("no gaps")


def hex_argument(text: str, what: str) -> bytes:
    """Bytes from hexadecimal."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise CliError(Exit.USAGE, "invalid_hex", f"{what} is not hexadecimal: {text!r}") from None


def hint_argument(text: str, what: str) -> bytes:
    """Bytes of a retrieval hint from hexadecimal."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise CliError(Exit.USAGE, "invalid_hex", f"{what} {not_a_hex_hint(text)}") from None


def _candidates(client: StoreClient, hint: bytes, channel: str | None) -> list[StoredMessage]:
    found: list[StoredMessage] = []
    after: str | None = None
    while len(found) < HINT_CANDIDATES_MAX:
        page = client.hint(hint, channel, after=after, limit=HINT_PAGE)
        found += page.messages
        for digest in page.left_out:
            print_note(f"left out: the node has lost the content of {digest.hex()}")
        if page.next is None:
            break
        after = page.next
    return found


def _row(document: dict[str, Any]) -> tuple[str, str, str, str]:
    message = document["message"]
    return (
        message["message_id"],
        message.get("channel_id", ""),
        message["lamport_timestamp"],
        document["meta"]["digest"],
    )


def _channel_document(channel: Channel) -> dict[str, Any]:
    return {
        "channel_id": channel.channel_id,
        "count": channel.count,
        "lamport_first": str(channel.lamport_first),
        "lamport_last": str(channel.lamport_last),
    }


def _write_frame(out: Path, frame: bytes) -> None:
    if is_stdout(out):
        sys.stdout.buffer.write(frame)
    else:
        out.write_bytes(frame)


# --- tail ----------------------------------------------------------------------------------------


@verbs.command()
def tail(
    channel_id: Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel to follow.")],
    last: Annotated[
        int,
        typer.Option(
            "--last", "-n", min=0, max=LAST_MAX, help="Begin with this many of the newest messages."
        ),
    ] = LAST_DEFAULT,
    no_follow: Annotated[
        bool, typer.Option("--no-follow", help="Print the newest messages and exit.")
    ] = False,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """Print the newest messages of a channel, then new ones as they arrive, until Ctrl-C."""
    show = print_json if as_json else _print_line
    with node_client(node) as client:
        if no_follow:
            newest = _newest(client, channel_id, last, bloom_filter=as_json)
            if not newest:
                client.channel(channel_id)  # raises not_found where the node has no such channel
            for document in newest:
                show(document)
            return
        follower = _Follower(node, channel_id, bloom_filter=as_json)
        seen: set[str] = set()
        # The stream is opened before the older messages are read, so none is missed in between.
        with follower.connected() as events:
            for document in _newest(client, channel_id, last, bloom_filter=as_json):
                seen.add(document["meta"]["digest"])
                show(document)
            if not seen and not is_known(client, channel_id):
                print_note(f"no message of channel {printable(channel_id)} is here yet; waiting")
            _show_events(events, follower, seen, show)
        while True:
            print_note(f"lost the connection to {node}; trying again")
            time.sleep(RECONNECT_S)
            _follow_again(follower, seen, show)


class _Follower:
    """A reader of the live stream, and how far it has read."""

    def __init__(self, node: str, channel_id: str, *, bloom_filter: bool) -> None:
        self.cursor = ""
        self._url = f"{node.rstrip('/')}/v1/channels/live"
        self._query = {"channel_id": channel_id}
        if not bloom_filter:
            self._query["filter"] = "none"

    @contextmanager
    def connected(self) -> Iterator[Iterator[ServerEvent]]:
        """The events behind the cursor, or from now on if there is none yet."""
        query = self._query | ({"after": self.cursor} if self.cursor else {})
        timeout = httpx.Timeout(SILENCE_S_MAX, connect=CONNECT_S_MAX)
        headers, verify = base_headers(access.token(self._url)), access.tls() or True
        try:
            with httpx.stream(
                "GET", self._url, params=query, headers=headers, timeout=timeout, verify=verify
            ) as answer:
                if not is_stream(answer):
                    body = BoundedBody(PATIENCE, time.monotonic())
                    for chunk in answer.iter_raw():
                        body.feed(chunk, time.monotonic())
                    raise not_a_stream(body.reply(answer))
                events = self._tracked(answer.iter_bytes())
                # The first event has only an ID, the cursor of this moment: from here on no message
                # is missed, on this connection or the next.
                if next(events, None) is None:
                    raise StoreError("unreachable", 0, "the node ended the stream")
                yield events
        except httpx.TransportError as error:
            raise StoreError("unreachable", 0, network_reason(error)) from None

    def _tracked(self, chunks: Iterator[bytes]) -> Iterator[ServerEvent]:
        reader = EventReader(EVENT_BYTES_MAX)
        try:
            for chunk in chunks:
                for event in reader.feed(chunk):
                    self.cursor = event.event_id or self.cursor
                    yield event
        except httpx.TransportError:
            return  # the caller connects again


def _follow_again(follower: _Follower, seen: set[str], show: Any) -> None:
    try:
        with follower.connected() as events:
            _show_events(events, follower, seen, show)
    except StoreError as error:
        if error.status:
            raise


def _show_events(
    events: Iterator[ServerEvent], follower: _Follower, seen: set[str], show: Any
) -> None:
    """Print messages until the stream ends, or has a gap that the next connection fills."""
    for event in events:
        if not event.data:
            continue
        document = json.loads(event.data)
        if event.name == "gap":
            follower.cursor = document["cursor"]
            print_note("messages were missed: catching up")
            return
        if event.name == "left_out":
            print_note(f"the node has lost the content of message {document['message_id']!r}")
            continue
        if event.name not in ("message", "relayed"):
            continue
        digest = document["meta"].get("digest", "")
        if digest not in seen:
            show(document)
        # Only the older messages that were printed first can come twice.
        seen.discard(digest)


def _newest(
    client: StoreClient, channel_id: str, count: int, *, bloom_filter: bool
) -> list[dict[str, Any]]:
    if not count:
        return []
    found = []
    newest_first = client.messages(
        channel_id,
        direction="desc",
        page_size=count,
        on_left_out=_print_left_out,
        bloom_filter=bloom_filter,
    )
    for message, _ in zip(newest_first, range(count), strict=False):
        found.append(message_document(message.frame, message.digest, message.dialect))
    return list(reversed(found))


def _print_left_out(digests: tuple[bytes, ...]) -> None:
    for digest in digests:
        print_note(f"the node has lost the content of {digest.hex()}")


def _print_line(document: dict[str, Any]) -> None:
    message, meta = document["message"], document["meta"]
    line = Text()
    line.append(f"{message.get('lamport_timestamp', '–'):>14} ", style="dim")
    line.append(f"{printable(message['message_id'])} ")
    line.append(printable(message.get("sender_id", "") or "–"), style="bold cyan")
    line.append(f" {printable(content_preview(message))}")
    if kind := meta.get("kind"):
        line.append(f" ({kind})", style="dim")
    stdout().print(line)


# --- messages as JSON and for people -------------------------------------------------------------


def message_document(
    frame: bytes,
    digest: bytes,
    dialect: str,
    *,
    variants_count: int | None = None,
    hints: Sequence[bytes] | None = None,
) -> dict[str, Any]:
    """The message as in the node's JSON; `meta` holds what the caller knows."""
    meta: dict[str, Any] = {
        "digest": digest.hex(),
        "frame_hash": frame_hash(frame).hex(),
        "dialect": dialect,
    }
    if variants_count is not None:
        meta["other_variants_count"] = variants_count - 1  # the JSON of a node lists the others
    if hints is not None:
        meta["hints"] = [each.hex() for each in hints]
    message, _ = decode(frame)
    return {"message": to_json(message), "meta": meta}


def message_table(document: dict[str, Any]) -> Table:
    """One message for people, one line per field."""
    message, meta = document["message"], document["meta"]
    history = [entry["message_id"] for entry in message.get("causal_history", [])]
    rows = [
        ("message ID", message["message_id"]),
        ("channel", message.get("channel_id", "")),
        ("sender", message.get("sender_id", "")),
        ("Lamport", message.get("lamport_timestamp", "")),
        ("content", content_preview(message)),
        ("history", _shortened(history)),
        ("bloom filter", human_bytes(len(base64.b64decode(message.get("bloom_filter", ""))))),
        ("dialect", meta["dialect"]),
        ("digest", meta["digest"]),
        ("other variants", str(meta.get("other_variants_count") or "")),
    ]
    grid = table("", "", rows=[row for row in rows if row[1] not in ("", "0 B")])
    grid.show_header = False
    return grid


def content_preview(message: dict[str, Any]) -> str:
    """The beginning of a message's content: as text, or in hexadecimal if it is not UTF-8; `(vote)` of an indexer's vote."""
    content = base64.b64decode(message.get("content", ""))
    if content.startswith(VOTE):
        return "(vote)"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content[: PREVIEW_CHARS // 2].hex()
        return f"{human_bytes(len(content))}: {text}"
    return text if len(text) <= PREVIEW_CHARS else f"{text[:PREVIEW_CHARS]}…"


def _shortened(ids: list[str]) -> str:
    rest = len(ids) - HISTORY_SHOWN
    return ", ".join(ids[:HISTORY_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


# ---- order

PAGE = 500
REWINDS_MAX = 20
"""Times that the tail is read again because messages arrived in between."""

NAMED_MAX = 5
"""Breaches and missing messages that a note names."""


def _senders(flag: str, what: str) -> Any:
    return typer.Option(flag, metavar="SENDER", help=f"{what}; may be repeated.")


Indexers = Annotated[
    list[str] | None, _senders("--indexer", "A sender whose references confirm messages")
]
NonIndexers = Annotated[
    list[str] | None,
    _senders("--non-indexer", "A sender that is no indexer, as all that are not named"),
]
Relayed = Annotated[
    list[str] | None,
    _senders("--relayed", "A sender whose messages are in the tail once an indexer names them"),
]

Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--change",
        metavar="JSON",
        help='Other roles from a confirmed message on: {"after": "ID", "indexers": ["SENDER"]}; may be repeated.',
    ),
]


def change_argument(text: str) -> RolesChange:
    """A change of roles. Raises CliError."""
    try:
        document = json.loads(text)
        named = [document["indexers"], document.get("relayed", [])]
        if document.keys() <= {"after", "indexers", "relayed"} and all(
            isinstance(each, str) for each in [document["after"], *named[0], *named[1]]
        ):
            return RolesChange(
                document["after"], Roles(indexers=named[0], relayed=frozenset(named[1]))
            )
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    detail = f"--change {text!r} is not a JSON object with `after` and `indexers`"
    raise CliError(Exit.USAGE, "invalid_parameter", detail)


@verbs.command()
def order(
    channel_id: Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel.")],
    indexer: Indexers = None,
    non_indexer: NonIndexers = None,
    relayed: Relayed = None,
    change: Changes = None,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> int:
    """Show the order of a channel: the confirmed prefix, which never changes, then the tentative tail."""
    changes = [change_argument(each) for each in change or ()]
    with node_client(node) as client:
        items, page = _read(
            client, channel_id, indexer or [], non_indexer or [], relayed or [], changes
        )
        if not items and not page.waiting_count:
            client.channel(channel_id)  # raises not_found where the node has no such channel
    print_order(items, page, as_json=as_json)
    return Exit.DONE


def print_order(items: Iterable[OrderItem], page: OrderPage, *, as_json: bool) -> None:
    """Print the items as lines of JSON, then what is true of the whole order; or a table and notes."""
    if as_json:
        for item in items:
            print_json(_document(item))
        print_json(_summary(page))
        return
    rows = [_order_row(item) for item in items]
    print_table(
        table("", "message ID", "sender", "Lamport", "content", rows=rows, right=["Lamport"])
    )
    _print_notes(page)


def _read(
    client: StoreClient,
    channel_id: str,
    indexers: list[str],
    non_indexers: list[str],
    relayed: list[str],
    changes: list[RolesChange],
) -> tuple[list[OrderItem], OrderPage]:
    """The whole order and its last page. If the tail changes meanwhile, it is read again."""
    items: list[OrderItem] = []
    after: str | None = None
    page: OrderPage | None = None
    rewinds_left = REWINDS_MAX
    empty_pages = EmptyPages()
    with stderr().status("ordering") as status:
        while True:
            try:
                page = client.order(
                    channel_id,
                    indexers,
                    non_indexers=non_indexers,
                    relayed=relayed,
                    changes=changes,
                    with_messages=True,
                    after=after,
                    limit=PAGE,
                )
            except StoreError as error:
                if error.code != Code.CURSOR_REWOUND or page is None or not rewinds_left:
                    raise
                rewinds_left -= 1
                items, after = items[: page.confirmed_count], page.next_confirmed
                continue
            items += page.items
            after = page.next
            if after is None:
                # The prefix can have grown while the pages were read.
                count = page.confirmed_count
                return [replace(e, is_confirmed=at < count) for at, e in enumerate(items)], page
            empty_pages.add(len(page.items))
            if not page.is_complete:
                status.update(f"ordering: {page.confirmed_count + page.tail_count:,} messages")


def _document(item: OrderItem) -> dict[str, Any]:
    document: dict[str, Any] = {
        "message_id": item.message_id,
        "sender_id": item.sender_id,
        "digest": item.digest.hex(),
        "confirmed": item.is_confirmed,
    }
    if (found := item.message) is not None:
        document |= message_document(found.frame, found.digest, found.dialect)
    return document


def _summary(page: OrderPage) -> dict[str, Any]:
    """The last line of JSON: what is true of the order as a whole."""
    return {
        "order": {
            "confirmed_count": page.confirmed_count,
            "tail_count": page.tail_count,
            "waiting_count": page.waiting_count,
            "senderless_count": page.senderless_count,
            "missing": list(page.missing),
            "breaches": [asdict(each) for each in page.breaches],
            "left_out": [digest.hex() for digest in page.left_out],
            "indexers": [asdict(each) for each in page.indexers],
            "waits_for": page.waits_for and asdict(page.waits_for),
            "next_confirmed": page.next_confirmed,
        }
    }


def _order_row(item: OrderItem) -> tuple[str, str, str, str, str]:
    message = {} if item.message is None else _document(item)["message"]
    return (
        "confirmed" if item.is_confirmed else "tentative",
        item.message_id,
        item.sender_id or "–",
        message.get("lamport_timestamp", "–"),
        content_preview(message),
    )


def _print_notes(page: OrderPage) -> None:
    confirmed = counted(page.confirmed_count, "message", "messages")
    print_note(f"{confirmed} confirmed, {page.tail_count:,} tentative")
    if page.tail_count:
        for each in page.indexers[:NAMED_MAX]:
            if not each.message_count:
                print_note(f"the indexer {printable(each.sender_id)} has not written a message")
            elif each.unseen_count:
                unseen = counted(each.unseen_count, "message", "messages")
                name = printable(each.sender_id)
                print_note(f"the indexer {name} has not seen {unseen} of other indexers")
    if (waits_for := page.waits_for) is not None:
        names = ", ".join(map(printable, waits_for.sender_ids[:NAMED_MAX]))
        more = " and others" if len(waits_for.sender_ids) > NAMED_MAX else ""
        print_note(f"confirmation waits for messages by {waits_for.count} of: {names}{more}")
    for breach in page.breaches[:NAMED_MAX]:
        shown = " and ".join(dict.fromkeys([breach.message_id, breach.other_message_id]))
        where = f" ({printable(shown)})" if breach.message_id else ""
        print_note(f"nothing more is confirmed: {breach.kind}: {printable(breach.detail)}{where}")
    if page.waiting_count:
        missing = ", ".join(printable(each) for each in page.missing[:NAMED_MAX])
        waiting = counted(page.waiting_count, "message is", "messages are")
        print_note(f"{waiting} not ordered yet, because others are missing: {missing}")
    if page.senderless_count:
        senderless = counted(page.senderless_count, "message has", "messages have")
        print_note(f"{senderless} no sender and never confirm")
    for digest in page.left_out[:NAMED_MAX]:
        print_note(f"left out: the store has lost the content of {digest.hex()}")
