"""Live messages as server-sent events: `message`, `relayed`, `left_out` for a stored message whose
content is lost, and `gap` for a reader who fell behind.

Comments and stored messages carry a feed cursor as event ID, so a reader that reconnects
(`Last-Event-ID`, or `?after=`) goes on where it was, even if nothing has come yet. After a `gap` it
finds what it missed in the feed behind the cursor that the event names.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import Header

from app.callers import Scope
from app.entries import Entry
from app.http.call import Call, StreamedReply
from app.http.openapi import EVENTS
from app.http.pages import After, CursorKind, Cursors
from app.http.replies import event, event_stream, heartbeat, message_json
from app.http.routing import CurrentCall, Routes
from app.ingest.prepare import Relayed
from app.live import Heartbeat, LiveEvent, LiveMessage, Skip, Wanted
from app.store.entryrows import LeftOut
from sdstore.sds.jsonform import to_json

routes = Routes("live")

LastEventId = Annotated[str | None, Header(description="where a reader that reconnects was")]


@routes.add("GET /v1/live", Scope.READ, replies=EVENTS)
async def live(
    call: CurrentCall, after: After = None, last_event_id: LastEventId = None
) -> StreamedReply:
    """New messages of every channel as they come, and before them those after a cursor."""
    return await _stream(call, call.caller.covers, last_event_id or after)


@routes.add("GET /v1/channels/{channel_id}/live", Scope.READ, replies=EVENTS)
async def channel_live(
    call: CurrentCall, channel_id: str, after: After = None, last_event_id: LastEventId = None
) -> StreamedReply:
    """New messages of a channel as they come, and before them those after a cursor."""
    return await _stream(call, channel_id.__eq__, last_event_id or after)


async def _stream(call: Call, wanted: Wanted, cursor: str | None) -> StreamedReply:
    cursors = Cursors(call.node.store.database_id)
    after = await cursors.read_arrival(call.node.store, cursor)
    place = await call.node.live.admit()
    events = call.node.live.events(wanted, after, call.address, place)
    return event_stream(_parts(events, cursors))


async def _parts(
    events: AsyncGenerator[Sequence[LiveEvent], None], cursors: Cursors
) -> AsyncGenerator[Sequence[bytes], None]:
    async with aclosing(events) as open_events:
        async for some in open_events:
            part = [_chunk(each, cursors) for each in some]
            # Keep only the rendered bytes, which readers share, while the reader is not reading.
            del some
            yield part


def _chunk(each: LiveEvent, cursors: Cursors) -> bytes:
    match each:
        case Heartbeat(last):
            return heartbeat(cursors.write(CursorKind.ARRIVAL, *last))
        case Skip(after):
            # No ID: a reader that reconnects now gets what it missed.
            cursor = cursors.write(CursorKind.ARRIVAL, *after)
            return event("gap", {"cursor": cursor})
        case LiveMessage():
            if not each.rendered:
                each.rendered = _message(each, cursors)
            return each.rendered


def _message(message: LiveMessage, cursors: Cursors) -> bytes:
    if isinstance(message.item, Entry):
        event_id = cursors.write(CursorKind.ARRIVAL, *message.item.place)
        return event("message", message_json(message.item), event_id)
    if isinstance(message.item, LeftOut):
        event_id = cursors.write(CursorKind.ARRIVAL, *message.item.place)
        return event("left_out", _left_out_json(message.item), event_id)
    return event("relayed", _relayed_json(message.item))


def _left_out_json(left_out: LeftOut) -> dict[str, str]:
    return {
        "channel_id": left_out.channel_id,
        "message_id": left_out.message_id,
        "digest": left_out.digest.hex(),
    }


def _relayed_json(relayed: Relayed) -> dict[str, Any]:
    meta = {"kind": relayed.message.kind.value, "dialect": relayed.dialect.label}
    return {"message": to_json(relayed.message), "meta": meta}
