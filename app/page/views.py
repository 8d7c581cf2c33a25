"""The routes of the page. Each calls what the routes of `app.http` call, mostly those routes themselves.

A page is complete without its script, which only keeps parts of it up to date: a stream sends each part that changed,
as HTML, and the script replaces the element with the same ID. Actions are forms, which redirect back to a page.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query

from app.access.callers import Scope
from app.entries import Entry
from app.errors import Code, Problem
from app.hexadecimal import hex_bytes
from app.http import channels, federation, messages, operators, orders
from app.http.admission import parse_query
from app.http.call import (
    Call,
    Form,
    Headers,
    Reply,
    Shape,
    StreamedReply,
    event_stream,
    message_json,
)
from app.http.channels import CursorKind, Cursors, Direction, Order
from app.http.live import LastEventId
from app.live.hub import LiveMessage
from app.page.render import (
    FILES,
    FOLDER,
    NAME_CHARACTERS,
    PAGE_HEADERS,
    link,
    page,
    part,
    shown,
)
from app.page.session import (
    Anybody,
    Operator,
    PageRoute,
    Reader,
    ReaderInTurn,
    is_https,
    require_token,
    signed_in,
    signed_out,
)
from app.server.node import Node
from sdstore.sds.codec import from_json
from sdstore.sds.model import Message, rank

router = APIRouter(route_class=PageRoute, include_in_schema=False)

ROWS = 40
"""Rows of a list: with IDs of control characters a page stays below 150 kB."""

CONTENT_CHARACTERS = 8_192
"""Of content that a page shows; the whole is a download."""

CAUSES_SHOWN, NAMED_SHOWN, FOLLOWING_READ = 24, 24, 100
"""Causes of a message, messages that name it, and how many messages after it in the log are read for these."""

PEERS_SHOWN, SESSIONS_SHOWN = 40, 8
"""Peers and sessions of a page."""

COMPARED = 8
"""Peers whose differences are counted for a page: some 10 ms each."""

PLOTTED = 49
"""Points of a plot, each one look-up by a key."""

NOW_S, SESSION_S, REST_S, TAIL_ROWS = 2.0, 0.25, 1.0, 50
"""Seconds between two looks at the node, at a running session and at resting peers; messages of one event."""

RATE_S = 60
"""Arrivals a second are those of the last minute."""

WITHOUT_FILTERS = Shape(has_filter=False)
"""The parts of messages in lists."""

_QueryText = Annotated[str | None, Query()]


async def told(answer: Awaitable[Reply]) -> dict[str, Any]:
    """What a route answers, as its JSON."""
    document: dict[str, Any] = orjson.loads((await answer).body)
    return document


def form_of(call: Call) -> dict[str, str]:
    """The fields of a form that was sent."""
    return {name: each.strip() for name, each in parse_query(call.body).fields.items()}


def to_page(path: str, headers: Headers = []) -> Reply:  # noqa: B006
    """Lead a browser to a page, by a path relative to this one."""
    return Reply(303, [(b"location", path.encode()), (b"cache-control", b"no-store"), *headers])


def parts_stream(
    call: Call, render: Callable[[], Awaitable[str]], every_s: Callable[[], float]
) -> StreamedReply:
    """A stream of a part of a page: now, and whenever it has changed."""
    place = call.node.live.hub.take_place()

    async def parts(_place: object = place) -> AsyncGenerator[Sequence[bytes], None]:
        sent = ""
        while not call.node.sharing.is_draining:
            html = await render()
            # A comment, if nothing has changed, finds out whether the reader is still there.
            yield [_part_event(html) if html != sent else b":\n\n"]
            sent = html
            await asyncio.sleep(every_s())

    return event_stream(parts())


def _part_event(html: str, name: str = "part", id_line: str = "") -> bytes:
    lines = "\n".join(f"data: {line}" for line in html.splitlines())
    return f"{id_line}event: {name}\n{lines}\n\n".encode("utf-8", "replace")


# ---- signing in, and the files of the page


@router.get("/page/sign-in")
async def sign_in_form(call: Anybody) -> Reply:
    """The form for a token."""
    return page(call, "sign_in.html", problem=None)


@router.post("/page/sign-in")
async def sign_in(call: Anybody) -> Reply:
    """Keep a valid token in a cookie."""
    token = form_of(call).get("token", "")
    require_token(call, token)
    return to_page("../", [signed_in(call.node, token, is_secure=is_https(call))])


@router.post("/page/sign-out")
async def sign_out(call: Anybody) -> Reply:
    """Forget the token."""
    return to_page("../", [signed_out(call.node, is_secure=is_https(call))])


@router.get("/page/files/{name:segment}")
async def file_of_page(call: Anybody, name: str, v: str = "") -> Reply:  # noqa: ARG001
    """A style sheet, script or picture. `v` is a hash of it, so that a browser can keep it."""
    if name not in FILES:
        raise Problem(Code.NOT_FOUND, f"the page has no file {name[:64]!r}")
    content = await asyncio.to_thread((FOLDER / "files" / name).read_bytes)
    kept = (b"cache-control", b"public, max-age=31536000, immutable" if v else b"no-cache")
    kind = (b"content-type", FILES[name])
    return Reply(200, [kind, kept, (b"x-content-type-options", b"nosniff")], content)


# ---- now


@router.get("/")
async def now(call: Reader) -> Reply:
    """The node at a glance."""
    known = await _now(call)
    points: list[tuple[float, float]] = []
    if call.caller.sees_all and known["entries"]:
        points = await _arrivals(call.node, known["entries"])
    return page(call, "now.html", **known, points=points)


@router.get("/page/now")
async def now_events(call: Reader) -> StreamedReply:
    """The figures of the first page as they change."""

    async def render() -> str:
        return part("now_part.html", **await _now(call), to="page/")

    return parts_stream(call, render, lambda: NOW_S)


async def _now(call: Call) -> dict[str, Any]:
    """What the first page says. A caller with a part of the channels learns nothing of the others."""
    node, caller = call.node, call.caller
    watermark = node.ingest.door.watermark
    known: dict[str, Any] = {
        "reasons": node.readiness.reasons(),
        "refuses": watermark.reason if watermark is not None and watermark.is_low else None,
        "failing": node.supervisor.failing,
        "entries": None,
        "peers": None,
        "ends": [],
    }
    if caller.sees_all:
        entries, claims = await node.store.arrivals.watermark()
        known |= {
            "entries": entries,
            "claims": claims,
            "per_s": await _rate(node, entries),
            "channels": node.recon.index.channels_count,
            "lost": await node.sharing.lost_count.get(node.lost_content.count),
            "retired": await node.sharing.retired_count.get(node.store.frames.retired_count),
            "free_bytes": None if watermark is None else watermark.free_bytes,
            "free_bytes_min": node.settings.disk_free_min_bytes,
            "readers": node.live.hub.readers_count,
        }
    if caller.may(Scope.ADMIN):
        known["peers"] = Counter(each.state.value for each in node.federation.peers.all())
        known["ends"] = _ends(node)
    return known


def _ends(node: Node) -> list[tuple[str, float, float]]:
    """What expires first, its end in Unix seconds, and the seconds until then."""
    ends = [(f"token {name}", at) for name, at in node.access.tokens.expiries().items()]
    if node.certificate is not None:
        ends.append(("TLS certificate", node.certificate.not_after_s))
    return [(name, at, at - time.time()) for name, at in sorted(ends, key=lambda each: each[1])[:5]]


async def _rate(node: Node, last: int) -> float:
    """Entries that arrived in the last minute, a second: found by bisection, because arrival times ascend."""
    since_ms = time.time_ns() // 1_000_000 - RATE_S * 1_000
    low, high = 0, last
    while low < high:
        middle = (low + high + 1) // 2
        at_ms = await node.store.arrivals.received_at_ms(middle)
        if at_ms is None or at_ms < since_ms:
            low = middle
        else:
            high = middle - 1
    return (last - low) / RATE_S


async def _arrivals(node: Node, last: int) -> list[tuple[float, float]]:
    """Entries over time, at evenly spaced entries."""
    wanted = sorted({1 + (last - 1) * each // (PLOTTED - 1) for each in range(PLOTTED)})
    return sorted(await node.store.arrivals.received_at(wanted))


# ---- peers


@router.get("/page/peers")
async def peers(call: Operator) -> Reply:
    """Peers, and the sessions with them."""
    return page(call, "peers.html", **await _peers(call), fault=None)


@router.get("/page/peers/events")
async def peer_events(call: Operator) -> StreamedReply:
    """Peers and sessions as they change."""
    syncs = call.node.federation.syncs

    async def render() -> str:
        return part("peers_part.html", **await _peers(call), to="../page/")

    def every_s() -> float:
        return REST_S if all(each.is_finished for each in syncs.recent()) else SESSION_S

    return parts_stream(call, render, every_s)


async def _peers(call: Call) -> dict[str, Any]:
    all_peers = (await told(federation.list_peers(call)))["peers"]
    statuses = [
        await told(federation.peer_status(call, peer_id=each["id"]))
        for each in all_peers[:COMPARED]
    ]
    sessions = (await told(federation.list_syncs(call)))["syncs"]
    newest: dict[str, Any] = {}
    for each in sessions:
        newest.setdefault(each["peer_id"] or each["peer_url"], each)
    return {
        "peers": [*statuses, *all_peers[COMPARED:PEERS_SHOWN]],
        "peers_count": len(all_peers),
        "newest": newest,
        "sessions": sessions[:SESSIONS_SHOWN],
    }


@router.post("/page/peers")
async def add_peer(call: Operator) -> Reply:
    """Add a peer."""
    given = form_of(call)
    body = {"url": given.get("url", "")} | ({"token": given["token"]} if given.get("token") else {})
    await federation.add_peer(call, _checked(federation.PeerBody, body))
    return to_page("peers")


@router.post("/page/peers/{peer_id:segment}/sync")
async def sync_peer(call: Operator, peer_id: str) -> Reply:
    """Sync with a peer now; a session that runs already will do."""
    try:
        await federation.sync_peer(call, peer_id, federation.SyncBody())
    except Problem as problem:
        if problem.code is not Code.SYNC_BUSY:
            raise
    return to_page("../../peers")


@router.post("/page/peers/{peer_id:segment}/remove")
async def remove_peer(call: Operator, peer_id: str) -> Reply:
    """Forget a peer."""
    await federation.remove_peer(call, peer_id)
    return to_page("../../peers")


# ---- channels


@router.get("/page/channels")
async def list_channels(
    call: ReaderInTurn, after: _QueryText = None, prefix: _QueryText = None
) -> Reply:
    """Channels by name, those that begin with a text."""
    found = await told(channels.list_channels(call, after=after, limit=ROWS, prefix=prefix or None))
    return page(call, "channels.html", **found, prefix=prefix or "", after=after)


@router.get("/page/channel")
async def channel(
    call: ReaderInTurn,
    channel_id: str,
    after: _QueryText = None,
    order: Order = Order.ARRIVAL,
    direction: Direction = Direction.DESC,
) -> Reply:
    """The log of a channel."""
    node = call.node
    # Before the messages: the stream goes on from here, and what comes twice is shown once.
    place, _ = await node.store.arrivals.arrived()
    known = await node.store.channels.named(channel_id)
    found = await told(
        channels.list_messages(
            call,
            shape=WITHOUT_FILTERS,
            channel_id=channel_id,
            after=after,
            limit=ROWS,
            order=order,
            direction=direction,
        )
    )
    rows = [_row(each) for each in found["messages"]]
    gaps = await told(channels.list_gaps(call, channel_id=channel_id, limit=1))
    is_live = order is Order.ARRIVAL and direction is Direction.DESC and after is None
    start = Cursors.of(node.store).write(CursorKind.ARRIVAL, *place)
    return page(
        call,
        "channel.html",
        channel_id=channel_id,
        channel=known,
        points=[] if known is None else await _channel_arrivals(node, channel_id, known.count),
        rows=rows,
        senders=Counter(each["sender_id"] for each in rows).most_common(8),
        left_out=found["left_out"],
        next=found["next"],
        has_gaps=bool(gaps["gaps"]),
        order=order.value,
        direction=direction.value,
        after=after,
        is_live=is_live,
        start=start,
    )


@router.get("/page/channel/events")
async def channel_events(
    call: Reader, channel_id: str, after: str | None = None, last_event_id: LastEventId = None
) -> StreamedReply:
    """Messages of a channel as they arrive, after a cursor of the feed."""
    hub, cursors = call.node.live.hub, Cursors.of(call.node.store)
    start = await cursors.read_arrival(call.node.store, last_event_id or after)
    place = await hub.admit()
    events = hub.events(channel_id.__eq__, start, call.address, place)

    async def parts() -> AsyncGenerator[Sequence[bytes], None]:
        async with aclosing(events) as open_events:
            async for some in open_events:
                entries = [
                    each.item
                    for each in some
                    if isinstance(each, LiveMessage) and isinstance(each.item, Entry)
                ]
                rows = [
                    _row(message_json(each, shape=WITHOUT_FILTERS)) for each in entries[-TAIL_ROWS:]
                ]
                html = part("rows.html", rows=rows[::-1], to="../page/")
                if entries:
                    token = cursors.write(CursorKind.ARRIVAL, *entries[-1].place)
                    yield [_part_event(html, "rows", f"id: {token}\n")]
                else:
                    yield [b":\n\n"]  # finds out whether the reader is still there

    return event_stream(parts())


async def _channel_arrivals(node: Node, channel_id: str, count: int) -> list[tuple[float, float]]:
    """Messages of a channel over time, estimated from evenly spaced ones of its log."""
    digests = node.recon.index.spaced_digests(channel_id, PLOTTED)
    rows = await node.store.entries.rows(digests)
    times = sorted(each.received_at_ms for each in rows)
    return [(at_ms, count * (place + 1) / len(times)) for place, at_ms in enumerate(times)]


def _row(stored: dict[str, Any]) -> dict[str, Any]:
    """A message of a list."""
    message, meta = from_json(stored["message"]), stored["meta"]
    start = message.content[: 4 * NAME_CHARACTERS]
    return {
        "digest": meta["digest"],
        "message_id": message.message_id,
        "sender_id": message.sender_id,
        "lamport": message.lamport_timestamp,
        "received_at": meta["received_at"],
        "bytes": len(message.content),
        "preview": "(vote)" if message.is_vote else start.decode("utf-8", "replace"),
        "variants": len(meta.get("variants") or ()),
    }


@router.get("/page/gaps")
async def gaps(call: ReaderInTurn, channel_id: str, after: _QueryText = None) -> Reply:
    """Messages that others name and this node lacks."""
    found = await told(channels.list_gaps(call, channel_id=channel_id, after=after, limit=ROWS))
    return page(call, "gaps.html", channel_id=channel_id, **found, after=after)


@router.get("/page/order")
async def order(
    call: Reader,
    channel_id: str,
    indexers: str = "",
    relayed: str = "",
    after: _QueryText = None,
) -> Reply:
    """The order of a channel by the indexers that are named, one a line."""
    named, passed = (
        list(dict.fromkeys(filter(None, map(str.strip, text.splitlines()))))
        for text in (indexers, relayed)
    )
    found = None
    if named:
        found = await told(
            orders.channel_order(
                call,
                channel_id=channel_id,
                indexer=named,
                non_indexer=[],
                change=[],
                relayed=[each for each in passed if each not in named],
                after=after,
                limit=ROWS,
            )
        )
    return page(
        call,
        "order.html",
        channel_id=channel_id,
        order=found,
        after=after,
        indexers="\n".join(named),
        relayed="\n".join(passed),
    )


# ---- messages


@router.get("/page/find")
async def find(call: ReaderInTurn, q: str = "", after: _QueryText = None) -> Reply:
    """A message by its ID or digest, or those that a hint leads to."""
    wanted = q.strip()
    is_hex = len(wanted) % 2 == 0 and not set(wanted.lower()) - set("0123456789abcdef")
    matches: dict[str, Any] = {"messages": [], "next": None}
    state = "missing"
    if wanted and after is None:
        try:
            found = await told(messages.get_message(call, message_id=wanted))
        except Problem as problem:
            state = problem.code.value
        else:
            message = found["message"]
            place = {"message_id": wanted, "channel_id": message["channel_id"]}
            return to_page(link("message", **place))
        if is_hex and len(wanted) == 64:
            try:
                await told(messages.get_entry(call, digest=wanted))
            except Problem as problem:
                state = state if problem.code is Code.NOT_FOUND else problem.code.value
            else:
                return to_page(link("message", digest=wanted))
    if wanted and is_hex:
        matches = await told(
            messages.get_hint(call, shape=WITHOUT_FILTERS, hint=wanted, after=after, limit=ROWS)
        )
    rows = [_row(each) for each in matches["messages"]]
    return page(
        call, "find.html", q=wanted, state=state, rows=rows, next=matches["next"], after=after
    )


@router.get("/page/message")
async def message(
    call: ReaderInTurn,
    message_id: _QueryText = None,
    channel_id: _QueryText = None,
    digest: _QueryText = None,
    form: str = "",
) -> Reply:
    """One message: its fields, content, causes, and who names it."""
    if message_id is None:
        stored = await told(messages.get_entry(call, digest=digest or ""))
        of = stored["message"]
        served = {"message_id": of["message_id"], "channel_id": of.get("channel_id", "")}
        stored = await told(messages.get_message(call, **served, digest=digest))
    else:
        stored = await told(messages.get_message(call, message_id, channel_id, digest))
    decoded = from_json(stored["message"])
    return page(
        call,
        "message.html",
        message=decoded,
        meta=stored["meta"],
        rank=rank(decoded).name.lower(),
        causes=await _causes(call, decoded),
        causes_count=len(decoded.causal_history),
        named_by=await _named_by(call, decoded),
        following=FOLLOWING_READ,
        filter_bytes=len(decoded.bloom_filter),
        link_of={"digest": stored["meta"]["digest"]},
        held=False,
        **_content(decoded.content, form),
    )


def _content(content: bytes, form: str) -> dict[str, Any]:
    """Content as text, JSON or hexadecimal: as asked, else what it is."""
    start = content[: 4 * CONTENT_CHARACTERS]
    is_text = True
    try:
        text = content.decode() if len(content) == len(start) else start.decode(errors="ignore")
    except UnicodeDecodeError:
        is_text, text = False, start.decode(errors="replace")
    pretty = None
    if len(content) == len(start):
        try:
            pretty = orjson.dumps(orjson.loads(content), option=orjson.OPT_INDENT_2).decode()
        except (ValueError, RecursionError):
            pretty = None
    if form not in ("text", "json", "hex") or (form == "json" and pretty is None):
        is_object = pretty is not None and pretty[0] in "{["
        form = "json" if is_object else "text" if is_text else "hex"
    digits = content[: CONTENT_CHARACTERS // 4]
    lines = [f"{at:08x}  {digits[at : at + 16].hex(' ')}" for at in range(0, len(digits), 16)]
    texts = {"text": text, "json": pretty or "", "hex": "\n".join(lines)}
    shown_text = texts[form]
    is_cut = len(shown_text) > CONTENT_CHARACTERS or len(content) > len(
        digits if form == "hex" else start
    )
    return {
        "form": form,
        "forms": ["text", "json", "hex"] if pretty is not None else ["text", "hex"],
        "content": shown(shown_text, CONTENT_CHARACTERS, is_content=True),
        "content_bytes": len(content),
        "is_cut": is_cut,
    }


async def _causes(call: Call, decoded: Message) -> list[tuple[str, str]]:
    """The first causes, each with its state: stored, or why it is not."""
    ids = list(dict.fromkeys(each.message_id for each in decoded.causal_history))[:CAUSES_SHOWN]
    if not ids:
        return []
    body = {"message_ids": ids, "channel_id": decoded.channel_id, "presence_only": True}
    headers = {**call.headers, b"content-type": Form.JSON.value}
    asked = replace(call, body=orjson.dumps(body), headers=headers)
    found = await told(messages.lookup(asked, shape=WITHOUT_FILTERS))
    states = {each["message_id"]: each.get("state", "missing") for each in found["missing"]}
    states |= {each["key"]["message_id"]: "lost or retired" for each in found["left_out"]}
    states |= {each["key"]["message_id"]: "stored" for each in found["found"]}
    return [(each, states.get(each, "missing")) for each in ids]


async def _named_by(call: Call, decoded: Message) -> list[dict[str, Any]]:
    """Messages that name this one, among those that follow it in the log."""
    found = await told(
        channels.list_messages(
            call,
            shape=WITHOUT_FILTERS,
            channel_id=decoded.channel_id,
            limit=FOLLOWING_READ,
            from_lamport=decoded.lamport_timestamp,
        )
    )
    name = decoded.message_id
    naming = [
        each
        for each in found["messages"]
        if any(cause["message_id"] == name for cause in each["message"].get("causal_history", ()))
    ]
    return [_row(each) for each in naming[:NAMED_SHOWN]]


@router.get("/page/content")
async def content(call: Reader, digest: str) -> Reply:
    """The content of a message as a file: a browser must not show it."""
    stored = await told(messages.get_entry(call, digest=digest))
    headers: Headers = [
        *PAGE_HEADERS[1:],
        (b"content-type", Form.OCTETS.value),
        (b"content-disposition", b'attachment; filename="content.bin"'),
    ]
    return Reply(200, headers, from_json(stored["message"]).content)


# ---- the quarantine, and retired content


@router.get("/page/quarantine")
async def quarantine(call: Operator, after: int = 0) -> Reply:
    """Messages that the policy keeps apart, and what was retired."""
    held = await told(operators.list_quarantine(call, after=after, limit=ROWS))
    state = await told(operators.show_retirements(call))
    return page(call, "quarantine.html", **held, after=after, **state)


@router.get("/page/retention")
async def retention(call: Operator, after: int = 0) -> Reply:
    """The rules of retention, and what they would retire now."""
    rules = await told(operators.show_retention(call))
    found = await told(operators.try_retention(call, operators.DryRunBody(after=after)))
    return page(call, "retention.html", **rules, channels=found["channels"], next=found["next"])


@router.get("/page/quarantine/{digest:segment}")
async def quarantined(call: Operator, digest: str, form: str = "") -> Reply:
    """One of them, with its content."""
    held = await told(operators.show_quarantined(call, digest=digest))
    decoded = from_json(held["message"])
    return page(
        call,
        "message.html",
        message=decoded,
        meta={"digest": held["digest"], "variants": []},
        rank=rank(decoded).name.lower(),
        causes=[(each.message_id, "") for each in decoded.causal_history[:CAUSES_SHOWN]],
        causes_count=len(decoded.causal_history),
        named_by=[],
        following=0,
        filter_bytes=len(decoded.bloom_filter),
        link_of={},
        held=True,
        **_content(decoded.content, form),
    )


@router.post("/page/quarantine/{digest:segment}/release")
async def release(call: Operator, digest: str) -> Reply:
    """Store a message of the quarantine."""
    await operators.release_quarantined(call, digest)
    return to_page("../../quarantine")


@router.post("/page/quarantine/{digest:segment}/drop")
async def drop(call: Operator, digest: str) -> Reply:
    """Delete a message of the quarantine."""
    await operators.drop_quarantined(call, digest)
    return to_page("../../quarantine")


@router.post("/page/retire")
async def retire(call: Operator) -> Reply:
    """Drop the content of one entry for good."""
    given = form_of(call)
    body = {"digest": given.get("digest", ""), "reason": given.get("reason", "")}
    hex_bytes(body["digest"], "the digest")
    await operators.retire(call, _checked(operators.RetireBody, body))
    return to_page("quarantine")


def _checked(model: Callable[..., Any], values: dict[str, str]) -> Any:
    """A body of a route from the fields of a form; `invalid_parameter`."""
    try:
        return model(**values)
    except ValueError as error:
        raise Problem(Code.INVALID_PARAMETER, str(error)) from None
