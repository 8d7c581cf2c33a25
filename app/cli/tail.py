"""The verb that follows a channel."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import httpx
import typer
from rich.text import Text

from app.cli.node import is_known, node_client
from app.cli.options import DEFAULT_NODE, AsJson, NodeUrl
from app.cli.output import print_json, print_note, printable, stdout
from app.cli.show import content_preview, message_document
from sdstore.client import StoreClient
from sdstore.client.errors import StoreError, error_of_reply
from sdstore.client.live import EventReader, ServerEvent

verbs = typer.Typer()

LAST_DEFAULT = 10
LAST_MAX = 1_000
RECONNECT_S = 1.0
SILENCE_S_MAX = 60.0  # a node says something, if only a comment, more often than that
CONNECT_S_MAX = 5.0
EVENT_BYTES_MAX = 4 << 20  # a frame of 1 MiB as JSON, with its names


@verbs.command()
def tail(
    channel_id: Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel to follow.")],
    last: Annotated[
        int,
        typer.Option("--last", "-n", min=0, max=LAST_MAX, help="Show that many older ones first."),
    ] = LAST_DEFAULT,
    no_follow: Annotated[
        bool, typer.Option("--no-follow", help="Show what is there and end.")
    ] = False,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """Show the newest messages of a channel, and new ones as they come, until Ctrl-C."""
    show = print_json if as_json else _print
    with node_client(node) as client:
        if no_follow:
            newest = _newest(client, channel_id, last)
            if not newest:
                client.channel(channel_id)  # fails where the node knows no such channel
            for document in newest:
                show(document)
            return
        follower = _Follower(node, channel_id)
        seen: set[str] = set()
        # The stream is open before the older messages are read: nothing falls between.
        with follower.connected() as events:
            for document in _newest(client, channel_id, last):
                seen.add(document["meta"]["digest"])
                show(document)
            if not seen and not is_known(client, channel_id):
                print_note(f"no message of channel {printable(channel_id)} is here yet; waiting")
            _show_events(events, follower, seen, show)
        while True:
            print_note("the node went away; trying again")
            time.sleep(RECONNECT_S)
            _follow_again(follower, seen, show)


class _Follower:
    """Where a reader of the live stream is."""

    def __init__(self, node: str, channel_id: str) -> None:
        self.cursor = ""
        self._url = f"{node.rstrip('/')}/v1/channels/live"
        self._channel_id = channel_id

    @contextmanager
    def connected(self) -> Iterator[Iterator[ServerEvent]]:
        """The events behind the cursor, or from now on: the node has said where that is."""
        query = {"channel_id": self._channel_id} | ({"after": self.cursor} if self.cursor else {})
        timeout = httpx.Timeout(SILENCE_S_MAX, connect=CONNECT_S_MAX)
        try:
            with httpx.stream("GET", self._url, params=query, timeout=timeout) as answer:
                if not answer.is_success:
                    raise error_of_reply(answer.status_code, answer.headers, answer.read())
                events = self._tracked(answer.iter_bytes())
                # A bare ID. What comes behind it is not missed, on this connection or the next.
                if next(events, None) is None:
                    raise StoreError("unreachable", 0, "the node ended the stream")
                yield events
        except httpx.TransportError as error:
            raise StoreError("unreachable", 0, str(error) or type(error).__name__) from None

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
    """Show events until the stream ends, or has a gap that the next connection fills."""
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
        # Only the older messages that were shown first can come twice.
        seen.discard(digest)


def _newest(client: StoreClient, channel_id: str, count: int) -> list[dict[str, Any]]:
    if not count:
        return []
    found = []
    newest_first = client.messages(
        channel_id, direction="desc", page_size=count, on_left_out=_tell_left_out
    )
    for message, _ in zip(newest_first, range(count), strict=False):
        found.append(message_document(message.frame, message.digest, message.dialect))
    return list(reversed(found))


def _tell_left_out(digests: tuple[bytes, ...]) -> None:
    for digest in digests:
        print_note(f"the node has lost the content of {digest.hex()}")


def _print(document: dict[str, Any]) -> None:
    message, meta = document["message"], document["meta"]
    line = Text()
    line.append(f"{message.get('lamport_timestamp', '–'):>14} ", style="dim")
    line.append(f"{printable(message['message_id'])} ")
    line.append(printable(message.get("sender_id", "") or "–"), style="bold cyan")
    line.append(f" {printable(content_preview(message))}")
    if kind := meta.get("kind"):
        line.append(f" ({kind})", style="dim")
    stdout().print(line)
