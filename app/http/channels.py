"""Channels: the list, one with its root, its messages page by page, the feed over all; and the pages of any list.

A page has a cursor to go on from, a bound in bytes, and both forms of a reply.

A cursor is an opaque token: base64url over a checksum, a tag of the database, and the sealed position.
Only this database's processes can make or read one: positions have arrival numbers, which show a caller
with a part of the channels how much is in the others. It grants nothing. A token of another kind, database
or maker is an error and never a wrong place to go on.
"""

from __future__ import annotations

import asyncio
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache, partial
from struct import Struct
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import orjson
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from fastapi import APIRouter, Query
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from app.entries import START, Entry, Token
from app.errors import Code, Problem
from app.http.admission import NodeRoute, Reader, ReaderInTurn, get_by_id
from app.http.call import (
    JSON_HEADERS,
    Call,
    Form,
    Headers,
    Reply,
    Shape,
    Shaped,
    json_reply,
    message_json,
    message_protobuf,
    protobuf_reply,
    raw_path,
)
from app.http.openapi import ChannelPage, ChannelWithRoot, GapPage, MessagePage, documented, reply
from app.server.limits import DEFAULT_LIMITS
from app.store.channelpages import ChannelInfo, Page
from app.store.claims import HintPage
from app.store.entryrows import Position
from app.store.histories import Gap
from app.store.lookups import Meta
from app.store.store import Store
from sdstore.wire import store_pb2 as wire

# ---- pages

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
TOKEN_CHARACTERS_MAX = 9_000
"""The longest token but one: a message ID of 1 KiB of control characters, escaped, in base64."""

ANCESTORS_TOKEN_CHARACTERS_MAX = 200_000
"""The longest of all: twice 4,096 differences of sequence numbers up to 2^63."""

RENDERED_PER_TURN = 100
"""Messages written as JSON (a millisecond) before other callers of the event loop get their turn."""

# RFC 3986: names, addresses, ports. No other characters get into a header of ours.
_AUTHORITY = re.compile(r"[A-Za-z0-9._~%-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
_PATH_CHARACTERS = "/%:@!$&'()*+,;="  # and unreserved ones: all that a path contains stays as it is
_IS_NUMBER = re.compile("-?[0-9]{1,19}").fullmatch
_NO_LISTS: Mapping[str, Sequence[str]] = {}
_Page = TypeVar("_Page", Page, HintPage)

PageLimit = Annotated[
    int, Query(ge=1, le=DEFAULT_LIMITS.page_items_max, description="items of one page at most")
]
After = Annotated[str | None, Query(description="the `next` of the page before this one")]


def _check_digits(value: object) -> object:
    # A number is also read from "+5", "5.0", "1_0" and " 5".
    if isinstance(value, str) and not _IS_NUMBER(value):
        raise PydanticCustomError("int_parsing", "Input should be up to 19 decimal digits")
    return value


_Number = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX), BeforeValidator(_check_digits)]
Lamport = Annotated[_Number | None, Query()]


class CursorKind(StrEnum):
    """The kind of a position; its value is part of the token."""

    LOG = "log"
    ARRIVAL = "arrival"
    CHANNELS = "channels"
    HINT = "hint"
    GAPS = "gaps"
    ANCESTORS = "ancestors"
    ORDER = "order"


_Check = Callable[[object], bool]
_SEAL_CONTEXT = "sdstore cursor v1"
_SUM_BYTES = 4
_TAG_BYTES = 8
_ARRIVAL = Struct(">xqq")
"""An ARRIVAL position: it is in every live event, and would be twice as long in JSON, which never begins with 0."""

_IS_DIGEST = re.compile("[0-9a-f]{64}").fullmatch


def _number(value: object) -> bool:
    # A bool is an int too.
    return type(value) is int and INT64_MIN <= value <= INT64_MAX


def _text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _digest(value: object) -> bool:
    return isinstance(value, str) and _IS_DIGEST(value) is not None


# Number and sum of the arrival chains of entries and of claims, when the token was made.
_WATERMARK = (_number,) * 4

_SHAPES: dict[CursorKind, tuple[_Check, ...]] = {
    # Lamport timestamp, message ID, digest in hex
    CursorKind.LOG: (_number, _text, _digest),
    # sequence number, sum of the arrival chain there
    CursorKind.ARRIVAL: (_number, _number),
    # channel ID
    CursorKind.CHANNELS: (_text,),
    # rank, number within the rank, sequence number; the watermark
    CursorKind.HINT: (_number, _number, _number, *_WATERMARK),
    # message ID
    CursorKind.GAPS: (_text,),
    # Lamport timestamp, message ID, digest in hex, sequence numbers still to be taken, taken late;
    # the watermark
    CursorKind.ANCESTORS: (_number, _text, _digest, _text, _text, *_WATERMARK),
    # name of the channel and its writers, messages before the place, their hash
    CursorKind.ORDER: (_digest, _number, _digest),
}


class Cursors:
    """Reads and writes the cursors of one database. `secret`: random bytes that it keeps."""

    def __init__(self, database_id: str, secret: bytes) -> None:
        self._tag = blake3(database_id.encode()).digest(length=_TAG_BYTES)
        self._seal = _seal_of(secret)

    @classmethod
    def of(cls, store: Store) -> Cursors:
        """Those of a store's database."""
        return cls(store.database_id, store.mark_secret)

    def write(self, kind: CursorKind, *position: int | str) -> str:
        """The token of a position."""
        if kind is CursorKind.ARRIVAL:
            plain = _ARRIVAL.pack(*position)
        else:
            plain = orjson.dumps([kind, *position])
        return _encoded(self._tag + self._seal.encrypt(plain, [self._tag]))

    def read(self, kind: CursorKind, token: str | None) -> Position | None:
        """The position of a token; None for no token. `invalid_cursor`, `foreign_cursor`."""
        if token is None:
            return None
        is_walk = kind is CursorKind.ANCESTORS
        most = ANCESTORS_TOKEN_CHARACTERS_MAX if is_walk else TOKEN_CHARACTERS_MAX
        raw = _decoded(token[:most])
        if raw is None or _encoded(raw) != token:
            raise Problem(Code.INVALID_CURSOR, "this token was not made by a store")
        if raw[:_TAG_BYTES] != self._tag:
            raise Problem(Code.FOREIGN_CURSOR, "start again without a cursor")
        try:
            plain = self._seal.decrypt(raw[_TAG_BYTES:], [self._tag])
            if plain.startswith(b"\0"):
                found = [CursorKind.ARRIVAL, *_ARRIVAL.unpack(plain)]
            else:
                found = orjson.loads(plain)
        except (InvalidTag, ValueError):
            raise Problem(Code.INVALID_CURSOR, "this token was not made by this store") from None
        found_kind, *position = found
        if found_kind != kind or not _fits(position, _SHAPES[kind]):
            raise Problem(Code.INVALID_CURSOR, f"this is not a {kind} cursor")
        return tuple(position)

    async def read_arrival(self, store: Store, token: str | None) -> Token | None:
        """The place of an ARRIVAL token; None for no token.

        Raises `cursor_rolled_back` if the database's history up to it is not the one it was made from.
        """
        position = self.read(CursorKind.ARRIVAL, token)
        if position is None:
            return None
        place = Token(int(position[0]), int(position[1]))
        await _require_history(store, place)
        return place

    async def write_walk(self, kind: CursorKind, store: Store, position: Position) -> str:
        """The token of a position that contains row numbers: it names the history that numbered them."""
        entries, claims = await store.arrivals.arrived()
        return self.write(kind, *position, *entries, *claims)

    async def read_walk(self, kind: CursorKind, store: Store, token: str | None) -> Position | None:
        """The position of a token of `write_walk`; None for no token. Errors as in `read_arrival`."""
        fields = self.read(kind, token)
        if fields is None:
            return None
        position, numbers = fields[: -len(_WATERMARK)], map(int, fields[-len(_WATERMARK) :])
        seq, entry_sum, claim_no, claim_sum = numbers
        await _require_history(store, Token(seq, entry_sum), Token(claim_no, claim_sum))
        return position


@lru_cache(maxsize=4)
def _seal_of(secret: bytes) -> AESSIV:
    return AESSIV(blake3(secret, derive_key_context=_SEAL_CONTEXT).digest())


def _encoded(raw: bytes) -> str:
    """The token of some bytes, with a sum that tells a store's token from any other text."""
    found = blake3(raw).digest(length=_SUM_BYTES) + raw
    return urlsafe_b64encode(found).rstrip(b"=").decode()


def _decoded(token: str) -> bytes | None:
    try:
        return urlsafe_b64decode(token + "=" * (-len(token) % 4))[_SUM_BYTES:]
    except (ValueError, Base64Error):
        return None


def _fits(position: list[int | str], shape: tuple[_Check, ...]) -> bool:
    return len(position) == len(shape) and all(
        fits(value) for fits, value in zip(shape, position, strict=True)
    )


async def _require_history(store: Store, entries: Token, claims: Token = START) -> None:
    if not await store.arrivals.holds(entries, claims):
        raise Problem(
            Code.CURSOR_ROLLED_BACK,
            "this database was rolled back to an older copy, or is another copy, and its history up to "
            "this cursor differs from the one that was read: start again without a cursor, or with one "
            "from before that copy was made",
        )


class Shown(NamedTuple):
    """An entry of a page, its variants and hints, and its JSON if that is the form of the reply."""

    entry: Entry
    meta: Meta
    document: bytes


def frame_bytes_max(call: Call) -> int:
    """The bytes of frames that fit into a reply of the form that the caller accepts."""
    bytes_max = call.node.limits.reply_bytes_max
    # Base64 takes four bytes for three, and the other members of a message have to fit as well.
    return bytes_max * 5 // 8 if call.form is Form.JSON else bytes_max


async def read_described(
    call: Call, limit: int, read: Callable[[int], Awaitable[_Page]], shape: Shape
) -> tuple[_Page, list[Shown]]:
    """The page that `read` returns for a limit, and the part of it that the caller may see.

    The bound in bytes is that of the finished reply, so entries with many hints and variants, or text
    that is long in JSON, make the page shorter.
    """
    page = await read(limit)
    entries = call.caller.visible(page.entries)
    metas = await call.node.store.entries.meta_of(entries)
    is_json = call.form is Form.JSON
    room = call.node.limits.reply_bytes_max
    shown: list[Shown] = []
    for entry, meta in zip(entries, metas, strict=True):
        document = b""
        if is_json:
            document = orjson.dumps(message_json(entry, meta.variants, meta.hints, shape))
            room -= len(document) + 1
        else:
            room -= len(entry.frame) + meta.shown_bytes
        if room < 0 and limit > 1:
            return await read_described(call, max(1, len(shown)), read, shape)
        shown.append(Shown(entry, meta, document))
        if len(shown) % RENDERED_PER_TURN == 0:
            await asyncio.sleep(0)
    return page, shown


def page_reply(
    call: Call,
    page: Page | HintPage,
    shown: Sequence[Shown],
    next_token: str | None,
    shape: Shape,
) -> Reply:
    """The `shown` entries of a page; `next_token` is None if nothing follows."""
    headers = next_link(call, next_token)
    left_out = [each.digest for each in call.caller.visible(page.left_out)]
    if call.form is Form.PROTOBUF:
        message = wire.MessagePage(
            messages=[
                message_protobuf(e, meta.variants, meta.hints, shape) for e, meta, _ in shown
            ],
            next=next_token or "",
            left_out=left_out,
        )
        return protobuf_reply(message, 200, headers)
    messages = b",".join(document for _, _, document in shown)
    rest = orjson.dumps({"next": next_token, "left_out": [digest.hex() for digest in left_out]})
    return Reply(200, [*JSON_HEADERS, *headers], b'{"messages":[%s],%s' % (messages, rest[1:]))


async def fitted(call: Call, read: Callable[[int], Awaitable[Reply]]) -> Reply:
    """The reply that `read` makes of a number of bytes of frames; fewer if it is too long."""
    most = call.node.limits.reply_bytes_max
    bytes_max = frame_bytes_max(call)
    reply = await read(bytes_max)
    while len(reply.body) > most and bytes_max > 1:
        # In the worst case text is six times as long in JSON.
        bytes_max = min(bytes_max, len(reply.body)) * most // (2 * len(reply.body))
        await asyncio.sleep(0)
        reply = await read(bytes_max)
    return reply


def next_link(
    call: Call, next_token: str | None, lists: Mapping[str, Sequence[str]] = _NO_LISTS
) -> Headers:
    """`Link: rel="next"`: this request again, behind its last item, as an absolute URL.

    It keeps the form of the request (a proxy might rewrite IDs in paths, hence the query form). It begins
    with the public URL, or else with the authority by which the caller reaches this node. `lists`: the
    repeatable parameters with their values.
    """
    if next_token is None:
        return []
    query = {name: value for name, value in call.query.items() if name != "after"}
    query |= {"after": next_token}
    pairs = urlencode({**query, **lists}, doseq=bool(lists), quote_via=quote, safe="")
    path = quote(raw_path(call.asgi), safe=_PATH_CHARACTERS)
    base = call.node.settings.public_url or f"{call.asgi['scheme']}://{_authority(call)}"
    url = f"{base}{path}?{pairs}"
    return [(b"link", f'<{url}>; rel="next"'.encode())]


def _authority(call: Call) -> str:
    """Host and port as the caller wrote them, else those of the listening socket."""
    host = call.headers.get(b"host", b"").decode("latin-1")
    if _AUTHORITY.fullmatch(host):
        return host
    name, port = call.asgi.get("server") or ("localhost", None)
    name = f"[{name}]" if ":" in name else name
    return name if port is None else f"{name}:{port}"


# ---- channels

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
    count, root = await call.node.recon.index.root(channel_id, channel.count)
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
    shape: Shaped,
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
    page, described = await read_described(call, limit, lambda limit: read(limit=limit), shape)
    token = None if page.next is None else cursors.write(kind, *page.next)
    return page_reply(call, page, described, token, shape)


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
    shape: Shaped,
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
    page, described = await read_described(call, limit, lambda limit: read(limit=limit), shape)
    # A follower always gets a place to go on from, also at the end.
    token = cursors.write(CursorKind.ARRIVAL, *(page.last or place))
    return page_reply(call, page, described, token, shape)


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
