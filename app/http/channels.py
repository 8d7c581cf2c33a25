"""Channels: the list, one with its root, and its messages page by page; the feed over all."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query

from app.entries import START
from app.errors import Code, Problem
from app.http.admission import Reader, ReaderInTurn
from app.http.call import Reply
from app.http.forms import Form
from app.http.models import ChannelPage, ChannelWithRoot, GapPage, MessagePage
from app.http.openapi import documented, reply
from app.http.pages import (
    After,
    CursorKind,
    Cursors,
    Lamport,
    PageLimit,
    frame_bytes_max,
    next_link,
    page_reply,
    read_described,
)
from app.http.replies import json_reply, protobuf_reply
from app.http.routing import NodeRoute, get_by_id
from app.server.limits import DEFAULT_LIMITS
from app.store.channelpages import ChannelInfo
from app.store.entryrows import Position
from app.store.gaps import Gap
from sdstore.wire import store_pb2 as wire

router = APIRouter(tags=["channels"], route_class=NodeRoute)

GapLimit = Annotated[int, Query(ge=1, le=DEFAULT_LIMITS.gaps_max)]


class Order(StrEnum):
    """In which order a channel is read."""

    LOG = "log"
    ARRIVAL = "arrival"


class Direction(StrEnum):
    """Which end of the order comes first."""

    ASC = "asc"
    DESC = "desc"


@router.get(
    "/v1/channels", **documented({200: reply("A page of channels", ChannelPage, wire.ChannelPage)})
)
async def list_channels(
    call: ReaderInTurn,
    after: After = None,
    limit: PageLimit = DEFAULT_LIMITS.page_items_default,
    prefix: Annotated[str | None, Query(description="only channels that begin so")] = None,
) -> Reply:
    """Channels by name, as UTF-8 bytes."""
    cursors = Cursors.of(call.node.store)
    position = cursors.read(CursorKind.CHANNELS, after)
    last = None if position is None else str(position[0])
    found = await call.readable.channels(last, limit, prefix)
    token = (
        cursors.write(CursorKind.CHANNELS, found[-1].channel_id) if len(found) == limit else None
    )
    headers = next_link(call, token)
    if call.form is Form.PROTOBUF:
        page = wire.ChannelPage(channels=map(_channel_protobuf, found), next=token or "")
        return protobuf_reply(page, 200, headers)
    document = {"channels": list(map(_channel_json, found)), "next": token}
    return json_reply(document, 200, headers)


BELOW_A_CHANNEL = ("messages", "gaps", "order", "live")
"""Last segments of routes below a channel: without `channel_id` their paths look like channels."""


@get_by_id(
    router,
    "/v1/channels/{channel_id:segment}",
    **documented({200: reply("The channel", ChannelWithRoot, wire.Channel)}),
)
async def get_channel(call: Reader, channel_id: str) -> Reply:
    """Count, first and last Lamport timestamp, and the root: BLAKE3 over the sorted digests."""
    channel = await call.node.store.channels.named(channel_id)
    if channel is None:
        detail = f"no message of channel {channel_id!r} is here"
        if channel_id in BELOW_A_CHANNEL:
            detail += f"; to read the {channel_id} of a channel, add ?channel_id="
        raise Problem(Code.NOT_FOUND, detail)
    # More messages may have come since, and count and root must match.
    count, root = await call.node.index.root(channel_id, channel.count)
    channel = replace(channel, count=count)
    if call.form is Form.PROTOBUF:
        message = _channel_protobuf(channel)
        message.root = root
        return protobuf_reply(message)
    return json_reply({**_channel_json(channel), "root": root.hex()})


@get_by_id(
    router,
    "/v1/channels/{channel_id:segment}/messages",
    **documented({200: reply("A page of messages", MessagePage, wire.MessagePage)}),
)
async def list_messages(
    call: ReaderInTurn,
    channel_id: str,
    after: After = None,
    before: Annotated[str | None, Query(description="a `next` to stop at")] = None,
    limit: PageLimit = DEFAULT_LIMITS.page_items_default,
    order: Order = Order.LOG,
    direction: Direction = Direction.ASC,
    from_lamport: Lamport = None,
    to_lamport: Lamport = None,
) -> Reply:
    """A page of the channel; `after` and `before` count in the direction of reading."""
    cursors = Cursors.of(call.node.store)
    kind = CursorKind(order.value)

    async def position(token: str | None) -> Position | None:
        if order is Order.ARRIVAL:
            return await cursors.read_arrival(call.node.store, token)
        return cursors.read(kind, token)

    read = partial(
        call.node.store.channels.page,
        channel_id,
        order=order.value,
        direction=direction.value,
        after=await position(after),
        before=await position(before),
        lamport_from=from_lamport,
        lamport_to=to_lamport,
        bytes_max=frame_bytes_max(call),
    )
    page, described = await read_described(call, limit, lambda limit: read(limit=limit))
    token = None if page.next is None else cursors.write(kind, *page.next)
    return page_reply(call, page, described, token)


@get_by_id(
    router,
    "/v1/channels/{channel_id:segment}/gaps",
    **documented({200: reply("A page of gaps", GapPage, wire.GapPage)}),
)
async def list_gaps(
    call: ReaderInTurn,
    channel_id: str,
    after: After = None,
    limit: GapLimit = DEFAULT_LIMITS.page_items_default,
) -> Reply:
    """Message IDs that the channel's histories name and the store lacks, with their hints.

    `named_by` is `history`, or `sync` if only sync messages name the message. They can be the only evidence of
    a lost last message, but anybody can send them: the list has the newest 1,000 such IDs of a channel.
    `met_as_sync`: a sync message with the ID arrived. Participants of version 1 name theirs in histories, but
    anybody can publish one with any ID, so the gap stays. `state` is `missing`, `withheld` or `refused`.
    """
    cursors = Cursors.of(call.node.store)
    position = cursors.read(CursorKind.GAPS, after)
    page = await call.node.store.gaps.page(channel_id, position, limit)
    token = None if page.next is None else cursors.write(CursorKind.GAPS, *page.next)
    headers = next_link(call, token)
    absences = await call.absences([gap.message_id for gap in page.gaps], channel_id)
    if call.form is Form.PROTOBUF:
        gaps = [
            wire.Gap(
                message_id=gap.message_id,
                retrieval_hints=gap.hints,
                met_as_sync=gap.met_as_sync,
                state=absences.get(gap.message_id, "missing"),
                named_by=_named_by(gap),
            )
            for gap in page.gaps
        ]
        message = wire.GapPage(gaps=gaps, next=token or "")
        return protobuf_reply(message, 200, headers)
    described = [_gap_json(gap, absences.get(gap.message_id, "missing")) for gap in page.gaps]
    document = {"gaps": described, "next": token}
    return json_reply(document, 200, headers)


@router.get(
    "/v1/feed", **documented({200: reply("A page of messages", MessagePage, wire.MessagePage)})
)
async def feed(
    call: ReaderInTurn,
    after: After = None,
    limit: PageLimit = DEFAULT_LIMITS.page_items_default,
) -> Reply:
    """Every channel in arrival order, up to the watermark; follow `next` and miss nothing."""
    cursors = Cursors.of(call.node.store)
    place = await cursors.read_arrival(call.node.store, after) or START
    bytes_max = frame_bytes_max(call)
    read = partial(
        call.node.store.channels.feed,
        place.number,
        bytes_max=bytes_max,
        channel_nos=await call.channel_nos(),
    )
    page, described = await read_described(call, limit, lambda limit: read(limit=limit))
    # A follower always gets a place to go on from, also at the end.
    token = cursors.write(CursorKind.ARRIVAL, *(page.last or place))
    return page_reply(call, page, described, token)


def _gap_json(gap: Gap, state: str) -> dict[str, Any]:
    return {
        "message_id": gap.message_id,
        "hints": [hint.hex() for hint in gap.hints],
        "met_as_sync": gap.met_as_sync,
        "state": state,
        "named_by": _named_by(gap),
    }


def _named_by(gap: Gap) -> str:
    return "sync" if gap.is_named_by_sync else "history"


def _channel_json(channel: ChannelInfo) -> dict[str, Any]:
    return {
        "channel_id": channel.channel_id,
        "count": channel.count,
        "lamport_first": str(channel.lamport_first),
        "lamport_last": str(channel.lamport_last),
    }


def _channel_protobuf(channel: ChannelInfo) -> wire.Channel:
    return wire.Channel(
        channel_id=channel.channel_id,
        count=channel.count,
        lamport_first=channel.lamport_first,
        lamport_last=channel.lamport_last,
    )
