"""Live messages as server-sent events: `message`, `relayed`, `left_out` for a stored message whose
content is lost, `retired` and `released`, and `gap` for a reader who fell behind. A reader that names indexers also gets `confirmed`.

Comments and stored messages carry a feed cursor as event ID, so a reader that reconnects
(`Last-Event-ID`, or `?after=`) goes on where it was, even if nothing has come yet. After a `gap` it
finds what it missed in the feed behind the cursor that the event names.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from pydantic import BaseModel, ConfigDict, FailFast, Field

from app.access.callers import Scope
from app.entries import Entry
from app.errors import Code, Problem
from app.http.admission import NodeRoute, Reader, admitted, get_by_id, json_body
from app.http.call import (
    Call,
    Headers,
    Shape,
    Shaped,
    StreamedReply,
    event,
    event_stream,
    heartbeat,
    message_json,
    stream_coding,
)
from app.http.channels import After, CursorKind, Cursors
from app.http.openapi import EVENTS, body, content, documented
from app.http.orders import (
    Changes,
    Indexers,
    NonIndexers,
    Relayed,
    order_caller,
    read_place,
    wanted_order,
    write_place,
)
from app.ingest.prepare import Relayed as RelayedMessage
from app.live.hub import Heartbeat, LiveEvent, LiveMessage, Notice, Packer, Skip, Wanted
from app.orders import MAX_SEQ, Order
from app.orders import Wanted as OrderWanted
from app.store.entryrows import LeftOut
from recon.agreement import Interest
from sdstore.sds.codec import to_json

router = APIRouter(tags=["live"], route_class=NodeRoute)

CONFIRMED_IDS_MAX = 100
"""IDs of one event `confirmed`: 100 kB of the longest. Others follow at once in further events."""

SHORT_IDS_EACH = 16
"""Messages of a stream with a short `meta` for one that has an ID: with 90 bytes it would be half of each event."""

LIVE_BODY_BYTES_MAX = 512 * 1024
"""200 names of 256 bytes, with each byte escaped as JSON allows."""

Compress = Annotated[
    bool,
    Query(
        description="zstd or gzip, by Accept-Encoding. Compressed lengths leak content to an observer of the network: "
        "do not use it for streams that mix secrets with what strangers write"
    ),
]

LastEventId = Annotated[str | None, Header(description="where a reader that reconnects was")]


class LiveBody(BaseModel):
    """The channels of a live stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    channels: Annotated[list[str], FailFast()] = Field(default_factory=list)
    prefixes: Annotated[list[str], FailFast()] = Field(
        default_factory=list, description="all channels that begin with one"
    )
    after: str | None = Field(None, description="the ID of the last event")


@router.get("/v1/live", **documented(EVENTS))
async def live(
    call: Reader,
    shape: Shaped,
    after: After = None,
    last_event_id: LastEventId = None,
    compress: Compress = False,
) -> StreamedReply:
    """New messages of every channel as they come, and before them those after a cursor.

    Events: `message` (as stored; its ID is a cursor of the feed), `relayed` (a sync or ephemeral message, not
    stored, no ID), `left_out` (a stored message whose content is lost), `superseded`, `retired` and `released` (what
    happened to a message while the reader was connected), `gap` (the reader missed messages: the
    feed after its `cursor` has them, unless that answers 410 because the database went back). With senders also
    `confirmed` and, if ordering fails, `problem`. Comments carry IDs too, from the first one on.
    """
    return await _stream(call, call.caller.covers, last_event_id or after, shape, compress=compress)


@get_by_id(router, "/v1/channels/{channel_id:segment}/live", **documented(EVENTS))
async def channel_live(
    call: Reader,
    channel_id: str,
    shape: Shaped,
    indexer: Indexers,
    non_indexer: NonIndexers,
    relayed: Relayed,
    change: Changes,
    confirmed_after: Annotated[
        str | None, Query(description="a `next_confirmed`, or the `cursor` of an event `confirmed`")
    ] = None,
    after: After = None,
    last_event_id: LastEventId = None,
    compress: Compress = False,
) -> StreamedReply:
    """New messages of a channel as they come, and before them those after a cursor.

    With senders as for the order of the channel, also what joins its confirmed prefix: events `confirmed` with
    `message_ids` (up to 100, then another event follows), `confirmed_count`, `tail_count`, `cursor`, and `rewound`: how
    many messages at the end of the order, as it was at the last event, have to be taken back, at most. The first one
    has what was confirmed after `confirmed_after`, or the present position alone. They have no event ID, so a reader
    that reconnects passes `confirmed_after`. An event `problem` ends them, and the messages continue.
    """
    confirmations = None
    if indexer or non_indexer or relayed or change or confirmed_after is not None:
        order = wanted_order(call, channel_id, indexer, non_indexer, relayed, change)
        confirmations = _Confirmations(call, order, confirmed_after)
        await confirmations.begin()
    return await _stream(
        call,
        channel_id.__eq__,
        last_event_id or after,
        shape,
        confirmations,
        compress=compress,
    )


@router.post("/v1/live", **documented(EVENTS, body(content(LiveBody))))
async def live_of_many(
    call: Annotated[Call, admitted(Scope.READ, body_bytes_max=lambda _: LIVE_BODY_BYTES_MAX)],
    wanted: Annotated[LiveBody, json_body(LiveBody)],
    shape: Shaped,
    compress: Compress = False,
) -> StreamedReply:
    """One stream of the channels of a list, and of all whose names begin with a prefix.

    The node keeps nothing of it: to change the list, or to go on, send it again with the last event's ID as `after`. A
    name that the caller may not read is refused (`forbidden`): `list` and `index` of the problem say which.
    """
    names = (*wanted.channels, *wanted.prefixes)
    if not names:
        raise Problem(Code.INVALID_BODY, "name a channel or a prefix; GET /v1/live has them all")
    limits = call.node.limits
    if len(names) > limits.live_names_max:
        detail = f"{len(names)} channels and prefixes, at most {limits.live_names_max}"
        raise Problem(Code.TOO_MANY_ITEMS, detail)
    for name in names:
        if len(name.encode()) > limits.channel_id_bytes_max:
            detail = f"{name[:80]!r}…: at most {limits.channel_id_bytes_max} bytes"
            raise Problem(Code.CHANNEL_ID_TOO_LONG, detail)
    interest = Interest.make(
        channels=frozenset(wanted.channels), prefixes=frozenset(wanted.prefixes)
    )
    covers = {"channels": call.caller.covers, "prefixes": call.caller.covers_prefix}
    for kind, listed in (("channels", wanted.channels), ("prefixes", wanted.prefixes)):
        for at, name in enumerate(listed):
            if not covers[kind](name):
                detail = f"the credentials do not cover {kind}[{at}]"
                raise Problem(Code.FORBIDDEN, detail, extra={"list": kind, "index": at})
    call.free_body()
    return await _stream(call, interest.matches, wanted.after, shape, compress=compress)


async def _stream(
    call: Call,
    wanted: Wanted,
    cursor: str | None,
    shape: Shape,
    confirmations: _Confirmations | None = None,
    *,
    compress: bool,
) -> StreamedReply:
    cursors = Cursors.of(call.node.store)
    after = await cursors.read_arrival(call.node.store, cursor)
    place = await call.node.live.hub.admit()
    events = call.node.live.hub.events(wanted, after, call.address, place)
    parts = _parts(events, cursors, shape, confirmations)
    if not compress:
        return event_stream(parts)
    headers: Headers = [(b"vary", b"accept-encoding")]
    coding = stream_coding(call.headers.get(b"accept-encoding"))
    if coding is not None and (packer := call.node.live.hub.take_packer(coding)) is not None:
        headers.append((b"content-encoding", coding.encode()))
        parts = _packed(parts, packer)
    return event_stream(parts, headers)


async def _packed(
    parts: AsyncGenerator[Sequence[bytes], None], packer: Packer
) -> AsyncGenerator[Sequence[bytes], None]:
    async with aclosing(parts) as open_parts:
        async for part in open_parts:
            yield [packer.pack(part)]
        yield [packer.end()]


async def _parts(
    events: AsyncGenerator[Sequence[LiveEvent], None],
    cursors: Cursors,
    shape: Shape,
    confirmations: _Confirmations | None,
) -> AsyncGenerator[Sequence[bytes], None]:
    count = 0
    async with aclosing(events) as open_events:
        async for some in open_events:
            part = [_chunk(each, cursors, shape) for each in some]
            if shape.is_short and some:
                count += sum(isinstance(each, LiveMessage) for each in some)
                if count >= SHORT_IDS_EACH and (line := _id_line(some[-1], cursors)):
                    count = 0
                    part.insert(-1, line)
            if confirmations is not None:
                confirmations.note(some)
            # Keep only the rendered bytes, which readers share, while the reader is not reading.
            del some
            yield part
            while confirmations is not None and (confirmed := await confirmations.next()):
                yield [confirmed]


class _Confirmations:
    """What one reader knows of the confirmed prefix. All readers of an order share the cost of computing it."""

    def __init__(self, call: Call, wanted: OrderWanted, confirmed_after: str | None) -> None:
        self._orders = call.node.orders
        self._wanted = wanted
        self._caller = order_caller(call)
        self._cursors = Cursors.of(call.node.store)
        self._place = read_place(self._cursors, wanted, confirmed_after)
        self._through_seq = 0
        self._has_begun = False
        self._has_ended = False
        # The order as it was at the last event.
        self._version = self._length = 0

    async def begin(self) -> None:
        """Raise what a request for the order raises: once the stream has begun, an error could only end it."""
        async with self._orders.opened(self._wanted, self._caller) as order:
            if self._place is not None:
                await self._orders.hash_up_to(order, self._place.number)
                start = order.position(self._place) or 0
                if order.is_complete and start > order.ordering.confirmed_count:
                    raise Problem(Code.INVALID_CURSOR, "this cursor is in the tentative tail")
        self._through_seq = MAX_SEQ

    def note(self, events: Sequence[LiveEvent]) -> None:
        """The reader gets these events: confirmations can follow."""
        for each in events:
            match each:
                case LiveMessage(item=Entry() | LeftOut() as item):
                    self._through_seq = max(self._through_seq, item.seq)
                case Skip():
                    # The database may have gone back: read whatever it holds.
                    self._through_seq = MAX_SEQ

    async def next(self) -> bytes | None:
        """The next event; None if there is nothing new, or nothing that can be computed now."""
        if not self._through_seq or self._has_ended:
            return None
        try:
            async with self._orders.followed(
                self._wanted, self._caller, self._through_seq
            ) as order:
                await self._orders.hash_up_to(order, order.ordering.confirmed_count)
                return self._event(order)
        except Problem as problem:
            if problem.code in (Code.CURSOR_REWOUND, Code.ORDER_TOO_LARGE):
                self._has_ended = True
                return event("problem", problem.document())
            return (
                None  # the node is busy, or the budget spent: with the next events it tries again
            )

    def _event(self, order: Order) -> bytes | None:
        confirmed_count = order.ordering.confirmed_count
        start = confirmed_count if order.is_complete else None
        if self._place is not None:
            start = order.position(self._place)
        if start is None or start > confirmed_count:
            return None  # the order is not complete: with the next events it is read further
        stop = max(start, min(confirmed_count, start + CONFIRMED_IDS_MAX))
        if stop == confirmed_count and order.is_complete:
            self._through_seq = 0
        if stop == start and self._has_begun:
            return None
        rewound_count = max(0, self._length - order.first_changed_since(self._version))
        self._place = order.place(stop)
        self._version, self._length = order.version, len(order.ordering)
        document = {
            "message_ids": order.ordering.page(start, stop),
            "confirmed_count": stop,
            "tail_count": self._length - confirmed_count,
            "rewound": rewound_count if self._has_begun else 0,
            "cursor": write_place(self._cursors, self._wanted, self._place),
        }
        self._has_begun = True
        return event("confirmed", document)


def _chunk(each: LiveEvent, cursors: Cursors, shape: Shape) -> bytes:
    match each:
        case Heartbeat(last):
            return heartbeat(cursors.write(CursorKind.ARRIVAL, *last))
        case Skip(after):
            # No ID: a reader that reconnects now gets what it missed.
            cursor = cursors.write(CursorKind.ARRIVAL, *after)
            return event("gap", {"cursor": cursor})
        case LiveMessage():
            if shape not in each.rendered:
                each.rendered[shape] = _message(each, cursors, shape)
            return each.rendered[shape]


def _message(message: LiveMessage, cursors: Cursors, shape: Shape) -> bytes:
    if isinstance(message.item, Entry):
        event_id = None
        if not shape.is_short:
            event_id = cursors.write(CursorKind.ARRIVAL, *message.item.place)
        return event("message", message_json(message.item, shape=shape), event_id)
    if isinstance(message.item, LeftOut):
        event_id = cursors.write(CursorKind.ARRIVAL, *message.item.place)
        return event("left_out", _left_out_json(message.item), event_id)
    if isinstance(message.item, Notice):
        return event(message.item.name, _left_out_json(message.item))
    return event("relayed", _relayed_json(message.item, shape))


def _id_line(each: LiveEvent, cursors: Cursors) -> bytes:
    """The ID of an event that is rendered without one; empty for others."""
    match each:
        case LiveMessage(item=Entry() as entry):
            return b"id: %s\n" % cursors.write(CursorKind.ARRIVAL, *entry.place).encode()
    return b""


def _left_out_json(left_out: LeftOut | Notice) -> dict[str, str]:
    return {
        "channel_id": left_out.channel_id,
        "message_id": left_out.message_id,
        "digest": left_out.digest.hex(),
    }


def _relayed_json(relayed: RelayedMessage, shape: Shape) -> dict[str, Any]:
    shown = shape.shown(relayed.message)
    meta: dict[str, Any] = {}
    if not shape.is_short:
        meta = {"kind": relayed.message.kind.value, "dialect": relayed.dialect.label}
        if shown != relayed.message:
            meta["filter_left_out"] = True
    return {"message": to_json(shown), "meta": meta}
