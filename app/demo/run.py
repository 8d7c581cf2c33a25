"""The verb `demo`: it starts two nodes, lets them diverge, compares, syncs and proves them equal."""

from __future__ import annotations

import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from app.access.operator import token_for
from app.cli.options import AsJson
from app.cli.output import (
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
from app.demo.messages import conversation, overlapping_halves, real_frames
from app.demo.nodes import running_node
from sdstore.client import StoreClient
from sdstore.client.records import PublishItem
from sdstore.sds.codec import decode

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
            (each.message.message_id, each.digest) for each in client.messages(channel.channel_id)
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
