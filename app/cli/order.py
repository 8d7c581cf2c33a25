"""The verb `order`: a channel in the order that never changes, then its tentative tail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from app.cli.messages import content_preview, message_document
from app.cli.options import DEFAULT_NODE, AsJson, NodeUrl, node_client
from app.cli.output import (
    Exit,
    counted,
    print_json,
    print_note,
    print_table,
    stderr,
    table,
)
from app.errors import Code
from app.server.logs import printable
from sdstore.client import StoreClient
from sdstore.client.errors import StoreError
from sdstore.client.exchange import EmptyPages
from sdstore.client.records import OrderItem, OrderPage

verbs = typer.Typer()

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


@verbs.command()
def order(
    channel_id: Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel.")],
    indexer: Indexers = None,
    non_indexer: NonIndexers = None,
    relayed: Relayed = None,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> int:
    """Show the order of a channel: the confirmed prefix, which never changes, then the tentative tail."""
    with node_client(node) as client:
        items, page = _read(client, channel_id, indexer or [], non_indexer or [], relayed or [])
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
    rows = [_row(item) for item in items]
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
            "next_confirmed": page.next_confirmed,
        }
    }


def _row(item: OrderItem) -> tuple[str, str, str, str, str]:
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
