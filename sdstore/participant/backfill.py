"""Backfill: a participant's log gets exactly what it lacks of a store's channel, whatever the reason.

The log and the store are compared by reconciliation (docs/recon-protocol.md), so the cost grows with
the difference and not with the channel: long absences, holes and a lost last message are all the same.
`LogReplica` is the log as the driver of a session sees it (`sdstore.sync.driver.Replica`).

Fetched messages arrive in any order. They are staged in the log, durably, so an interrupted backfill
continues where it stopped; `drain` then feeds them to the participant in log order.

Nothing that a store sends is trusted. A message is taken if its own content has the requested digest
and belongs to the channel. The log notes the name of a message that it refuses, because the content
proved what it is, so no store can make a backfill fetch it again. A frame that does not decode proves
nothing: only this store's client sets it aside, for a while, and another store can still provide the
message.

Memory grows with the channel, not with its content: about 80 bytes for each element of the log (ID,
timestamp, and a session's view of both), and the batches in flight, at most 64 MB.
"""

from __future__ import annotations

import asyncio
import gc
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from recon.agreement import Interest, SessionKey
from recon.elements import U8, U64, Mask, order_of_lamport
from recon.index import RangeIndex
from recon.limits import ID_BYTES
from recon.view import View
from sdstore.client.records import StoredMessage
from sdstore.client.transport import sync_error
from sdstore.errors import StoreError, malformed_reply
from sdstore.sds.codec import decode
from sdstore.sds.effects import Effect, Save
from sdstore.sds.log import BackfillLog, Noted, Staged
from sdstore.sds.model import Kind, Message, MessageError, claim_id, entry_digest
from sdstore.sync.comparison import Mode
from sdstore.sync.driver import Transport, sync_with_peer
from sdstore.sync.memory import Element, PeerMemory, columns
from sdstore.sync.report import (
    DEFAULT_LIMITS,
    Counts,
    Progress,
    SyncCode,
    SyncOutcome,
    SyncReport,
)
from sdstore.sync.steps import NOT_CONTENT, LostPage, Prepared, Stored
from sdstore.wire.recon_pb2 import (
    DUPLICATE,
    LOST,
    NO_ENTRY,
    PUSH_REFUSED,
    STORED,
    Item,
)

FRAME_BYTES_MAX = 1 << 20  # as a node of ours: any reply has room for one frame
HINT_BYTES_MAX = 256  # hints in use are 32-byte hashes
HINTS_MAX = 256  # of one message: as many as a store keeps
NOTED_BASE_MAX = 1 << 16  # names that the log notes: 3 MB
NOTED_PER_MESSAGE_MAX = 16  # and for each message: usually it has one claim, at a store up to 64
PAGE_MESSAGES = 1_000  # of one page, and of one transaction of the log
PAGE_BYTES_MAX = 8 << 20  # of frames, in a transaction: they are in memory until it ends
DRAIN_MESSAGES = 1_000  # taken at once: one transaction, and 50 ms without the event loop
READ_S_MAX = DEFAULT_LIMITS.seconds_max  # of reading all pages: as long as a session
SILENT_S_MAX = 300  # without a message meanwhile: a page takes 120 s at most, and is tried again
USELESS_MAX = 100 * PAGE_MESSAGES  # messages in a row that are refused, or came before: 100 pages
_LAMPORT_OFFSET = 1 << 63
MEMORIES_MAX = 64  # channels; one with many disputes takes 25 MB, the usual one 1 kB

WRONG_CHANNEL = "wrong_channel"
VARIANT = "variant"  # another message with the ID of a message that the log has
FRAME_TOO_LARGE = "frame_too_large"

_STORED, _DUPLICATE = Stored(STORED), Stored(DUPLICATE)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector from running in a block, which must neither await nor be long.

    A batch of messages makes some 10,000 objects, which are freed by their reference counts. The
    collector would visit all objects of the program several times a second meanwhile, which takes a
    third of the time of a backfill. What it has to free waits until the block ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Received:
    """A received message, decoded; `hints` that a log can keep."""

    message: Message
    frame: bytes
    hints: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Fetched(Staged):
    """A message to stage, with all hints that came with it."""

    retrieval_hints: tuple[bytes, ...] = ()


class LogReplica:
    """One channel's log as a replica; `open` reads its elements."""

    def __init__(self, channel_id: str, log: BackfillLog) -> None:
        self._channel_id = channel_id
        self._log = log
        self._index = RangeIndex()

    @classmethod
    async def open(cls, channel_id: str, log: BackfillLog) -> LogReplica:
        """The replica of a log with all elements that it has now."""
        replica = cls(channel_id, log)
        for lamports, ids in log.elements():
            orders = np.array(lamports, np.int64).view(np.uint64) + np.uint64(_LAMPORT_OFFSET)
            replica._insert(orders, np.frombuffer(ids, np.uint8).reshape(-1, ID_BYTES))
            await asyncio.sleep(0)
        return replica

    def _insert(self, orders: U64, ids: U8) -> None:
        self._index.insert(orders, ids, np.zeros(len(orders), np.uint32))

    def __len__(self) -> int:
        return len(self._index)

    # --- elements --------------------------------------------------------------------------------

    @property
    def arrived_count(self) -> int:
        """The log does not know which elements are recent to the store."""
        return 0

    async def catch_up(self) -> None:
        """Messages that the log gets meanwhile are duplicates when they arrive (`commit`)."""

    def view(self, key: SessionKey, interest: Interest) -> View:
        """See `Replica`; all elements are of the one channel."""
        return View(self._index, key, window=interest.window)

    def holds(self, orders: U64, ids: U8) -> Mask:
        """See `Replica`."""
        return self._index.holds(orders, ids)

    # --- content that goes out -------------------------------------------------------------------

    async def load(self, elements: Sequence[Element], bytes_max: int) -> list[Item]:
        """See `Replica`. Names that the log notes have no content: they are never offered."""
        frames = self._log.frames([each.element_id for each in elements])
        items: list[Item] = []
        room = bytes_max
        for element in elements:
            found = frames.get(element.element_id)
            item = Item(order=element.order, id=element.element_id)
            if found is None:
                item.absent.reason = LOST
            else:
                frame, hint = found
                item.entry.frame = frame
                item.entry.hints.extend([hint] if hint else [])
            room -= item.ByteSize()
            if room < 0 and items:
                break
            items.append(item)
        return items

    def claim_id(self, entry_id: bytes, hint: bytes) -> bytes:
        """See `Replica`."""
        return claim_id(entry_id, hint)

    # --- content that comes in -------------------------------------------------------------------

    async def prepare(self, items: Sequence[Item]) -> list[Prepared]:
        """See `Replica`."""
        with collector_paused():
            return self._prepared(items)

    def _prepared(self, items: Sequence[Item]) -> list[Prepared]:
        entries = [
            _entry(item.entry.frame, item.entry.hints, item.id) if item.HasField("entry") else None
            for item in items
        ]
        read = [each for each in entries if each is not None]
        if len(read) == len(items):
            return read
        claims = [item for item in items if item.HasField("claim")]
        named = columns((item.order, item.claim.digest) for item in claims)
        ids = [claim_id(item.claim.digest, item.claim.hint) for item in claims]
        has_entry = iter(self.holds(*named).tolist())
        is_held = iter(self.holds(*columns(zip(named[0].tolist(), ids, strict=True))).tolist())
        claim_ids = iter(ids)
        prepared = []
        for item, entry in zip(items, entries, strict=True):
            if entry is not None:
                prepared.append(entry)
                continue
            digest = item.claim.digest
            order = item.order if next(has_entry) else None
            prepared.append(
                Prepared(
                    order=order,
                    element_id=next(claim_ids),
                    entry_id=digest,
                    is_held=next(is_held),
                )
            )
        return prepared

    @property
    def stored_at_once(self) -> int:
        """See `Replica`. A larger transaction would hold the caller's event loop for longer."""
        return 1

    async def commit(self, prepared: Sequence[Prepared]) -> list[Stored]:
        """See `Replica`. Stages messages, and notes claims and the names of refused messages.

        Names beyond the bound are forgotten at the end of the session: the next one fetches them again.
        """
        with collector_paused():
            return self._committed(prepared)

    def _committed(self, prepared: Sequence[Prepared]) -> list[Stored]:
        stored = [Stored(NO_ENTRY)] * len(prepared)
        staged: list[Staged] = []
        noted: list[Noted] = []
        came: list[Element] = []
        entries = [at for at, each in enumerate(prepared) if not each.entry_id]
        ids = [prepared[at].content.message.message_id for at in entries]
        known = dict(self._log.digests(ids))
        for at, message_id in zip(entries, ids, strict=True):
            each, received = prepared[at], prepared[at].content
            element = Element(each.order or 0, each.element_id)
            code = _refusal(received, self._channel_id)
            is_variant = known.get(message_id, each.element_id) != each.element_id
            if not code and is_variant and not self._log.keeps_variants:
                code = VARIANT
            if code:
                stored[at] = Stored(PUSH_REFUSED, code)
                noted.append(_noted(element))
            elif known.get(message_id) == each.element_id:  # it arrived on another way meanwhile
                stored[at] = _DUPLICATE
            else:
                stored[at] = _STORED
                known[message_id] = each.element_id
                message, frame, hints = received.message, received.frame, received.hints
                hint = hints[0] if hints else b""
                staged.append(Fetched(message, frame, each.element_id, hint, hints))
            came.append(element)
            if each.claims:
                claims = [Element(element.order, each) for each in each.claims]
                noted += map(_noted, claims)
                came += claims
        for at, each in enumerate(prepared):
            if each.entry_id and each.order is not None:  # its entry is here
                stored[at] = _STORED
                claim = Element(each.order, each.element_id)
                noted.append(_noted(claim))
                came.append(claim)
        room = NOTED_BASE_MAX + NOTED_PER_MESSAGE_MAX * len(self) - self._log.noted_count
        self._log.stage(staged, noted[: max(room, 0)])
        if came:
            self._insert(*columns(came))
        return stored

    # --- content that is lost here ---------------------------------------------------------------

    async def lost(self, *_: object) -> LostPage:
        """A log that cannot be read raises."""
        return LostPage([], 0, 0)

    async def lost_among(self, _entry_ids: Sequence[bytes]) -> set[bytes]:
        """See `lost`."""
        return set()


# --- items to prepared items -----------------------------------------------------------------------


def _entry(frame: bytes, sent_hints: Iterable[bytes], name: bytes) -> Prepared:
    """A prepared message, sent under this name (a digest).

    `commit` decides what its content proves, once it is known that it was requested.
    """
    hints: tuple[bytes, ...] = ()
    if sent_hints:
        good = [hint for hint in sent_hints if 0 < len(hint) <= HINT_BYTES_MAX]
        hints = tuple(good[:HINTS_MAX])
    try:
        message, _ = decode(frame)
    except MessageError as error:
        claims = tuple([claim_id(name, hint) for hint in hints])
        return Prepared(claims=claims, refusal=error.code)
    digest = entry_digest(message)
    return Prepared(
        order=order_of_lamport(message.lamport_timestamp or 0),
        element_id=digest,
        claims=tuple([claim_id(digest, hint) for hint in hints]) if hints else (),
        channel_id=message.channel_id,
        content=Received(message, frame, hints),
    )


def _refusal(received: Received, channel_id: str) -> str:
    """Why the log does not take a message, whatever else it holds; empty if it does."""
    if received.message.channel_id != channel_id:
        return WRONG_CHANNEL
    if received.message.kind is not Kind.CONTENT:
        return NOT_CONTENT
    if len(received.frame) > FRAME_BYTES_MAX:
        return FRAME_TOO_LARGE
    return ""


def _noted(element: Element) -> Noted:
    return Noted(element.order - _LAMPORT_OFFSET, element.element_id)


# --- one backfill ----------------------------------------------------------------------------------


class Memories:
    """What backfills from one store remember of it, by channel, in memory.

    The answer to the last hello, from a session about any channel, saves a round trip for some minutes;
    elements that the store offered and did not serve, or served as frames that do not decode, are not
    requested again for a while.
    """

    def __init__(self) -> None:
        self._memories: OrderedDict[str, PeerMemory] = OrderedDict()
        self._last = PeerMemory()

    def of(self, channel_id: str) -> PeerMemory:
        """The memory for the next session."""
        memory, last = self._memories.get(channel_id, PeerMemory()), self._last
        if last.policy is not None:
            memory = memory.with_policy(last.policy)
        return replace(memory, responder_nonce=last.responder_nonce, interest=last.interest)

    def learn(self, channel_id: str, memory: PeerMemory) -> None:
        """Keep the memory of a session; the one used longest ago is dropped beyond the bound."""
        self._last = memory
        self._memories[channel_id] = memory
        self._memories.move_to_end(channel_id)
        if len(self._memories) > MEMORIES_MAX:
            self._memories.popitem(last=False)


async def reconcile(
    channel_id: str,
    log: BackfillLog,
    transport: Transport,
    memories: Memories,
    pages: Callable[[], AsyncIterator[StoredMessage]],
    *,
    on_progress: Callable[[Progress], None] | None = None,
    send: bool = False,
) -> SyncReport:
    """One session; see `AsyncStoreClient.backfill`.

    `pages` reads all messages of the channel, for a store that does not reconcile with this caller.
    """
    replica = await LogReplica.open(channel_id, log)
    interest = Interest.make(channels=frozenset([channel_id]))
    report, memory = await sync_with_peer(
        replica,
        transport,
        interest,
        memory=memories.of(channel_id),
        mode=Mode.MOVE if send else Mode.FETCH,
        changed=on_progress or (lambda _: None),
    )
    memories.learn(channel_id, memory)
    if report.code in (SyncCode.FORBIDDEN, SyncCode.PEER_VERSION):
        return await _read_pages(replica, pages(), report, on_progress)
    return report


async def _read_pages(
    replica: LogReplica,
    messages: AsyncIterator[StoredMessage],
    report: SyncReport,
    on_progress: Callable[[Progress], None] | None,
) -> SyncReport:
    """Take what the log lacks of all messages of the channel, which costs reading all of them.

    A store whose pages never end is at fault, or the time ends the reading; what came is staged.
    """
    counts = Counts()
    batch: list[Prepared] = []
    held_max = len(replica)  # a store sends each of them once
    held_count = useless_count = read_count = read_bytes = 0

    async def take() -> None:
        nonlocal held_count, useless_count, read_count, read_bytes
        received_before, held_before = counts["entries_received"], held_count
        held = replica.holds(*columns((each.order or 0, each.element_id) for each in batch))
        news = [each for each, is_held in zip(batch, held.tolist(), strict=True) if not is_held]
        held_count += len(batch) - len(news)
        batch.clear()
        for stored in await replica.commit(news):
            counts["entries_received"] += stored.outcome == STORED
            counts["entries_refused"] += stored.outcome == PUSH_REFUSED
        has_news = counts["entries_received"] > received_before
        is_useful = has_news or held_before < held_count <= held_max
        useless_count = 0 if is_useful else _bounded(useless_count + read_count)
        read_count = read_bytes = 0
        if on_progress is not None:
            received, refused = counts["entries_received"], counts["entries_refused"]
            on_progress(Progress(entries_received=received, entries_refused=refused))

    detail = (
        f"read all pages, because the store does not reconcile with this caller: {report.detail}"
    )
    outcome, code = SyncOutcome.IN_SYNC, ""
    try:
        async with asyncio.timeout(READ_S_MAX), asyncio.timeout(SILENT_S_MAX) as silence:
            async for each in messages:
                silence.reschedule(asyncio.get_running_loop().time() + SILENT_S_MAX)
                prepared = _entry(each.frame, each.retrieval_hints, each.digest)
                counts["entries_refused"] += bool(prepared.refusal)
                if not prepared.refusal:
                    batch.append(prepared)
                read_count += 1
                read_bytes += len(each.frame)
                if read_count == PAGE_MESSAGES or read_bytes >= PAGE_BYTES_MAX:
                    await take()
            await take()
    except TimeoutError:
        outcome, code = SyncOutcome.PARTIAL, SyncCode.BUDGET_SPENT
        detail = f"not complete after {READ_S_MAX} s, or no message for {SILENT_S_MAX} s"
    except StoreError as error:
        if error.code != "not_found":  # a channel without messages
            ended = sync_error(error)
            outcome, code, detail = ended.outcome, ended.code, ended.detail
    return SyncReport(
        outcome=outcome,
        code=code,
        detail=detail,
        elements=len(replica),
        missing_here=counts["entries_received"],
        entries_received=counts["entries_received"],
        entries_refused=counts["entries_refused"],
    )


def _bounded(useless_count: int) -> int:
    """So many useless messages in a row, if they are not too many."""
    if useless_count >= USELESS_MAX:
        raise malformed_reply(f"{useless_count} messages in a row were refused or came before")
    return useless_count


class TakesStaged(Protocol):
    """A participant, as `drain` needs it."""

    def take_staged(self, now_ms: int, count: int) -> list[Effect]:
        """See `sdstore.sds.Participant`."""


def drain(
    participant: TakesStaged,
    save: Callable[[Sequence[Save]], None],
    now_ms: Callable[[], int],
    count: int = DRAIN_MESSAGES,
) -> Iterator[list[Effect]]:
    """Feed what a backfill staged to the participant, in log order; the effects of each batch.

    `save` writes the `Save` effects of a batch in one transaction; the other effects are yielded
    afterwards. Carry them out before you ask for the next batch. The iteration ends when nothing is
    staged, or when the participant has no room until messages arrive that others wait for.
    """
    while True:
        with collector_paused():
            effects = participant.take_staged(now_ms(), count)
            if not effects:
                return
            save([each for each in effects if isinstance(each, Save)])
        yield [each for each in effects if not isinstance(each, Save)]
