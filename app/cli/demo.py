"""The verb `demo`: it starts two nodes, lets them diverge, compares, syncs and proves them equal.

`frames.ldp` holds real frames of js-waku, nim-sds and the versions of the specification, length-delimited.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, Annotated, Any

import typer
from rich.console import Console

from app.access.operator import token_for
from app.cli.files import DelimitedReader
from app.cli.output import (
    AsJson,
    CliError,
    Exit,
    human_bytes,
    print_json,
    print_table,
    stderr,
    stdout,
    table,
)
from app.cli.sync import watch
from app.server.limits import DEFAULT_LIMITS
from app.server.settings import ENVIRONMENT_PREFIX
from sdstore.client import StoreClient
from sdstore.client.records import PublishItem
from sdstore.sds.codec import decode, encode
from sdstore.sds.model import Dialect, HistoryEntry, Message

# ---- messages

# One channel per dialect; version 1 and chat_proto write 32-bit Lamport timestamps.
CHANNELS = {
    "/garden/1/weather/proto": (Dialect.V2, 1_767_225_600_000),
    "/garden/1/harvest/proto": (Dialect.V1, 1_700),
    "/garden/1/watering/proto": (Dialect.CHAT_PROTO, 4_200),
    "/garden/1/bees/proto": (Dialect.NIM, 1_767_225_600),
}
SENDERS = ("ada", "bert", "cleo", "dora", "emil")
_WORDS = (
    "rain", "sun", "beans", "after", "before", "the", "kale", "early", "late", "again",
    "bees", "fence", "south", "more", "less", "than", "frost", "tonight", "maybe", "ripe",
)  # fmt: skip


def conversation(count: int, seed: int) -> list[PublishItem]:
    """`count` messages over four channels, each with a retrieval hint its publisher knows."""
    chance = random.Random(seed)
    channels = [_Channel(name, *style) for name, style in CHANNELS.items()]
    return [chance.choice(channels).next(chance) for _ in range(count)]


def real_frames() -> list[PublishItem]:
    """Frames that js-waku, nim-sds and the official schemas wrote."""
    raw = files(__package__).joinpath("frames.ldp").read_bytes()
    stream = io.BufferedReader(io.BytesIO(raw))
    frames = DelimitedReader(stream, DEFAULT_LIMITS.frame_bytes_max)
    return [PublishItem(frame) for frame in frames if isinstance(frame, bytes)]


class _Channel:
    """Writes one channel's messages, each naming the two before it."""

    def __init__(self, name: str, dialect: Dialect, lamport: int) -> None:
        self._name = name
        self._dialect = dialect
        self._lamport = lamport
        self._history: list[HistoryEntry] = []

    def next(self, chance: random.Random) -> PublishItem:
        self._lamport += chance.randint(1, 4)
        sender = chance.choice(SENDERS) if self._dialect is not Dialect.V1 else ""
        content = " ".join(chance.choices(_WORDS, k=chance.randint(3, 30))).encode()
        message_id = sha256(f"{self._name}{sender}{self._lamport}".encode() + content).hexdigest()
        frame = encode(
            Message(
                message_id=message_id,
                channel_id=self._name,
                sender_id=sender,
                lamport_timestamp=self._lamport,
                causal_history=tuple(self._history),
                content=content,
            ),
            self._dialect,
        )
        hint = sha256(b"waku" + frame).digest()
        self._history = [*self._history[-1:], self._entry(message_id, hint, sender)]
        return PublishItem(frame, (hint,))

    def _entry(self, message_id: str, hint: bytes, sender: str) -> HistoryEntry:
        if self._dialect is Dialect.V1:
            return HistoryEntry(message_id)
        return HistoryEntry(message_id, hint, sender)


def overlapping_halves(
    items: list[PublishItem], seed: int
) -> tuple[list[PublishItem], list[PublishItem]]:
    """Two parts that together hold everything: for stretches one node was away, or the other."""
    chance = random.Random(seed)
    left: list[PublishItem] = []
    right: list[PublishItem] = []
    at = 0
    while at < len(items):
        stretch = items[at : at + chance.randint(1, max(len(items) // 12, 1))]
        at += len(stretch)
        who = chance.choice(("left", "right", "both", "both"))
        left += stretch if who != "right" else []
        right += stretch if who != "left" else []
    return left, right


# ---- nodes

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0


@contextmanager
def running_node(data_dir: Path, *flags: str) -> Iterator[str]:
    """Start a node over `data_dir` and stop it at the end; its URL."""
    process = subprocess.Popen(  # noqa: S603 - this program itself
        [
            *(sys.executable, "-m", "sdstore", "serve", "--json", "--until-eof"),
            *("--port", "0", "--data-dir", str(data_dir), "--log-level", "warning", *flags),
        ],
        # Closed when this process ends, however it ends: the node goes with it.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)},
        # Ctrl-C at the terminal is for the demo, which then stops its nodes in order.
        start_new_session=True,
    )
    try:
        yield _url_of(process)
    finally:
        _stop(process)


def _url_of(process: subprocess.Popen[bytes]) -> str:
    """The first line a node prints says where it is."""
    lines: Queue[bytes] = Queue()
    Thread(target=_put_first_line, args=(process.stdout, lines), daemon=True).start()
    try:
        return str(json.loads(lines.get(timeout=START_TIMEOUT_S))["url"])
    except (Empty, ValueError, KeyError):
        process.kill()
        _, errors = process.communicate()
        detail = errors.decode(errors="replace").strip() or "it said nothing"
        raise CliError(Exit.LOCAL_FAULT, "node_did_not_start", detail[-500:]) from None


def _put_first_line(stream: IO[bytes], lines: Queue[bytes]) -> None:
    lines.put(stream.readline())


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


# ---- the verb

verbs = typer.Typer()

MESSAGES_DEFAULT = 6_000
SEED = 42
DIGEST_SHOWN = 12

Holding = dict[str, list[tuple[str, bytes]]]
"""Channel -> (message ID, digest) of its messages, in log order."""


@verbs.command()
def demo(
    messages: Annotated[
        int,
        typer.Option("--messages", min=10, max=100_000, help="Messages on both nodes together."),
    ] = MESSAGES_DEFAULT,
    as_json: AsJson = False,
) -> int:
    """Start two nodes that diverge, sync them, and prove them equal."""
    return run_demo(messages, as_json=as_json)


def run_demo(messages_count: int, *, as_json: bool) -> Exit:
    """Run the demo; DONE only if both nodes end equal."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    console = stderr() if as_json else stdout()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sdstore-demo-")))
        console.rule("two nodes")
        urls = [stack.enter_context(running_node(folder / name)) for name in ("one", "two")]
        clients = [stack.enter_context(StoreClient(url, token=token_for(url))) for url in urls]
        console.print(f"node one {urls[0]}   node two {urls[1]}")
        summary = _Story(console, urls, clients).play(messages_count)
    if as_json:
        print_json(summary)
    return Exit.DONE if summary["equal"] else Exit.NO


class _Story:
    def __init__(self, console: Console, urls: list[str], clients: list[StoreClient]) -> None:
        self._console = console
        self._urls = urls
        self._one, self._two = clients

    def play(self, messages_count: int) -> dict[str, Any]:
        """Everything in order; a summary as JSON."""
        items = [*conversation(messages_count, SEED), *real_frames()]
        halves = overlapping_halves(items, SEED)
        self._load(halves)
        before = (_holding(self._one), _holding(self._two))
        self._compare(*before)
        preview = self._sync("dry run", dry_run=True)
        report = self._sync("sync", dry_run=False)
        after = (_holding(self._one), _holding(self._two))
        self._compare(*after)
        equal = after[0] == after[1] and bool(report["outcome"] == "in_sync")
        self._console.print(
            "the ID lists of both nodes are equal" if equal else "the nodes still differ",
            style="bold green" if equal else "bold red",
        )
        self._fetch(halves, before)
        return {"equal": equal, "messages": len(items), "dry_run": preview, "sync": report}

    def _load(self, halves: tuple[list[PublishItem], list[PublishItem]]) -> None:
        for name, client, half in zip(("one", "two"), (self._one, self._two), halves, strict=True):
            outcomes = [each.outcome for each in client.publish_batch(half)]
            if "refused" in outcomes:
                raise CliError(Exit.LOCAL_FAULT, "refused", f"node {name} refused a message")
            size = human_bytes(sum(len(item.frame) for item in half))
            self._console.print(f"node {name} takes {len(half):,} messages ({size})")

    def _compare(self, one: Holding, two: Holding) -> None:
        rows = []
        for channel in sorted(one.keys() | two.keys()):
            left, right = set(one.get(channel, ())), set(two.get(channel, ()))
            counts = (len(left), len(right), len(left & right))
            verdict = "equal" if left == right else f"{len(left ^ right):,} apart"
            rows.append((channel or "(empty name)", *(f"{count:,}" for count in counts), verdict))
        numbers = ["on one", "on two", "on both"]
        print_table(table("channel", *numbers, "", rows=rows, right=numbers), self._console)

    def _sync(self, title: str, *, dry_run: bool) -> dict[str, Any]:
        self._console.rule(title)
        started = self._one.start_sync(self._urls[1], dry_run=dry_run)
        document = watch(self._one, started.id, started.document)
        report: dict[str, Any] = document["report"]
        if report["detail"]:
            self._console.print(f"{report['code']}: {report['detail']}", markup=False)
        missing = report["missing_here"], report["missing_there"]
        if dry_run:
            self._console.print(
                f"{missing[0]:,} elements missing on one, {missing[1]:,} on two"
                " (an element is a message, or a hint that one was published with)"
            )
        else:
            entries, claims = (
                (report[f"{kind}_received"], report[f"{kind}_sent"])
                for kind in ("entries", "claims")
            )
            self._console.print(
                f"one received {entries[0]:,} messages and {claims[0]:,} hints,"
                f" and sent {entries[1]:,} messages and {claims[1]:,} hints"
            )
        self._console.print(
            f"{report['rounds']} rounds, {report['requests']} requests, "
            f"{human_bytes(report['bytes_up'])} up, {human_bytes(report['bytes_down'])} down, "
            f"{report['seconds']:.2f} s"
        )
        return report

    def _fetch(
        self, halves: tuple[list[PublishItem], list[PublishItem]], before: tuple[Holding, Holding]
    ) -> None:
        """One message by ID and one by hint, each from the node that did not have it."""
        self._console.rule("and what each had missed")
        by_id = _missed(halves[0], before[1])
        channel, message_id, item = by_id
        found = self._two.get(message_id, channel)
        self._show("two", "by ID", message_id, found.frame == item.frame)
        channel, message_id, item = _missed(halves[1], before[0])
        page = self._one.hint(item.retrieval_hints[0], channel)
        frames = [each.frame for each in page.messages]
        self._show("one", "by hint", item.retrieval_hints[0].hex(), item.frame in frames)

    def _show(self, node: str, how: str, key: str, is_right: bool) -> None:
        if not is_right:
            raise CliError(Exit.NO, "not_found", f"node {node} does not serve {key}")
        short = key[:DIGEST_SHOWN]
        self._console.print(f"node {node} serves {how} {short}…: byte for byte what was published")


def _holding(client: StoreClient) -> Holding:
    return {
        channel.channel_id: [
            (each.message.message_id, each.digest)
            for each in client.messages(channel.channel_id, bloom_filter=False)
        ]
        for channel in client.channels()
    }


def _missed(published: list[PublishItem], other: Holding) -> tuple[str, str, PublishItem]:
    """A message with a hint that was published on one node and was not on the other."""
    for item in published:
        message = decode(item.frame)[0]
        known = {message_id for message_id, _ in other.get(message.channel_id, ())}
        if item.retrieval_hints and message.message_id not in known:
            return message.channel_id, message.message_id, item
    raise CliError(Exit.LOCAL_FAULT, "nothing_missed", "the two halves do not differ")
