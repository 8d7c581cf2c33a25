"""The responding side of reconciliation: one request in, one response out, no session state.

The endpoint caches interests by hash, and views, only to save work. It answers every request from the
request alone, or refuses it and names the fields that the initiator must send again.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from google.protobuf.message import DecodeError

from app.access.callers import Caller, Scope
from app.access.rates import ReconBudgets
from app.cache import Recent
from app.errors import Code, Problem
from app.federation.interests import Interests, InterestState
from app.ingest.policy import Way
from app.recon.index import VIEW_COST_MIN, Moments, NodeIndex
from app.recon.replica import NodeReplica, items_size
from app.server.limits import Limits
from recon.agreement import (
    Interest,
    SessionKey,
    decode_interest,
    derive_session_key,
    interest_hash,
    is_own_nonce,
    nonce_is_fresh,
    responder_nonce,
)
from recon.elements import Bound, OrderWindow, bound_bytes, order_of_lamport
from recon.errors import RemoteProtocolError
from recon.fetch import NOTHING_WANTED, Found, Wanted, read_fetch, resolve
from recon.limits import DEFAULT_LIMITS, FRAME_BYTES_MIN, NONCE_BYTES, PROTOCOL_VERSION
from recon.limits import Limits as ReconLimits
from recon.marks import MARK_BYTES, MARK_BYTES_MAX, MOMENT_BYTES, NOTHING_CAME, Arrived, view_of
from recon.negentropy import Negentropy, Records
from recon.responder import respond
from recon.view import View
from sdstore.sync.memory import CUTS_MAX, RETIRED, Element
from sdstore.wire import recon_pb2 as wire

FETCH_CHUNK = 1_024
"""Elements turned into items at once."""

MARK_COST = 1_000
"""The cost of reading a mark, in hashed elements, besides the elements after it: 0.3 ms."""

NEWS_ROW_BYTES = 56
"""Memory of one element after a mark, besides what its view holds: its columns, and its place among them."""

NEWS_COST = 10
"""The cost of reading one element after a mark from the database, in hashed elements: 1 to 2 us."""

MARK_FIELD_BYTES = 4 + MARK_BYTES + MOMENT_BYTES
"""Mark and moment in the reply to a request with `mark`."""

RESUME_BYTES = 24
"""The two fields of a truncated reply."""

FOLLOWED_ITEMS_MIN = 64
"""If more items are pushed, the index takes them in at once: otherwise the next comparison would wait for a
whole backfill."""

ITEM_HINTS_BYTES_MAX = 96 << 10
"""Hints and lengths around the frame of one item: 256 hints of 256 bytes."""

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

    @property
    def nonce_secret(self) -> bytes:
        """The key by which the node recognises the nonces of its own sessions."""
        return self._replica.nonce_secret

    async def answer(self, body: bytes, caller: Caller) -> wire.ReconResponse:
        """The response to an encoded `ReconRequest`.

        `caller` selects budgets and grants: it reads and pushes only channels that its grants cover.
        Raises Problem: `invalid_recon_request`, `recon_budget_spent`.
        """
        self._budgets.check(caller.name)
        caller = self._granted(caller)
        try:
            request = wire.ReconRequest.FromString(body)
            # A byte of an interest or of ranges costs about as much as hashing an element. Cached views
            # are answered without hashing.
            parts = (request.session, request.ranges, request.fetch)
            self._budgets.views.spend(caller.name, sum(part.ByteSize() for part in parts))
            if request.version != PROTOCOL_VERSION:
                return wire.ReconResponse(version=PROTOCOL_VERSION, status=wire.UNSUPPORTED_VERSION)
            if is_own_nonce(request.session.initiator_nonce, self._replica.nonce_secret):
                return wire.ReconResponse(version=PROTOCOL_VERSION, status=wire.REFUSED)
            return await self._agreed(request, caller)
        except DecodeError:
            raise Problem(Code.INVALID_RECON_REQUEST, "the body is not a ReconRequest") from None
        except RemoteProtocolError as error:
            raise Problem(
                Code.INVALID_RECON_REQUEST, str(error), extra={"fault": error.code}
            ) from None

    def _granted(self, caller: Caller) -> Caller:
        if not self._replica.is_disk_low:
            return caller
        # A policy of its own: the peer offers again what it kept when the disk has room.
        return replace(caller, scopes=caller.scopes - {Scope.PUBLISH})

    async def _agreed(self, request: wire.ReconRequest, caller: Caller) -> wire.ReconResponse:
        """The answer once both sides agree on the interest and the nonce, or what the initiator lacks for that."""
        # What this node wants is read once: it can change while the request waits.
        session, wanted = request.session, self._interests.state
        response = wire.ReconResponse(
            version=PROTOCOL_VERSION, policy=self._policy_for(caller, wanted)
        )
        pair = caller.name.encode()
        epoch = int(time.time()) // self._limits.session_nonce_lifetime_s
        is_hello = session.WhichOneof("interest") is None
        # Remember the interest even if the nonce has expired, so that it need not be sent again.
        known = None if is_hello else self._known.find(session, caller, wanted.interest)
        if is_hello or not nonce_is_fresh(session.responder_nonce, self._secret, pair, epoch):
            response.status = wire.NONCE_EXPIRED
            response.responder_nonce = responder_nonce(self._secret, pair, epoch)
            if is_hello:
                response.interest = caller.readable_part(wanted.interest).encode()
            return response
        if known is None:
            response.status = wire.UNKNOWN_INTEREST
            return response
        return await self._answer(request, response, *known, wanted, caller)

    async def _answer(
        self,
        request: wire.ReconRequest,
        response: wire.ReconResponse,
        name: bytes,
        mutual: Interest,
        wanted: InterestState,
        caller: Caller,
    ) -> wire.ReconResponse:
        key = _session_key(request.session, name)
        if len(request.push) > (most := self._limits.recon_push_items_max):
            raise RemoteProtocolError("too_many_items", f"a request can push at most {most} items")
        # The answer includes the pushed items, so the initiator can compare at once.
        without = _moments(request.without)
        outcomes = await self._take(
            request.push, caller, wanted.interest, tells_retired=bool(without)
        )
        policy = response.policy
        room = self._limits.recon_reply_bytes_max - len(outcomes) - RESUME_BYTES
        room -= MARK_FIELD_BYTES if request.mark else 0
        room = min(request.response_bytes_max or room, room)
        fetched = read_fetch(request.fetch) if request.HasField("fetch") else NOTHING_WANTED
        compares = request.HasField("ranges") or request.total
        if compares or len(fetched.ranges):  # a push needs no view
            asked = await self._view_between(request, key, mutual, policy, fetched, caller, without)
            if asked is None:
                response.status = wire.UNKNOWN_MARK
                return response
            # From here to the mark nothing waits, so the mark is that of the view.
            if compares:
                response.MergeFrom(self._compare(asked.view, request, room))
            if request.mark and name == interest_hash(mutual.encode()):
                response.mark = self._replica.marks.at_present(mutual, policy)
                if response.mark != request.since:  # else nothing came since the initiator had it
                    response.moment = self._index.moment
                if request.since:
                    self._index.views.keep(
                        _News(key, request.since, response.mark, mutual),
                        asked.view,
                        beside_bytes=NEWS_ROW_BYTES * len(asked.view),
                    )
            found = _without(resolve(asked.view, fetched), asked.later)
            await self._fill(response, found, room, asked.claims_end)
        response.push_outcomes.extend(outcomes)
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
        without: Sequence[Moments],
    ) -> _Asked | None:
        """The elements that a request is about. None if a mark fails."""
        if max(len(request.since), len(request.up_to)) > MARK_BYTES_MAX:
            raise RemoteProtocolError("malformed", f"a mark has at most {MARK_BYTES_MAX} bytes")
        marks, claims_end = self._replica.marks, None
        if request.up_to:
            claims_end = marks.claims_end(request.up_to, mutual)
            if claims_end is None:
                return None
        compares = request.HasField("ranges") or request.total
        # A short id leads to nothing that arrived later, and all of a range to everything in it.
        needs_up_to = compares or not fetched.counts.all()
        news = self._index.views.find(_News(key, request.since, request.up_to, mutual))
        if news is not None:
            return _Asked(news, NOTHING_CAME, claims_end)
        await self._index.catch_up()
        up_to = request.up_to if needs_up_to else b""
        if not request.since:
            await self._prepare_view(key, mutual, without, caller)
        if not (request.since or up_to):
            return _Asked(self._index.view(key, mutual, without), NOTHING_CAME, claims_end)
        spend = partial(self._budgets.views.spend, caller.name)
        spend(MARK_COST)
        between = await marks.between(
            request.since, up_to, mutual, policy, lambda count: spend(NEWS_COST * count)
        )
        if between is None:
            return None
        if request.since:
            return _Asked(view_of(between.news.columns(), key), NOTHING_CAME, claims_end)
        view, later = self._index.view(key, mutual, without), between.later
        if compares and len(later):
            view = view.corrected(NOTHING_CAME.columns(), later.columns())
        return _Asked(view, later, claims_end)

    def _policy_for(self, caller: Caller, wanted: InterestState) -> int:
        """This node's policy, and what it grants this caller."""
        is_bound = self._replica.demands_senders and not caller.vouches
        if Scope.PUBLISH in caller.scopes and caller.channels is None and not is_bound:
            return wanted.policy
        channels = b"" if caller.channels is None else caller.channels.encode()
        grants = f"{wanted.policy} {sorted(caller.scopes)} {channels!r}"
        if is_bound:
            grants += f" {caller.senders!r}"
        return int.from_bytes(blake3(grants.encode()).digest(length=4), "little")

    async def _prepare_view(
        self, key: SessionKey, mutual: Interest, without: Sequence[Moments], caller: Caller
    ) -> None:
        cost = self._index.elements_to_hash(key, mutual, without)
        self._budgets.views.spend(caller.name, cost)
        if cost and without:
            await self._index.follow_retired()
        await self._index.prepare_view(key, mutual, without)

    async def _take(
        self,
        items: Sequence[wire.Item],
        caller: Caller,
        wanted: Interest,
        *,
        tells_retired: bool,
    ) -> Sequence[wire.PushOutcome]:
        """Take the items that the caller may publish and this node wants; one outcome per item."""
        if Scope.PUBLISH not in caller.scopes:
            return [wire.PUSH_REFUSED] * len(items)
        replica = self._replica.for_peer(caller.instance_id, Way.RECON, caller)
        outcomes = await take_items(
            replica, items, caller.covers, wanted, tells_retired=tells_retired
        )
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
        self, response: wire.ReconResponse, found: Found, bytes_max: int, claims_end: int | None
    ) -> None:
        """Append the found items until the reply is full; then set the place to resume.

        A claim is not sent beside its entry, which brings it.
        """
        items: list[wire.Item] = []
        entry_ids: set[bytes] = set()
        covered, resume = 0, found.resume
        room = bytes_max - response.ByteSize()
        while covered < len(found.ids):
            chunk = slice(covered, covered + FETCH_CHUNK)
            rows = zip(found.orders[chunk].tolist(), found.ids[chunk], strict=True)
            elements = [Element(order, row.tobytes()) for order, row in rows]
            loaded = await self._replica.load(elements, room, claims_end)
            loaded_ids = {item.id for item in loaded if not item.HasField("claim")}
            entries = entry_ids | loaded_ids if items else loaded_ids
            news = [item for item in loaded if item.claim.digest not in entries]
            size = items_size(news)
            # Every fetch makes progress, if only by one item larger than the room.
            if size > room and items:
                head = int.from_bytes(found.ids[covered, :8].tobytes(), "big")
                resume = Bound(int(found.orders[covered]), head)
                break
            items += news
            entry_ids |= loaded_ids
            room -= size
            covered += len(loaded)
        # A claim that was loaded before its entry was not known to be one.
        response.items.extend(item for item in items if item.claim.digest not in entry_ids)
        if resume is not None:
            response.truncated = True
            response.resume = bound_bytes(resume)


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
    *,
    tells_retired: bool = False,
) -> list[wire.PushOutcome]:
    """Pass pushed items through the one door; one outcome per item, in order.

    A claim needs an entry that is here already. `covers`: whether the caller may write to a channel; a
    claim on an entry of any other channel gets the answer for an absent entry. Items outside `wanted`
    are refused: a peer can have begun before this node changed what it wants. Raises Problem if this
    node is at fault (disk full, database gone).
    """
    window = wanted.window
    outcomes = [wire.NO_ENTRY if item.HasField("claim") else wire.PUSH_REFUSED for item in items]
    positions = [
        at for at, item in enumerate(items) if item.HasField("entry") or item.HasField("claim")
    ]
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
        is_retired = tells_retired and result.code == RETIRED
        outcomes[at] = wire.PUSH_RETIRED if is_retired else result.outcome
    return outcomes


def _moments(without: Sequence[wire.Retired]) -> tuple[Moments, ...]:
    """The moments of `ReconRequest.without`."""
    pairs = tuple([(each.after, each.until) for each in without])
    sizes = {len(each) for pair in pairs for each in pair}
    if len(pairs) > CUTS_MAX or not sizes <= {0, MOMENT_BYTES}:
        what = f"at most {CUTS_MAX} pairs of moments of {MOMENT_BYTES} bytes"
        raise RemoteProtocolError("malformed", what)
    return pairs


def _session_key(session: wire.Session, interest_name: bytes) -> SessionKey:
    if len(session.initiator_nonce) != NONCE_BYTES:
        raise RemoteProtocolError("malformed", f"a nonce has {NONCE_BYTES} bytes")
    return derive_session_key(session.initiator_nonce, session.responder_nonce, interest_name)


class _Asked(NamedTuple):
    """The elements that a request is about: a view, without those that arrived `later` than its `up_to`.

    Only a fetch is left with such elements: removing them from a large view costs more than leaving them out
    of what it brings. `claims_end`: the number of the last claim up to there; None for all.
    """

    view: View
    later: Arrived
    claims_end: int | None


class _News(NamedTuple):
    """The name of a view over what arrived between two marks, for the requests that follow the first answer.

    They would otherwise read both marks and the news again.
    """

    key: SessionKey
    since: bytes
    up_to: bytes
    mutual: Interest


class KnownInterests:
    """A cache of callers' interests, intersected with ours and with the channels they may read.

    So an interest is decoded and matched once, not with every request. The oldest are dropped, and all
    when ours has changed.
    """

    def __init__(self, bytes_max: int) -> None:
        self._ours = Interest()
        self._known: Recent[_Key, tuple[Interest, int]] = Recent(
            sys.maxsize, bytes_max, itemgetter(1)
        )

    def find(
        self, session: wire.Session, caller: Caller, ours: Interest
    ) -> tuple[bytes, Interest] | None:
        """Hash and mutual interest of a request; None if the caller must send it in full.

        Raises `RemoteProtocolError` for an interest that is not canonical.
        """
        if ours is not self._ours:
            self._known.clear()
            self._ours = ours
        name = session.interest_hash
        if session.WhichOneof("interest") == "interest_bytes":
            name = interest_hash(session.interest_bytes)
            if (name, caller.channels) not in self._known:
                self._add(name, session.interest_bytes, caller)
        found = self._known.get((name, caller.channels))
        return None if found is None else (name, found[0])

    def _add(self, name: bytes, raw: bytes, caller: Caller) -> None:
        mutual = caller.readable_part(decode_interest(raw).intersect(self._ours))
        names_count = len(mutual.channels) + len(mutual.prefixes)
        size = len(raw) + _NAME_BYTES * names_count + _INTEREST_BYTES
        self._known.put((name, caller.channels), (mutual, size))


# ---- negentropy

THREAD_RECORDS_MIN = 50_000
"""From this size on an answer takes milliseconds, so a thread computes it."""

THREAD_BODY_BYTES_MIN = 8_192
"""From this size on reading a message takes as long: a range can take only 3 bytes."""

COST_PER_BYTE = 4
"""The cost of a byte of a message, in hashed elements: empty ranges cost 6, lists almost nothing."""

_SIGN = np.uint64(1 << 63)

_Name = tuple[str, int | None, int]  # of a set: channel, Lamport timestamp from which on, divisor
_INT64_MAX = (1 << 63) - 1


class NegentropyEndpoint:
    """Answers messages; caches the sorted records of recently requested channels."""

    def __init__(self, index: NodeIndex, limits: Limits, budgets: ReconBudgets) -> None:
        self._index = index
        self._limits = limits
        self._budgets = budgets
        self._records: Recent[_Name, tuple[int, Records]] = Recent(limits.negentropy_channels_max)

    async def answer(
        self,
        body: bytes,
        channel_id: str,
        from_lamport: int | None,
        divisor: int,
        caller_name: str,
    ) -> bytes:
        """The answer to a message about the entries of a channel from a Lamport timestamp on.

        The timestamps of the records are the Lamport timestamps divided by `divisor`.
        Raises Problem: `invalid_negentropy_message`, `recon_budget_spent`.
        """
        self._budgets.check(caller_name)
        self._budgets.views.spend(caller_name, COST_PER_BYTE * len(body))
        await self._index.catch_up()
        records = self._channel_records((channel_id, from_lamport, divisor), caller_name)
        server = Negentropy(
            records,
            frame_limit_bytes=self._limits.negentropy_reply_bytes_max,
            message_bytes_max=self._limits.negentropy_body_bytes_max,
            ranges_max=self._limits.negentropy_ranges_max,
        )
        try:
            if len(records) < THREAD_RECORDS_MIN and len(body) < THREAD_BODY_BYTES_MIN:
                answer = server.respond(body)
            else:
                answer = await asyncio.to_thread(server.respond, body)
        except RemoteProtocolError as error:
            raise Problem(
                Code.INVALID_NEGENTROPY_MESSAGE, str(error), extra={"fault": error.code}
            ) from None
        self._budgets.replies.spend(caller_name, len(answer))
        return answer

    def _channel_records(self, name: _Name, caller_name: str) -> Records:
        channel_id, from_lamport, divisor = name
        lower = 0 if from_lamport is None else order_of_lamport(from_lamport)
        elements_count = len(self._index.elements)
        known_count, records = self._records.get(name) or (-1, None)
        if records is None or known_count != elements_count:
            orders, digests = self._index.channel_elements(channel_id, OrderWindow(lower, None))
            if records is None or len(records) != len(orders):
                self._budgets.views.spend(caller_name, VIEW_COST_MIN + len(orders))
                lamports = (orders ^ _SIGN).view(np.int64)
                if divisor > 1:
                    lamports = lamports // min(divisor, _INT64_MAX)
                records = Records.from_lamports(lamports, digests)
        self._records.put(name, (elements_count, records))
        return records
