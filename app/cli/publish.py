"""The verb that publishes messages from a file or a pipe."""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from app.cli.delimited import BadItem
from app.cli.exits import CliError, Exit
from app.cli.frames import FileFormat, MessageFile, format_of_input
from app.cli.node import node_client
from app.cli.options import DEFAULT_NODE, AsJson, NodeUrl
from app.cli.output import counted, print_error, print_json, print_note, progress_bar, stdout
from app.cli.read import hint_argument
from app.ingest.prepare import Publication
from app.limits import DEFAULT_LIMITS
from sdstore.client import StoreClient
from sdstore.client.errors import StoreError
from sdstore.client.records import PublishItem, PublishOutcome, WakuEnvelope

if TYPE_CHECKING:
    from app.cli.frames import Stream

verbs = typer.Typer()

Numbered = tuple[int, PublishOutcome | BadItem]


@verbs.command()
def publish(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Messages to publish; - is stdin.")],
    file_format: Annotated[
        FileFormat, typer.Option("--format", help="How they lie in the file.")
    ] = FileFormat.AUTO,
    hint: Annotated[
        list[str] | None,
        typer.Option(
            "--hint",
            metavar="HEX",
            help="A hint for the one message of --format frame, in hexadecimal.",
        ),
    ] = None,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> int:
    """Publish messages: length-delimited protobuf, NDJSON, or one bare frame."""
    hints = tuple(hint_argument(each, "--hint") for each in hint or ())
    if hints and file_format is not FileFormat.FRAME:
        raise CliError(Exit.USAGE, "invalid_parameter", "--hint goes with --format frame")
    counts: Counter[str] = Counter()
    try:
        with node_client(node) as client, open_input(file) as stream:
            file_format = format_of_input(stream, file, file_format)
            items = MessageFile(stream, file_format, DEFAULT_LIMITS.frame_bytes_max)
            _report(_outcomes(client, items, hints), items, size_of(stream), counts, as_json)
    except KeyboardInterrupt:
        _tell_interrupted(counts)
        raise
    except (CliError, StoreError):
        if counts:
            _tell_interrupted(counts)
        raise
    if not as_json:
        print_counts("published", counts)
    return Exit.REFUSED if counts["refused"] else Exit.DONE


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
        raise CliError(Exit.USAGE, "cannot_read", str(error)) from None
    with stream:
        yield stream


def print_refusal(document: Mapping[str, Any], console: Console) -> None:
    """One line on the bar's console about a message that was refused."""
    print_error(f"message {document['item']}: {document['code']}: {document['detail']}", console)


def print_counts(verb: str, counts: Counter[str]) -> None:
    """One line: how many messages were taken, and what became of all of them."""
    stdout().print(f"{verb} {_counts_text(counts)}", markup=False)


def _counts_text(counts: Counter[str]) -> str:
    parts = [f"{count:,} {outcome}" for outcome, count in sorted(counts.items())]
    total = counted(counts.total(), "message", "messages")
    if refused := counts["refused"]:
        total = f"{counts.total() - refused:,} of {total}"
    return total + (f": {', '.join(parts)}" if parts else "")


def _tell_interrupted(counts: Counter[str]) -> None:
    print_note(
        f"published {_counts_text(counts)}, perhaps more without an answer; publishing the same "
        "again is safe: what the node has already counts as duplicate"
    )


def _outcomes(
    client: StoreClient, items: Iterable[Publication | BadItem], hints: tuple[bytes, ...]
) -> Iterator[Numbered]:
    """One outcome per item with its number from 1; what could not be read is not sent."""
    numbers: deque[int] = deque()
    unreadable: deque[Numbered] = deque()

    def readable() -> Iterator[PublishItem]:
        for number, item in enumerate(items, 1):
            if isinstance(item, BadItem):
                unreadable.append((number, item))
            else:
                numbers.append(number)
                yield _to_send(item, hints)

    for outcome in client.publish_batch(readable()):
        number = numbers.popleft()
        while unreadable and unreadable[0][0] < number:
            yield unreadable.popleft()
        yield number, outcome
    yield from unreadable


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
            counts[document["outcome"]] += 1
            if as_json:
                print_json(document)
            elif document["outcome"] == "refused":
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


def size_of(stream: Stream) -> int | None:
    """Bytes of a file; None for a pipe."""
    if not stream.seekable():
        return None
    start = stream.tell()
    end = stream.seek(0, os.SEEK_END)
    stream.seek(start)
    return end
