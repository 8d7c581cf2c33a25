"""The verb indexer: a participant without people, whose votes confirm the order of a channel."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.main import loading
from app.cli.messages import Changes, change_argument
from app.cli.output import (
    DEFAULT_NODE,
    AsJson,
    CliError,
    Exit,
    access,
    node_url,
    print_json,
    print_note,
)
from app.server.logs import printable
from sdstore.errors import SdstoreError

if TYPE_CHECKING:
    from sdstore.ordering import RolesChange
    from sdstore.participant import ParticipantChannel, ParticipantDriver, ParticipantOptions

verbs = typer.Typer()


@verbs.command()
def indexer(
    channel_id: Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel.")],
    sender: Annotated[
        str, typer.Option("--as", metavar="SENDER", help="The sender ID of this indexer.")
    ],
    file: Annotated[
        Path,
        typer.Option(
            "--file", metavar="FILE", help="Where it keeps its log and its state; made if absent."
        ),
    ],
    indexers: Annotated[
        list[str] | None,
        typer.Option(
            "--indexer",
            metavar="SENDER",
            help="The first indexers of the channel, the same for all members; may be repeated. Default: this one alone.",
        ),
    ] = None,
    change: Changes = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            "--node", metavar="URL", help="URL of a node of the channel; may be repeated."
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Confirm the order of a channel, until Ctrl-C: vote while messages are not confirmed.

    Two indexers that write as one sender break the order for good: run it once, and keep its file.
    """
    with loading():  # numpy comes with it: the help of all verbs does without
        from sdstore import participant as sds  # noqa: PLC0415
        from sdstore.client import AsyncStoreClient  # noqa: PLC0415
    urls = [node_url(each) for each in nodes or [DEFAULT_NODE]]
    changes = [change_argument(each) for each in change or ()]
    if any(each.roles.relayed for each in changes):
        raise CliError(Exit.USAGE, "invalid_parameter", "an indexer knows no `relayed` senders")
    options = sds.ParticipantOptions(ordered=True, indexers=tuple(indexers or [sender]))
    tokens = {url: access.token(url) for url in urls}  # also says what is wrong with them
    try:
        with sds.ParticipantFile(file) as kept:
            driver = sds.ParticipantDriver(
                urls,
                kept,
                connect=lambda url: AsyncStoreClient(
                    url, token=tokens[url], tls=access.tls(), options=sds.DriverOptions().client
                ),
            )
            return asyncio.run(_run(driver, channel_id, sender, options, changes, as_json=as_json))
    except SdstoreError as error:
        code = Exit.LOCAL_FAULT
        if error.code in {"other_roles", "invalid_indexers", "bad_option", "bad_argument"}:
            code = Exit.USAGE
        raise CliError(code, error.code, error.detail) from error


async def _run(
    driver: ParticipantDriver,
    channel_id: str,
    sender: str,
    options: ParticipantOptions,
    changes: list[RolesChange],
    *,
    as_json: bool,
) -> int:
    """Until SIGTERM, which ends it as well as Ctrl-C does, with exit code 0."""
    async with driver:
        channel = await driver.join(channel_id, sender, options)
        reading = asyncio.create_task(_read(channel, changes, as_json=as_json))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, reading.cancel)
        await asyncio.wait([reading])
        if not reading.cancelled():
            reading.result()
        return Exit.DONE


async def _read(channel: ParticipantChannel, changes: list[RolesChange], *, as_json: bool) -> None:
    from sdstore import participant as sds  # noqa: PLC0415 - as above

    async for event in channel.events():
        match event:
            case sds.Deliver(number):
                await channel.confirm(number)
            case sds.OrderChanged():
                for each in changes[len(channel.order.changes) :]:
                    if not channel.order.ordering.is_confirmed(each.after):
                        break
                    channel.change_roles(each.roles.indexers, each.after)
                _show(_order_document(channel), as_json=as_json)
            case sds.Connection(url, state, code, detail):
                document = {"store": url, "state": state, "code": code, "detail": detail}
                _show(document, as_json=as_json)
            case (
                sds.Unpublished(code, detail)
                | sds.Unsaved(code, detail)
                | sds.Rejected(_, code, detail)
            ):
                kind = type(event).__name__.lower()
                _show({"problem": kind, "code": code, "detail": detail}, as_json=as_json)


def _order_document(channel: ParticipantChannel) -> dict[str, Any]:
    ordering = channel.order.ordering
    waits_for = ordering.waits_for
    return {
        "confirmed_count": ordering.confirmed_count,
        "tail_count": len(ordering) - ordering.confirmed_count,
        "waits_for": [] if waits_for is None else [*waits_for.sender_ids],
        "breaches": [f"{each.kind}: {each.detail}" for each in ordering.breaches],
    }


def _show(document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    parts = (f"{name}: {_text(value)}" for name, value in document.items() if value not in ("", []))
    print_note(", ".join(parts))


def _text(value: object) -> str:
    return printable(", ".join(value) if isinstance(value, list) else str(value))
