"""The order of a channel: a confirmed prefix that never changes, and a tentative tail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import filterfalse, islice
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, ValidationError

from app.access.callers import Rate
from app.entries import Entry
from app.errors import Code, Problem
from app.http.admission import ClientGoneError, NodeRoute, Reader, get_by_id
from app.http.call import (
    Call,
    Form,
    Reply,
    json_reply,
    message_json,
    message_protobuf,
    protobuf_reply,
)
from app.http.channels import (
    RENDERED_PER_TURN,
    After,
    CursorKind,
    Cursors,
    PageLimit,
    fitted,
    next_link,
)
from app.http.openapi import OrderPage, documented, reply
from app.orders import NAMED_MAX, Known, Order, OrderCaller, Place, Wanted, WantedChange
from app.server.limits import DEFAULT_LIMITS
from app.server.sharing import Turns
from sdstore.ordering import Breach
from sdstore.wire import store_pb2 as wire

router = APIRouter(tags=["channels"], route_class=NodeRoute)

_T = TypeVar("_T")

ITEM_BYTES = 200
"""Bytes of an item of a reply beside its names: its digest in hex, names of members."""

Indexers = Annotated[
    list[str],
    Query(default_factory=list, description="a sender whose references confirm; repeatable"),
]
NonIndexers = Annotated[
    list[str],
    Query(
        default_factory=list,
        description="a sender that is no indexer, as all that are not named; repeatable",
    ),
]
Relayed = Annotated[
    list[str],
    Query(
        default_factory=list,
        description="a sender whose messages are in the tail once an indexer names them; repeatable",
    ),
]

Changes = Annotated[
    list[str],
    Query(
        alias="change",
        default_factory=list,
        description="other roles from a confirmed message on, as JSON: an object with `after`, the ID of that message, "
        "`indexers`, and `relayed` if there are any; repeatable, in order",
    ),
]


class _ChangeJson(BaseModel):
    """A `change` of a request."""

    model_config = {"extra": "forbid", "strict": True}

    after: str
    indexers: list[str]
    relayed: list[str] = Field(default_factory=list)


class _Page(NamedTuple):
    """A part of an order: its items from place `first` on, those contents that were read, cursors."""

    order: Order
    first: int
    items: Sequence[Known]
    contents: Mapping[bytes, Entry]
    next: str | None
    next_confirmed: str | None


@get_by_id(
    router,
    "/v1/channels/{channel_id:segment}/order",
    **documented({200: reply("A page of the order", OrderPage, wire.OrderPage)}),
)
async def channel_order(
    call: Reader,
    channel_id: str,
    indexer: Indexers,
    non_indexer: NonIndexers,
    relayed: Relayed,
    change: Changes,
    after: After = None,
    limit: PageLimit = DEFAULT_LIMITS.page_items_default,
    include: Annotated[
        Literal["messages"] | None, Query(description="each item with its message")
    ] = None,
) -> Reply:
    """The confirmed prefix of the channel, which never changes, then its tentative tail.

    The node orders what it holds, by the senders that the caller names, from the start of the channel. Of messages with
    one ID the first that arrived counts. A cursor names the senders too, and stays valid in the prefix; 410
    `cursor_rewound`: the tail before it was ordered anew. One call orders a bounded number of messages: while
    `complete` is false, the same request with `next` goes on.
    """
    wanted = wanted_order(call, channel_id, indexer, non_indexer, relayed, change)
    lists = {
        "indexer": indexer, "non_indexer": non_indexer, "relayed": relayed, "change": change,
    }  # fmt: skip
    cursors = Cursors.of(call.node.store)
    write = partial(write_place, cursors, wanted)
    place = read_place(cursors, wanted, after)
    orders = call.node.orders
    async with orders.opened(wanted, order_caller(call)) as order:
        if call.has_left:
            raise ClientGoneError
        start = 0
        if place is not None:
            await orders.hash_up_to(order, place.number)
            found = order.position(place)
            if found is None:
                # This worker has not read so far yet: the same cursor continues.
                await orders.hash_up_to(order, order.ordering.confirmed_count)
                confirmed = write(order.place(order.ordering.confirmed_count))
                return await _reply(call, _Page(order, 0, [], {}, after, confirmed), lists)
            start = found

        async def read(bytes_max: int) -> Reply:
            items, contents = await _fitting(call, order, start, limit, bytes_max, include)
            stop = start + len(items)
            await orders.hash_up_to(order, stop)
            is_last = order.is_complete and stop == len(order.ordering)
            following = None if is_last else write(order.place(stop))
            confirmed = write(order.place(min(stop, order.ordering.confirmed_count)))
            page = _Page(order, start, items, contents, following, confirmed)
            return await _reply(call, page, lists)

        room_bytes = call.node.limits.reply_bytes_max
        with await call.node.sharing.replies.take(call.address, room_bytes):
            return await fitted(call, read)


def wanted_order(
    call: Call,
    channel_id: str,
    indexer: Iterable[str],
    non_indexer: Iterable[str],
    relayed: Iterable[str],
    change: Iterable[str],
) -> Wanted:
    """The order that a request names; `invalid_parameter`, `too_many_items`."""
    named = [*indexer, *non_indexer, *relayed]
    changes = [_change_of(each) for each in change]
    count = len(named) + sum(1 + len(each.indexers) + len(each.relayed) for each in changes)
    if count > call.node.limits.order_writers_max:
        detail = f"{count} senders and changes, at most {call.node.limits.order_writers_max}"
        raise Problem(Code.TOO_MANY_ITEMS, detail)
    if len(set(named)) < len(named) or "" in named:
        raise Problem(Code.INVALID_PARAMETER, "name each sender once; an empty name is no sender")
    return Wanted(channel_id, tuple(sorted(indexer)), tuple(sorted(relayed)), tuple(changes))


def _change_of(text: str) -> WantedChange:
    try:
        change = _ChangeJson.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Problem(
            Code.INVALID_PARAMETER,
            f"change is not an object with `after` and `indexers`: {where}: {first['msg']}",
        ) from None
    named = [*change.indexers, *change.relayed]
    if len(set(named)) < len(named) or "" in named:
        raise Problem(
            Code.INVALID_PARAMETER, "name each sender of a change once; an empty name is no sender"
        )
    return WantedChange(change.after, tuple(sorted(change.indexers)), tuple(sorted(change.relayed)))


def order_caller(call: Call) -> OrderCaller:
    """The caller of a request, as orders know it."""
    is_anonymous = call.caller.rate is Rate.ANONYMOUS
    return OrderCaller(call.caller.name, call.address, lambda: call.has_left, is_anonymous)


def write_place(cursors: Cursors, wanted: Wanted, place: Place) -> str:
    """The cursor of a place in an order."""
    return cursors.write(CursorKind.ORDER, wanted.name, *place)


def read_place(cursors: Cursors, wanted: Wanted, token: str | None) -> Place | None:
    """The place of a cursor; None for no cursor. Raises as `Cursors.read`."""
    fields = cursors.read(CursorKind.ORDER, token)
    if fields is None:
        return None
    name, number, digest = fields
    if name != wanted.name or int(number) < 0:
        raise Problem(Code.INVALID_CURSOR, "this cursor is of another channel or other writers")
    return Place(int(number), str(digest))


async def _fitting(
    call: Call, order: Order, start: int, limit: int, bytes_max: int, include: str | None
) -> tuple[list[Known], Mapping[bytes, Entry]]:
    """The items of a page from `start` on, at least one of those there are; and their content if wanted.

    Of an order that is not complete the tail is not shown.
    """
    end = len(order.ordering) if order.is_complete else order.ordering.confirmed_count
    items = [order.known[each] for each in order.ordering.page(start, min(end, start + limit))]
    store = call.node.store
    sizes: Mapping[bytes, int] = {}
    if include:
        sizes = await store.entries.frame_sizes([each.digest for each in items])
    count = 0
    for each in items:
        names_length = len(each.message_id) + len(each.sender_id or "")
        bytes_max -= ITEM_BYTES + names_length + sizes.get(each.digest, 0)
        if bytes_max < 0 and count:
            break
        count += 1
    items = items[:count]
    if not include:
        return items, {}
    with await call.node.sharing.turns[Turns.READS].take(call.address, 1):
        entries = await store.entries.by_digest([each.digest for each in items])
    return items, {entry.digest: entry for entry in entries}


async def _reply(call: Call, page: _Page, lists: Mapping[str, Sequence[str]]) -> Reply:
    """`lists`: the writers of the request, for the link to the next page."""
    headers = next_link(call, page.next, lists)
    order, ordering = page.order, page.order.ordering
    confirmed_count = ordering.confirmed_count
    tail_count = len(ordering) - confirmed_count
    missing = list(islice(filterfalse(order.has_content, ordering.missing), NAMED_MAX))
    breaches = ordering.breaches[:NAMED_MAX]
    left_out = list(islice(order.lost, NAMED_MAX))
    waits_for = ordering.waits_for
    if call.form is Form.PROTOBUF:
        message = wire.OrderPage(
            items=[await _item(page, at, _item_protobuf) for at in range(len(page.items))],
            confirmed_count=confirmed_count,
            tail_count=tail_count,
            waiting_count=ordering.waiting_count,
            missing=missing,
            breaches=[wire.OrderBreach(**_breach(each)) for each in breaches],
            senderless_count=order.senderless_count,
            complete=order.is_complete,
            next=page.next or "",
            next_confirmed=page.next_confirmed or "",
            left_out=left_out,
            indexers=[wire.OrderIndexer(**asdict(each)) for each in ordering.indexers],
            waits_for=None if waits_for is None else wire.OrderWaitsFor(**asdict(waits_for)),
        )
        return protobuf_reply(message, 200, headers)
    document = {
        "items": [await _item(page, at, _item_json) for at in range(len(page.items))],
        "confirmed_count": confirmed_count,
        "tail_count": tail_count,
        "waiting_count": ordering.waiting_count,
        "missing": missing,
        "breaches": [_breach(each) for each in breaches],
        "senderless_count": order.senderless_count,
        "complete": order.is_complete,
        "next": page.next,
        "next_confirmed": page.next_confirmed,
        "left_out": [digest.hex() for digest in left_out],
        "indexers": [asdict(each) for each in ordering.indexers],
        "waits_for": None if waits_for is None else asdict(waits_for),
    }
    return json_reply(document, 200, headers)


def _breach(breach: Breach) -> dict[str, str]:
    return {
        "kind": breach.kind.value,
        "sender_id": breach.sender_id,
        "message_id": breach.message_id,
        "other_message_id": breach.other_message_id,
        "detail": breach.detail,
    }


async def _item(page: _Page, at: int, write: Callable[[Known, bool, Entry | None], _T]) -> _T:
    """One item in one form; other callers of the event loop get their turn in between."""
    if page.contents and at % RENDERED_PER_TURN == 0:
        await asyncio.sleep(0)
    known = page.items[at]
    is_confirmed = page.first + at < page.order.ordering.confirmed_count
    return write(known, is_confirmed, page.contents.get(known.digest))


def _item_json(known: Known, is_confirmed: bool, entry: Entry | None) -> dict[str, Any]:
    item = {
        "message_id": known.message_id,
        "sender_id": known.sender_id,
        "digest": known.digest.hex(),
        "confirmed": is_confirmed,
    }
    return item if entry is None else item | message_json(entry)


def _item_protobuf(known: Known, is_confirmed: bool, entry: Entry | None) -> wire.OrderItem:
    return wire.OrderItem(
        message_id=known.message_id,
        sender_id=known.sender_id or "",
        digest=known.digest,
        confirmed=is_confirmed,
        message=None if entry is None else message_protobuf(entry),
    )
