"""The responding side of reconciliation: one request in, one response out, no session state.

The endpoint caches interests by hash, and views, only to save work. It answers every request from the
request alone, or refuses it and names the fields that the initiator must send again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from blake3 import blake3
from google.protobuf.message import DecodeError

from app.callers import Caller, Scope
from app.errors import Code, Problem
from app.interests import Interests, InterestState
from app.policy import Way
from app.recon.budget import Allowance, ReconBudgets
from app.recon.index import NodeIndex
from app.recon.replica import Message, NodeReplica, items_size
from recon.elements import Bound, bound_bytes
from recon.errors import RemoteProtocolError
from recon.fetch import NOTHING_WANTED, Found, Wanted, read_fetch, resolve
from recon.index import RangeIndex
from recon.limits import DEFAULT_LIMITS, FRAME_BYTES_MIN, NONCE_BYTES, PROTOCOL_VERSION
from recon.limits import Limits as ReconLimits
from recon.marks import MARK_BYTES, NOTHING_CAME, Arrived, view_of
from recon.responder import respond
from recon.session import (
    Interest,
    SessionKey,
    decode_interest,
    derive_session_key,
    interest_hash,
    is_own_nonce,
    nonce_is_fresh,
    responder_nonce,
)
from recon.view import View
from sdstore.sync.replica import Element
from sdstore.wire import recon_pb2 as wire

FETCH_CHUNK = 1_024
"""Elements turned into items at once."""

MARK_COST = 1_000
"""The cost of reading a mark, in hashed elements, besides the elements after it: 0.3 ms."""

NEWS_COST = 10
"""The cost of reading one element after a mark from the database, in hashed elements: 1 to 2 us."""

MARK_FIELD_BYTES = 2 + MARK_BYTES
"""The mark in the reply to a request with `mark`."""

RESUME_BYTES = 48
"""The two fields of a truncated reply: the place to resume, and the length of the next request."""

NONCE_FIELD_BYTES = 2 + NONCE_BYTES
"""The nonce in the reply to a request with `renew`."""

NEWS_VIEWS_MAX = 64
"""Views over the news that are kept: for twice as many sessions as a node starts side by side."""

NEWS_ELEMENTS_MAX = 131_072
"""Elements of all these views: 13 MB. The largest view has half of them."""

FOLLOWED_ITEMS_MIN = 64
"""If more items are pushed, the index takes them in at once: otherwise the next comparison would wait for a
whole backfill."""

ITEM_HINTS_BYTES_MAX = 16_384
"""Hints and lengths around the frame of one item."""

_Key = tuple[bytes, Interest | None]
"""The hash of an interest, and the channels that the caller may read."""

EVERYTHING = Interest.make(everything=True)

_NAME_BYTES = 64  # of memory around a name
_INTEREST_BYTES = 512  # of memory around an interest


class ReconEndpoint:
    """Answers `ReconRequest`s. `secret`: at least 16 random bytes that all workers share."""

    def __init__(
        self,
        replica: NodeReplica,
        index: NodeIndex,
        interests: Interests,
        secret: bytes,
        budgets: ReconBudgets,
    ) -> None:
        self._replica = replica
        self._index = index
        self._limits = replica.limits
        self._secret = secret
        self._interests = interests
        self._known = KnownInterests(self._limits.recon_interests_bytes_max)
        self._budgets = budgets
        self._news = NewsViews(index)

    @property
    def nonce_secret(self) -> bytes:
        """The key by which the node recognises the nonces of its own sessions."""
        return self._replica.nonce_secret

    async def answer(self, body: bytes, caller: Caller, allowance: Allowance) -> wire.ReconResponse:
        """The response to an encoded `ReconRequest`.

        `caller` selects budgets and grants: it reads and pushes only channels that its grants cover.
        `allowance` bounds the reply.
        Raises Problem: `invalid_recon_request`, `recon_budget_spent`.
        """
        self._budgets.check(caller.name)
        caller = self._granted(caller)
        try:
            request = wire.ReconRequest.FromString(body)
            # A byte of an interest or of ranges costs about as much as hashing an element. Roots and
            # cached views are answered without hashing.
            parts = (request.session, request.ranges, request.fetch)
            self._budgets.views.spend(caller.name, sum(part.ByteSize() for part in parts))
            if request.version != PROTOCOL_VERSION:
                return wire.ReconResponse(version=PROTOCOL_VERSION, status=wire.UNSUPPORTED_VERSION)
            # Remember the interest even if the nonce has expired, so that it need not be sent again.
            # What this node wants is read once: it can change while the request waits.
            wanted = self._interests.state
            known = self._known.find(request.session, caller, wanted.interest)
            if refusal := self._refusal(request, caller.name.encode()):
                if refusal.status != wire.NONCE_EXPIRED or not request.renew:
                    return refusal
                request.session.responder_nonce = refusal.responder_nonce
            if known is None:
                return wire.ReconResponse(version=PROTOCOL_VERSION, status=wire.UNKNOWN_INTEREST)
            name, mutual = known
            if request.idle_root:
                return await self._compare_roots(
                    request.idle_root, mutual, _policy_for(caller, wanted)
                )
            return await self._answer(request, name, mutual, wanted, caller, allowance)
        except DecodeError:
            raise Problem(Code.INVALID_RECON_REQUEST, "the body is not a ReconRequest") from None
        except RemoteProtocolError as error:
            raise Problem(
                Code.INVALID_RECON_REQUEST, str(error), extra={"fault": error.code}
            ) from None

    def policy_for(self, caller: Caller, wanted: InterestState) -> int:
        """The `policy` of answers to a caller while this node has this interest."""
        return _policy_for(self._granted(caller), wanted)

    def _granted(self, caller: Caller) -> Caller:
        if not self._replica.is_disk_low:
            return caller
        # A policy of its own: the peer offers again what it kept when the disk has room.
        return replace(caller, scopes=caller.scopes - {Scope.PUBLISH})

    def _refusal(self, request: wire.ReconRequest, pair: bytes) -> wire.ReconResponse | None:
        if is_own_nonce(request.session.initiator_nonce, self._replica.nonce_secret):
            return wire.ReconResponse(version=PROTOCOL_VERSION, status=wire.REFUSED)
        epoch = int(time.time()) // self._limits.session_nonce_lifetime_s
        if request.idle_root:  # roots have no key
            return None
        if nonce_is_fresh(request.session.responder_nonce, self._secret, pair, epoch):
            return None
        return wire.ReconResponse(
            version=PROTOCOL_VERSION,
            status=wire.NONCE_EXPIRED,
            responder_nonce=responder_nonce(self._secret, pair, epoch),
        )

    async def _compare_roots(
        self, root: bytes, mutual: Interest, policy: int
    ) -> wire.ReconResponse:
        await self._index.catch_up()
        is_same = root == self._index.root_of_ids(mutual, policy)
        return wire.ReconResponse(version=PROTOCOL_VERSION, same_root=is_same)

    async def _answer(
        self,
        request: wire.ReconRequest,
        name: bytes,
        mutual: Interest,
        wanted: InterestState,
        caller: Caller,
        allowance: Allowance,
    ) -> wire.ReconResponse:
        key = _session_key(request.session, name)
        if len(request.push) > (most := self._limits.recon_push_items_max):
            raise RemoteProtocolError("too_many_items", f"a request can push at most {most} items")
        # The answer includes the pushed items, so the initiator can compare at once.
        outcomes = await self._take(request.push, caller, wanted.interest)
        policy = _policy_for(caller, wanted)
        room = allowance.reply_bytes_max - len(outcomes) - RESUME_BYTES
        room -= NONCE_FIELD_BYTES if request.renew else 0
        room -= MARK_FIELD_BYTES if request.mark else 0
        room = min(request.response_bytes_max or room, room)
        response = wire.ReconResponse(version=PROTOCOL_VERSION)
        fetched = read_fetch(request.fetch) if request.HasField("fetch") else NOTHING_WANTED
        compares = request.HasField("ranges") or request.total
        if compares or len(fetched.ranges):  # a push needs no view
            asked = await self._view_between(request, key, mutual, policy, fetched, caller)
            if asked is None:
                return wire.ReconResponse(version=PROTOCOL_VERSION, status=wire.UNKNOWN_MARK)
            # From here to the mark nothing waits, so the mark is that of the view.
            view, later = asked
            if compares:
                response = self._compare(view, request, room)
            if request.mark and name == interest_hash(mutual.encode()):
                response.mark = self._replica.marks.at_present(mutual, policy)
                if request.since:
                    self._news.keep(key, request.since, response.mark, mutual, policy, view)
            found = _without(resolve(view, fetched), later)
            is_bounded = bool(request.since or request.up_to)
            await self._fill(response, found, room, allowance, is_bounded=is_bounded)
        response.push_outcomes.extend(outcomes)
        response.policy = policy
        if request.renew:
            response.responder_nonce = request.session.responder_nonce
        self._budgets.replies.spend(caller.name, response.ByteSize())
        return response

    async def _view_between(
        self,
        request: wire.ReconRequest,
        key: SessionKey,
        mutual: Interest,
        policy: int,
        fetched: Wanted,
        caller: Caller,
    ) -> tuple[View, Arrived] | None:
        """The elements that a request is about, and those among them that arrived after its `up_to`.

        Only a fetch is left with such elements: removing them from a large view costs more than
        leaving them out of what it brings. None if a mark fails.
        """
        compares = request.HasField("ranges") or request.total
        # A short id leads to nothing that arrived later, and all of a range to everything in it.
        needs_up_to = compares or not fetched.counts.all()
        news = self._news.find(key, request, mutual, policy, needs_up_to=needs_up_to)
        if news is not None:
            return news, NOTHING_CAME
        await self._index.catch_up()
        up_to = request.up_to if needs_up_to else b""
        if not request.since:
            self._budgets.views.spend(caller.name, self._index.elements_to_hash(key, mutual))
            await self._index.prepare_view(key, mutual)
        if not (request.since or up_to):
            return self._index.view(key, mutual), NOTHING_CAME
        spend = partial(self._budgets.views.spend, caller.name)
        spend(MARK_COST)
        between = await self._replica.marks.between(
            request.since, up_to, mutual, policy, lambda count: spend(NEWS_COST * count)
        )
        if between is None:
            return None
        if request.since:
            return view_of(between.news.columns(), key), NOTHING_CAME
        view, later = self._index.view(key, mutual), between.later
        if compares and len(later):
            view = view.apart(NOTHING_CAME.columns(), later.columns())
        return view, later

    async def _take(
        self, items: Sequence[wire.Item], caller: Caller, wanted: Interest
    ) -> Sequence[wire.PushOutcome]:
        """Take the items that the caller may publish and this node wants; one outcome per item."""
        if Scope.PUBLISH not in caller.scopes:
            return [wire.PUSH_REFUSED] * len(items)
        replica = self._replica.for_peer(caller.instance_id, Way.RECON, caller.name)
        outcomes = await take_items(replica, items, caller.covers, wanted)
        if len(items) > FOLLOWED_ITEMS_MIN:
            await self._index.catch_up()
        return outcomes

    def _compare(self, view: View, request: wire.ReconRequest, room: int) -> wire.ReconResponse:
        if request.HasField("fetch"):
            # The largest item always fits beside the answers.
            room -= self._limits.frame_bytes_max + ITEM_HINTS_BYTES_MAX
        room = min(max(FRAME_BYTES_MIN, room), self._limits.recon_answer_bytes_max)
        return respond(view, request, _limits(room))

    async def _fill(
        self,
        response: wire.ReconResponse,
        found: Found,
        bytes_max: int,
        allowance: Allowance,
        *,
        is_bounded: bool,
    ) -> None:
        """Append the found items until the reply is full; then set the place to resume.

        `is_bounded`: between marks a claim travels inside its entry only if it was requested, too.
        Others may have arrived later.
        """
        foldable = {row.tobytes() for row in found.ids} if is_bounded else None
        sent_count, resume, message = 0, found.resume, Message(foldable)
        response_bytes = (
            response.ByteSize()
        )  # with the items, at most: measuring all is a pass over them
        while sent_count < len(found.ids):
            room = bytes_max - response_bytes
            chunk = slice(sent_count, sent_count + FETCH_CHUNK)
            rows = zip(found.orders[chunk].tolist(), found.ids[chunk], strict=True)
            elements = [Element(order, row.tobytes()) for order, row in rows]
            loaded = await self._replica.load(elements, room, message)
            # Every fetch makes progress, if only by one item larger than the room, but no caller gets
            # more than its allowance.
            size = items_size(loaded.items)
            if size > room and not response.items and allowance.is_strict:
                response.truncated = True
                needed = allowance.reply_bytes_max + size - room
                response.request_bytes_min = allowance.request_bytes_min(needed)
                return
            if size > room and response.items:
                head = int.from_bytes(found.ids[sent_count, :8].tobytes(), "big")
                resume = Bound(int(found.orders[sent_count]), head)
                break
            response.items.extend(loaded.items)
            response_bytes += size
            sent_count += loaded.covered
        if resume is not None:
            response.truncated = True
            response.resume = bound_bytes(resume)
            if allowance.is_strict:
                response.request_bytes_min = allowance.request_bytes_min(0)


@lru_cache(maxsize=64)  # most requests leave the same room
def _limits(response_bytes_max: int) -> ReconLimits:
    return replace(DEFAULT_LIMITS, response_bytes_max=response_bytes_max)


def _without(found: Found, later: Arrived) -> Found:
    """What a fetch found, without elements that arrived later."""
    if not len(later) or not len(found.ids):
        return found
    excluded = {row.tobytes() for row in later.ids}
    kept = [row.tobytes() not in excluded for row in found.ids]
    return Found(found.orders[kept], found.ids[kept], found.resume)


async def take_items(
    replica: NodeReplica,
    items: Sequence[wire.Item],
    covers: Callable[[str], bool] = lambda _: True,
    wanted: Interest = EVERYTHING,
) -> list[wire.PushOutcome]:
    """Pass pushed items through the one door; one outcome per item, in order.

    Entries come first, then the claims on them. `covers`: whether the caller may write to a channel; a
    claim on an entry of any other channel gets the answer for an absent entry. Items outside `wanted`
    are refused: a peer can have begun before this node changed what it wants. Raises Problem if this
    node is at fault (disk full, database gone).
    """
    window = wanted.window
    outcomes = [wire.NO_ENTRY if item.HasField("claim") else wire.PUSH_REFUSED for item in items]
    for kind in ("entry", "claim"):
        positions = [at for at, item in enumerate(items) if item.HasField(kind)]
        read = await replica.prepare([items[at] for at in positions])
        prepared = {}
        for at, each in zip(positions, read, strict=True):
            if each.channel_id is None or not covers(each.channel_id):
                continue
            is_in_window = each.order is None or window.holds(each.order)
            if is_in_window and wanted.matches(each.channel_id):
                prepared[at] = each
            else:
                outcomes[at] = wire.PUSH_REFUSED
        stored = await replica.commit(list(prepared.values()))
        for at, result in zip(prepared, stored, strict=True):
            outcomes[at] = result.outcome
    return outcomes


def _session_key(session: wire.Session, interest_name: bytes) -> SessionKey:
    if len(session.initiator_nonce) != NONCE_BYTES:
        raise RemoteProtocolError("malformed", f"a nonce has {NONCE_BYTES} bytes")
    return derive_session_key(session.initiator_nonce, session.responder_nonce, interest_name)


class NewsViews:
    """A cache of the views over the news, for the requests that follow the first answer of a session.

    They would otherwise read both marks and the news again. The oldest views are dropped: those sessions
    read again. A view is of no use once the index was read again, or the policy or interest changed.
    """

    def __init__(self, index: NodeIndex) -> None:
        self._index = index
        self._kept: OrderedDict[tuple[bytes, bytes], _News] = OrderedDict()

    def keep(
        self, key: SessionKey, since: bytes, up_to: bytes, mutual: Interest, policy: int, view: View
    ) -> None:
        """Keep the view of what arrived between two marks."""
        self._kept.pop((key.raw, since), None)
        self._kept[key.raw, since] = _News(self._index.elements, up_to, mutual, policy, view)
        while (
            len(self._kept) > NEWS_VIEWS_MAX
            or sum(len(each.view) for each in self._kept.values()) > NEWS_ELEMENTS_MAX
        ):
            self._kept.popitem(last=False)

    def find(
        self,
        key: SessionKey,
        request: wire.ReconRequest,
        mutual: Interest,
        policy: int,
        *,
        needs_up_to: bool,
    ) -> View | None:
        """The view that a request is about, if it was kept under the same circumstances."""
        news = None if request.mark else self._kept.get((key.raw, request.since))
        if news is None or news.elements is not self._index.elements:
            return None
        if needs_up_to and request.up_to != news.up_to:
            return None
        return news.view if (news.mutual, news.policy) == (mutual, policy) else None


class _News(NamedTuple):
    elements: RangeIndex
    up_to: bytes
    mutual: Interest
    policy: int
    view: View


def _policy_for(caller: Caller, wanted: InterestState) -> int:
    """This node's policy, and what it grants this caller."""
    if Scope.PUBLISH in caller.scopes and caller.channels is None:
        return wanted.policy
    channels = b"" if caller.channels is None else caller.channels.encode()
    grants = f"{wanted.policy} {sorted(caller.scopes)} {channels!r}"
    return int.from_bytes(blake3(grants.encode()).digest(length=4), "little")


class KnownInterests:
    """A cache of callers' interests, intersected with ours and with the channels they may read.

    So an interest is decoded and matched once, not with every request. The oldest are dropped, and all
    when ours has changed.
    """

    def __init__(self, bytes_max: int) -> None:
        self._ours = Interest()
        self._bytes_max = bytes_max
        self._bytes = 0
        self._known: OrderedDict[_Key, tuple[Interest, int]] = OrderedDict()

    def find(
        self, session: wire.Session, caller: Caller, ours: Interest
    ) -> tuple[bytes, Interest] | None:
        """Hash and mutual interest of a request; None if the caller must send it in full.

        Raises `RemoteProtocolError` for an interest that is not canonical.
        """
        if ours is not self._ours:
            self._known.clear()
            self._ours, self._bytes = ours, 0
        name = session.interest_hash
        if session.WhichOneof("interest") == "interest_bytes":
            name = interest_hash(session.interest_bytes)
            if (name, caller.channels) not in self._known:
                self._add(name, session.interest_bytes, caller)
        key = name, caller.channels
        if key not in self._known:
            return None
        self._known.move_to_end(key)
        return name, self._known[key][0]

    def _add(self, name: bytes, raw: bytes, caller: Caller) -> None:
        mutual = caller.readable_part(decode_interest(raw).intersect(self._ours))
        names_count = len(mutual.channels) + len(mutual.prefixes)
        size = len(raw) + _NAME_BYTES * names_count + _INTEREST_BYTES
        self._known[name, caller.channels] = mutual, size
        self._bytes += size
        while self._bytes > self._bytes_max and len(self._known) > 1:
            self._bytes -= self._known.popitem(last=False)[1][1]
