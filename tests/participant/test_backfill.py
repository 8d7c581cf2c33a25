"""Backfills of logs from a node on a real socket, honest and not."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

import sdstore.participant.backfill as backfill
import sdstore.sync.content as content_module
from recon.agreement import Interest
from sdstore.client import AsyncStoreClient, ClientOptions, Retry, StoreClient
from sdstore.client.exchange import Batcher
from sdstore.client.records import PublishItem, StoredMessage
from sdstore.client.transport import HttpTransport, HttpxCalls
from sdstore.participant.backfill import LogReplica, drain
from sdstore.participant.file import ParticipantFile
from sdstore.sds.codec import encode
from sdstore.sds.effects import Deliver, Effect, Save
from sdstore.sds.log import BackfillLog, LogEntry, MemoryLog
from sdstore.sds.model import HistoryEntry, Message, entry_digest
from sdstore.sync.comparison import Mode
from sdstore.sync.content import MOVES_IN_FLIGHT_MAX
from sdstore.sync.driver import sync_with_peer
from sdstore.sync.report import SyncOutcome, SyncReport
from sdstore.wire.recon_pb2 import (
    REFUSED,
    UNSUPPORTED_VERSION,
    ReconRequest,
    ReconResponse,
)
from tests.support.server import RunningNode, running_node

SEED = 20_261_122
IMPATIENT = ClientOptions(retry=Retry(attempts_max=2, backoff_s=0.01))
Mangle = Callable[[ReconRequest, ReconResponse], ReconResponse]
channels = count()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture
def channel_id() -> str:
    return f"channel {next(channels)}"


def messages(channel_id: str, numbers: Iterable[int], text: str = "content") -> list[Message]:
    return [
        Message(
            f"m{n}", channel_id, "ada", 1_761_000_000_000 + 977 * n, content=b"%a %d" % (text, n)
        )
        for n in numbers
    ]


def publish(node: RunningNode, some: Iterable[Message], *hints: bytes) -> None:
    with StoreClient(node.url) as client:
        items = [PublishItem(encode(each), hints) for each in some]
        outcomes = list(client.publish_stream(items, Batcher(items_max=5_000)))
    assert all(each.outcome == "stored" for each in outcomes)


def log_with(some: Iterable[Message]) -> MemoryLog:
    log = MemoryLog()
    for number, each in enumerate(some, start=1):
        log.append(LogEntry(each, encode(each), number))
    return log


def staged(log: MemoryLog) -> list[str]:
    return [each.message.message_id for each in log.staged(1_000_000)]


def backfilled(
    node: RunningNode,
    channel_id: str,
    log: BackfillLog,
    *,
    mangle: Mangle | None = None,
    times: int = 1,
    **options: Any,
) -> list[SyncReport]:
    """Backfills with one client; `mangle` changes the node's answers on their way."""

    async def scenario() -> list[SyncReport]:
        transport = None if mangle is None else Liar(mangle)
        async with AsyncStoreClient(node.url, options=IMPATIENT, transport=transport) as client:
            return [await client.backfill(channel_id, log, **options) for _ in range(times)]

    return run(scenario())


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 60))


class Liar(httpx.AsyncBaseTransport):
    """The node behind a proxy that changes its answers."""

    def __init__(self, mangle: Mangle) -> None:
        self._mangle = mangle
        self._inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/v1/recon"):
            return await self._inner.handle_async_request(request)
        body = await request.aread()
        if request.headers.get("content-encoding") == "zstd":
            body = zstandard.decompress(body)
        answer = await self._inner.handle_async_request(request)
        response = ReconResponse.FromString(await answer.aread())
        mangled = self._mangle(ReconRequest.FromString(body), response).SerializeToString()
        stream = httpx.ByteStream(mangled)
        return httpx.Response(answer.status_code, stream=stream)

    async def aclose(self) -> None:
        await self._inner.aclose()


# --- what is missing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param({3, 17, 18, 19, 250, 251}, id="holes"),
        pytest.param(set(range(200, 300)), id="a long absence"),
        pytest.param({299}, id="the last message"),
        pytest.param({0}, id="the first message"),
        pytest.param(set(range(300)), id="everything"),
        pytest.param(set(range(0, 300, 2)), id="every other message"),
    ],
)
def test_a_log_gets_exactly_what_it_lacks_whatever_the_reason(
    node: RunningNode, channel_id: str, missing: set[int]
) -> None:
    publish(node, messages(channel_id, range(300)))
    log = log_with(
        each for n, each in enumerate(messages(channel_id, range(300))) if n not in missing
    )
    first, again = backfilled(node, channel_id, log, times=2)
    assert staged(log) == [f"m{n}" for n in sorted(missing)]
    assert (first.outcome, first.entries_received) == (SyncOutcome.IN_SYNC, len(missing))
    assert (again.entries_received, again.proved, again.rounds) == (0, True, 1)


def test_disjoint_sets_are_united_here_and_with_send_there_too(
    node: RunningNode, channel_id: str
) -> None:
    ours, theirs = messages(channel_id, range(50)), messages(channel_id, range(50, 90))
    publish(node, theirs, b"a hint")
    log = log_with(ours)
    [report] = backfilled(node, channel_id, log)
    assert (report.entries_received, report.entries_sent, report.missing_there) == (40, 0, 50)
    [report] = backfilled(node, channel_id, log, send=True)
    assert (report.entries_received, report.entries_sent, report.proved) == (0, 50, True)
    with StoreClient(node.url) as client:
        assert {each.message for each in client.messages(channel_id)} == {*ours, *theirs}


def test_a_message_that_arrives_live_meanwhile_is_not_staged(
    node: RunningNode, channel_id: str
) -> None:
    publish(node, messages(channel_id, range(20)))
    log = log_with(messages(channel_id, range(10)))

    def arrives(_: ReconRequest, response: ReconResponse) -> ReconResponse:
        if response.items:
            [live] = messages(channel_id, [15])
            log.append(LogEntry(live, encode(live), 11))
        return response

    [report] = backfilled(node, channel_id, log, mangle=arrives)
    assert staged(log) == [f"m{n}" for n in range(10, 20) if n != 15]
    assert report.entries_received == 9


def test_the_next_request_leaves_before_an_answer_is_stored(
    node: RunningNode, channel_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(node, messages(channel_id, range(100)))
    monkeypatch.setattr(content_module, "MOVE_BYTES_MAX", 2_000)
    steps: list[str] = []
    send, stage = HttpTransport.recon, MemoryLog.stage

    async def recording_send(self: HttpTransport, request: bytes) -> bytes:
        if ReconRequest.FromString(request).HasField("fetch"):
            steps.append("request")
        return await send(self, request)

    def recording_stage(self: MemoryLog, *some: Any) -> None:
        steps.append("store")
        stage(self, *some)

    monkeypatch.setattr(HttpTransport, "recon", recording_send)
    monkeypatch.setattr(MemoryLog, "stage", recording_stage)
    log = MemoryLog()
    [report] = backfilled(node, channel_id, log)
    assert (report.outcome, len(staged(log))) == (SyncOutcome.IN_SYNC, 100)
    assert steps.count("request") == steps.count("store") > 4
    ahead = [steps[:at].count("request") - steps[:at].count("store") for at in range(len(steps))]
    assert steps[:2] == ["request", "request"]
    assert max(ahead) <= MOVES_IN_FLIGHT_MAX


# --- what is interrupted ---------------------------------------------------------------------------


def test_an_interrupted_backfill_fetches_nothing_twice(
    node: RunningNode, channel_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(node, messages(channel_id, range(200)))
    log = MemoryLog()
    monkeypatch.setattr(content_module, "MOVE_BYTES_MAX", 2_000)
    monkeypatch.setattr(content_module, "MOVE_ELEMENTS_MAX", 32)

    async def interrupted() -> None:
        async with AsyncStoreClient(node.url) as client:
            work = asyncio.create_task(client.backfill(channel_id, log))
            while len(staged(log)) < 50:  # noqa: ASYNC110 - the log has no events
                await asyncio.sleep(0)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work

    run(interrupted())
    before = len(staged(log))
    assert 50 <= before < 200
    [report] = backfilled(node, channel_id, log)
    assert (report.entries_received, len(staged(log))) == (200 - before, 200)


# --- names without content --------------------------------------------------------------------------


def test_a_variant_of_a_logged_message_is_fetched_once_and_not_staged(
    node: RunningNode, channel_id: str
) -> None:
    every = messages(channel_id, range(10))
    variants = [replace(each, content=b"another") for each in every[:3]]
    publish(node, every[3:] + variants)
    log = log_with(every[:3])
    first, again = backfilled(node, channel_id, log, times=2)
    assert (first.entries_received, first.entries_refused) == (7, 3)
    assert {each["code"] for each in first.set_aside} == {"variant"}
    assert staged(log) == [f"m{n}" for n in range(3, 10)]
    assert (again.entries_received, again.entries_refused, again.rounds) == (0, 0, 1)
    [fresh] = backfilled(node, channel_id, log)  # another client: the log itself has noted them
    assert (fresh.entries_refused, fresh.missing_here) == (0, 0)


# --- stores that lie --------------------------------------------------------------------------------


def items_changed(change: Callable[[Any], None]) -> Mangle:
    def mangle(_: ReconRequest, response: ReconResponse) -> ReconResponse:
        for item in response.items:
            change(item)
        return response

    return mangle


def test_another_message_than_the_one_named_ends_the_backfill(
    node: RunningNode, channel_id: str
) -> None:
    publish(node, messages(channel_id, range(10)))
    [forged] = messages(channel_id, [999], "forged")

    def forges(item: Any) -> None:
        item.entry.frame = encode(forged)

    log = MemoryLog()
    [report] = backfilled(node, channel_id, log, mangle=items_changed(forges))
    assert (report.outcome, report.code) == (SyncOutcome.PEER_FAULT, "peer_misbehaved")
    assert staged(log) == []
    assert log.noted_count == 0


def test_a_message_of_another_channel_is_refused_alone_and_never_again(
    node: RunningNode, channel_id: str
) -> None:
    publish(node, messages(channel_id, range(10)))
    log, other = MemoryLog(), f"{channel_id} of others"
    publish(node, messages(other, range(10)))
    both = Interest.make(channels=frozenset([channel_id, other]))  # as if the store mixed them up

    async def scenario() -> SyncReport:
        async with httpx.AsyncClient(base_url=node.url) as http:
            replica = await LogReplica.open(channel_id, log)
            report, _ = await sync_with_peer(
                replica, HttpTransport(HttpxCalls(http)), both, mode=Mode.FETCH
            )
            return report

    first, again = run(scenario()), run(scenario())
    assert (first.entries_received, first.entries_refused) == (10, 10)
    assert {each["code"] for each in first.set_aside} == {"wrong_channel"}
    assert staged(log) == [f"m{n}" for n in range(10)]
    assert (again.missing_here, again.entries_refused) == (0, 0)


def test_a_frame_that_does_not_decode_is_refused_alone_and_another_store_can_serve_it(
    node: RunningNode, channel_id: str
) -> None:
    publish(node, messages(channel_id, range(10)))
    victim = entry_digest(messages(channel_id, [4])[0])
    fetched = []

    def damages(item: Any) -> None:
        if item.id == victim:
            fetched.append(victim)
            item.entry.frame = b"\xff\xff"

    log = MemoryLog()
    first, again = backfilled(node, channel_id, log, mangle=items_changed(damages), times=2)
    assert (first.outcome, first.entries_received, first.entries_refused) == ("in_sync", 9, 1)
    assert (again.entries_refused, len(fetched)) == (0, 1)
    [honest] = backfilled(node, channel_id, log)
    assert (honest.entries_received, len(staged(log))) == (1, 10)


def test_a_store_that_never_serves_what_it_offers_is_at_fault_and_the_rest_is_kept(
    node: RunningNode, channel_id: str
) -> None:
    publish(node, messages(channel_id, range(10)))
    victim = entry_digest(messages(channel_id, [4])[0])

    def withholds(_: ReconRequest, response: ReconResponse) -> ReconResponse:
        kept = [item for item in response.items if item.id != victim]
        del response.items[:]
        response.items.extend(kept)
        return response

    # Named one by one: of a whole range an initiator cannot know what it contains.
    log = log_with(messages(channel_id, [n for n in range(10) if n not in (4, 7)]))
    [report] = backfilled(node, channel_id, log, mangle=withholds)
    assert (report.outcome, report.code) == (SyncOutcome.PEER_FAULT, "peer_misbehaved")
    assert staged(log) == ["m7"]


def test_random_damage_of_answers_never_raises_nor_gets_anything_wrong_into_the_log(
    node: RunningNode, channel_id: str
) -> None:
    rng = random.Random(SEED)
    every = messages(channel_id, range(40))
    publish(node, every, b"hint")

    def damages(_: ReconRequest, response: ReconResponse) -> ReconResponse:
        raw = bytearray(response.SerializeToString())
        for _ in range(rng.randrange(3)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            return ReconResponse.FromString(bytes(raw))
        except Exception:  # noqa: BLE001 - protobuf's; the transport has its own test for those
            return response

    for _ in range(12):
        log = log_with(every[:20])
        backfilled(node, channel_id, log, mangle=damages)
        assert {each.message for each in log.staged(100)} <= set(every[20:]), SEED


# --- stores that do not reconcile --------------------------------------------------------------------


@pytest.mark.parametrize("status", [REFUSED, UNSUPPORTED_VERSION])
def test_pages_are_read_where_a_store_does_not_reconcile_with_us(
    node: RunningNode, channel_id: str, status: int
) -> None:
    every = messages(channel_id, range(40))
    publish(node, every[:30])
    publish(node, every[30:], b"hint")
    log = log_with(every[:20])
    refuses = ReconResponse(version=2, status=status)
    first, again = backfilled(node, channel_id, log, mangle=lambda *_: refuses, times=2)
    assert staged(log) == [f"m{n}" for n in range(20, 40)]
    assert (first.outcome, first.entries_received, first.proved) == ("in_sync", 20, False)
    assert "read all pages" in first.detail
    assert again.entries_received == 0
    assert log.staged(40)[-1].retrieval_hint == b"hint"


def read_pages(log: MemoryLog, made: Callable[[int], Message], pause_s: float = 0.0) -> SyncReport:
    """The report on a store without reconciliation, and with messages for three seconds.

    That is longer than all bounds of these tests, and ends a test whose bound does not work.
    """
    until_s = time.monotonic() + 3.0

    async def endless() -> AsyncIterator[StoredMessage]:
        for number in count():
            if time.monotonic() > until_s:
                return
            await asyncio.sleep(pause_s)
            frame = encode(made(number))
            yield StoredMessage(frame, bytes(32), bytes(32), "v2", 0, number, (), ())

    async def scenario() -> SyncReport:
        replica = await backfill.LogReplica.open("c", log)
        return await backfill._read_pages(
            replica, endless(), SyncReport(outcome=SyncOutcome.REFUSED), None
        )

    return run(scenario())


@pytest.mark.parametrize("channel", ["c", "other"])
def test_a_store_that_repeats_itself_or_sends_what_nobody_wants_for_ever_is_at_fault(
    monkeypatch: pytest.MonkeyPatch, channel: str
) -> None:
    monkeypatch.setattr(backfill, "PAGE_MESSAGES", 10)
    monkeypatch.setattr(backfill, "USELESS_MAX", 50)
    monkeypatch.setattr(backfill, "READ_S_MAX", 5)
    log = log_with(messages("c", range(30)))
    report = read_pages(log, lambda n: messages(channel, [n % 45])[0])
    assert (report.outcome, report.code) == ("peer_fault", "peer_misbehaved")
    assert report.entries_received == (15 if channel == "c" else 0)


@pytest.mark.parametrize(("bound", "pause_s"), [("READ_S_MAX", 0.0), ("SILENT_S_MAX", 1.0)])
def test_pages_with_ever_new_messages_or_long_silence_end_by_time_and_what_came_is_kept(
    monkeypatch: pytest.MonkeyPatch, bound: str, pause_s: float
) -> None:
    monkeypatch.setattr(backfill, "PAGE_MESSAGES", 10)
    monkeypatch.setattr(backfill, bound, 0.3)
    log = MemoryLog()
    report = read_pages(log, lambda n: messages("c", [n])[0], pause_s)
    assert (report.outcome, report.code) == ("partial", "recon_budget_spent")
    assert bool(staged(log)) == (not pause_s)
    assert len(staged(log)) == report.entries_received


@pytest.mark.parametrize("nonce", [b"", b"short", bytes(17)])
def test_an_answer_under_a_nonce_that_is_none_is_a_fault(
    node: RunningNode, channel_id: str, nonce: bytes
) -> None:
    publish(node, messages(channel_id, range(5)))

    def renames(_: ReconRequest, response: ReconResponse) -> ReconResponse:
        response.responder_nonce = nonce
        return response

    [report] = backfilled(node, channel_id, MemoryLog(), mangle=renames)
    assert (report.outcome, report.code) == (SyncOutcome.PEER_FAULT, "peer_misbehaved")


def chain(channel_id: str, total: int) -> list[Message]:
    """Messages each of which names the two before it."""
    made: list[Message] = []
    for each in messages(channel_id, range(total)):
        causes = tuple(HistoryEntry(cause.message_id) for cause in made[-2:])
        made.append(replace(each, causal_history=causes))
    return made


def taken(file: ParticipantFile, channel_id: str, batches: int | None = None) -> list[Deliver]:
    """Deliveries while a participant takes what is staged; all are confirmed."""
    participant = file.participant(channel_id, "bob")
    found: list[Deliver] = []

    def save(saves: Iterable[Save]) -> None:
        file.save(channel_id, saves)

    draining = drain(participant, save, now_ms=lambda: 1_764_000_000_000, count=64)
    for effects in islice(draining, batches):
        waiting: list[Effect] = effects
        while delivered := [each for each in waiting if isinstance(each, Deliver)]:
            found += delivered
            waiting = participant.confirm(delivered[-1].number)
            file.save(channel_id, waiting)
    return found


def test_a_participant_takes_a_backfill_in_log_order_and_a_restart_continues_it(
    node: RunningNode, channel_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = chain(channel_id, 300)
    publish(node, random.Random(SEED).sample(every, len(every)))
    monkeypatch.setattr(content_module, "MOVE_BYTES_MAX", 2_000)

    def backfill_of(file: ParticipantFile) -> SyncReport:
        [report] = backfilled(node, channel_id, file.log(channel_id))
        return report

    with ParticipantFile(tmp_path / "file.db") as file:
        assert backfill_of(file).entries_received == 300
        first = taken(file, channel_id, batches=2)
    with ParticipantFile(tmp_path / "file.db") as file:
        assert backfill_of(file).missing_here == 0  # logged and staged messages are held
        rest = taken(file, channel_id)
        assert backfill_of(file).proved
        assert len(file.log(channel_id)) == 300
    assert 0 < len(first) < 300
    delivered = first + rest
    assert [each.message for each in delivered] == every
    assert [each.number for each in delivered] == list(range(1, 301))
    assert not any(each.after_gap or each.is_late for each in delivered)


# --- progress and the participant --------------------------------------------------------------------
