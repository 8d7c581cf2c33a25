"""The parts of a driver: the choice of a store, the outbox, the queue of events, retrieval."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sdstore.client import (
    AsyncStoreClient,
    PublishOutcome,
    Retry,
    StoreClient,
    StoreError,
)
from sdstore.errors import LocalProtocolError
from sdstore.participant import DriverError, DriverOptions, ParticipantDriver
from sdstore.participant.events import EventQueue, EventsDropped
from sdstore.participant.stores import (
    NODE,
    OUTBOX_FRAMES_MAX,
    PUBLISHING,
    BackOff,
    Outbox,
    Retrieval,
    Store,
    Stores,
    Waiting,
    channel_scope,
    concerns_the_request,
)
from sdstore.sds.codec import encode
from sdstore.sds.effects import Acknowledged, Broadcast, Deliver, Status
from sdstore.sds.log import LogEntry, MemoryLog
from sdstore.sds.model import HistoryEntry, Kind, Message
from sdstore.wire import store_pb2 as wire
from tests.support.chatting import QUICK_CLIENT, InOrder
from tests.support.store_clients import played_by

Answer = Callable[[httpx.Request], httpx.Response]
CLIENT = AsyncStoreClient("http://store", transport=played_by(lambda _: httpx.Response(500)))
DOWN = StoreError("unreachable", 0, "no connection")
FORBIDDEN = StoreError("forbidden", 403, "not this channel")


def stores(count: int, draw: random.Random | None = None, **back_off: float) -> tuple[Stores, Any]:
    made = [Store(f"http://{n}", CLIENT) for n in range(count)]
    return Stores(made, BackOff(**back_off), draw), made


def test_the_home_is_drawn_at_random_and_kept() -> None:
    homes: Counter[str] = Counter()
    for seed in range(300):
        found, _ = stores(3, random.Random(seed))
        homes[found.ready(NODE)[0].name] += 1
        assert len({found.ready(NODE)[0].name for _ in range(10)}) == 1
    assert set(homes) == {"http://0", "http://1", "http://2"}
    assert min(homes.values()) > 60


def test_a_failed_store_is_left_alone_for_a_growing_time() -> None:
    found, [first, second] = stores(2, InOrder(), first_s=100.0, max_s=350.0)
    assert found.ready(NODE) == [first, second]
    found.failed(first, PUBLISHING, DOWN)
    assert found.ready(channel_scope("garden")) == [second], "a dead node is dead for everything"
    pauses = []
    for _ in range(4):
        pauses.append(round(first.retry_at_s[NODE] - time.monotonic()))
        found.failed(first, NODE, DOWN)
    assert pauses == [100, 200, 350, 350]
    found.succeeded(first, PUBLISHING)
    assert found.ready(NODE) == [second, first], "the home has moved"


def test_a_refusal_concerns_only_what_was_refused() -> None:
    found, [only] = stores(1, first_s=100.0)
    found.failed(only, channel_scope("garden"), FORBIDDEN)
    assert found.ready(channel_scope("garden")) == []
    assert found.ready(channel_scope("meadow")) == [only]
    assert found.ready(PUBLISHING) == [only]


@pytest.mark.parametrize(
    ("status", "concerns"), [(0, False), (401, False), (403, True), (422, True), (429, False)]
)
def test_which_errors_concern_the_request(status: int, concerns: bool) -> None:
    assert concerns_the_request(StoreError("code", status, "")) is concerns


# ---- the outbox


def broadcast(name: str, kind: Kind = Kind.CONTENT) -> Broadcast:
    content = b"" if kind is Kind.SYNC else b"x"
    lamport = None if kind is Kind.EPHEMERAL else 1
    frame = encode(Message(name, "garden", "ada", lamport, content=content))
    return Broadcast(frame, name, kind)


class Played:
    """Stores that are functions, and an outbox that publishes to them."""

    def __init__(self, *answers: Answer) -> None:
        made = [
            Store(
                f"http://{n}",
                AsyncStoreClient(f"http://{n}", options=QUICK_CLIENT, transport=played_by(answer)),
            )
            for n, answer in enumerate(answers)
        ]
        self.stores = Stores(made, BackOff(first_s=0.02, max_s=0.02), InOrder())
        self.outcomes: list[tuple[str, str]] = []
        self.outbox = Outbox(self.stores, self._note, lambda _: None)

    def _note(self, waiting: Waiting, outcome: PublishOutcome) -> None:
        self.outcomes.append((waiting.broadcast.message_id, outcome.outcome))

    async def publish(self, *broadcasts: Broadcast) -> None:
        for each in broadcasts:
            self.outbox.add("garden", each)
        running = asyncio.create_task(self.outbox.run())
        async with asyncio.timeout(60):
            await self.outbox.emptied()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await self.stores.close()


def _items(request: httpx.Request) -> Any:
    return wire.PublishBatch.FromString(request.content).items


def accepting(
    seen: list[list[str]], *refused: str, status: int = 422, code: str = "malformed_frame"
) -> Answer:
    def answer(request: httpx.Request) -> httpx.Response:
        named = []
        outcomes = wire.PublishOutcomes()
        for item in _items(request):
            name = next(n for n in "abcdefgh" if broadcast(n).frame == item.frame)
            named.append(name)
            outcome = outcomes.outcomes.add(message_id=name, channel_id="garden")
            outcome.outcome = "refused" if name in refused else "stored"
            if name in refused:
                outcome.problem.code, outcome.problem.status = code, status
            else:
                outcome.digest = bytes(32)
        seen.append(named)
        return httpx.Response(200, content=outcomes.SerializeToString())

    return answer


def test_what_one_store_refuses_another_may_accept() -> None:
    async def scenario() -> None:
        first: list[list[str]] = []
        second: list[list[str]] = []
        played = Played(accepting(first, "b", "c"), accepting(second, "c"))
        await played.publish(*map(broadcast, "abcd"))
        assert (first, second) == ([["a", "b", "c", "d"]], [["b", "c"]])
        assert played.outcomes == [
            ("a", "stored"), ("d", "stored"), ("b", "stored"), ("c", "refused"),
        ]  # fmt: skip

    asyncio.run(scenario())


def test_a_message_is_refused_only_when_the_store_that_did_not_answer_refuses_it_too() -> None:
    async def scenario() -> None:
        first: list[list[str]] = []
        second: list[list[str]] = []
        is_down = True
        tried = asyncio.Event()

        def answer(request: httpx.Request) -> httpx.Response:
            if is_down:
                tried.set()
                raise httpx.ConnectError("down")
            return accepting(second, "c")(request)

        played = Played(accepting(first, "b", "c"), answer)
        played.stores.failed(played.stores.all[1], PUBLISHING, StoreError("down", 0, ""))
        running = asyncio.create_task(played.outbox.run())
        for name in "abcd":
            played.outbox.add("garden", broadcast(name))
        async with asyncio.timeout(10):
            await tried.wait()
            assert played.outcomes == [("a", "stored"), ("d", "stored")]
            is_down = False
            await played.outbox.emptied()
        assert played.outcomes[2:] == [("b", "stored"), ("c", "refused")]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await played.stores.close()

    asyncio.run(scenario())


def test_what_a_store_cannot_store_now_is_published_later_in_order() -> None:
    async def scenario() -> None:
        seen: list[list[str]] = []
        full = accepting(seen, "a", "b", status=507, code="disk_full")
        fine = accepting(seen)

        def answer(request: httpx.Request) -> httpx.Response:
            return fine(request) if seen else full(request)

        played = Played(answer)
        await played.publish(*map(broadcast, "abc"))
        assert seen == [["a", "b", "c"], ["a", "b"]]
        assert played.outcomes == [("c", "stored"), ("a", "stored"), ("b", "stored")]

    asyncio.run(scenario())


def test_a_batch_that_is_not_acceptable_is_halved() -> None:
    async def scenario() -> None:
        seen: list[list[str]] = []
        fine = accepting(seen)

        def answer(request: httpx.Request) -> httpx.Response:
            if broadcast("c").frame in request.content:
                return httpx.Response(413, json={"code": "frame_too_large", "title": "no"})
            return fine(request)

        played = Played(answer)
        await played.publish(*map(broadcast, "abcd"))
        assert sorted(played.outcomes) == [
            ("a", "stored"), ("b", "stored"), ("c", "refused"), ("d", "stored"),
        ]  # fmt: skip

    asyncio.run(scenario())


def test_a_full_outbox_takes_no_more_and_loses_nothing_else() -> None:
    async def scenario() -> None:
        played = Played(accepting([]))
        frame = b"x" * 100
        for number in range(OUTBOX_FRAMES_MAX + 5):
            played.outbox.add("garden", Broadcast(frame, f"m{number}", Kind.CONTENT))
        assert len(played.outbox) == OUTBOX_FRAMES_MAX
        large = Played(accepting([]))
        for number in range(70):
            large.outbox.add("garden", Broadcast(bytes(1 << 20), f"m{number}", Kind.CONTENT))
        assert len(large.outbox) == 64

    asyncio.run(scenario())


# ---- events


def test_events_are_dropped_from_the_oldest_and_deliveries_never() -> None:
    async def scenario() -> None:
        queue = EventQueue(events_max=10)
        delivery = Deliver(1, Message("m", "garden", "ada", 1, content=b"x"))
        queue.put(delivery)
        for number in range(1_000):
            queue.put(Acknowledged(f"m{number}"))
            queue.put(Status(missing=number))
        read: list[Any] = []
        while read[-1:] != [Status(missing=999)]:
            read.append(await queue.get())
        dropped = [each for each in read if isinstance(each, EventsDropped)]
        assert delivery in read
        assert len(read) <= 11
        assert sum(each.count for each in dropped) + len(read) - len(dropped) == 2_001

    asyncio.run(scenario())


def test_a_closed_queue_ends_without_deliveries_that_nobody_can_confirm() -> None:
    async def scenario() -> None:
        queue = EventQueue()
        queue.put(Acknowledged("m0"))
        queue.put(Deliver(1, Message("m", "garden", "ada", 1, content=b"x")))
        queue.close()
        assert await queue.get() == Acknowledged("m0")
        assert await queue.get() is None
        failed = EventQueue()
        failed.close(OSError("the disk is gone"))
        with pytest.raises(OSError, match="the disk is gone"):
            await failed.get()

    asyncio.run(scenario())


# ---- retrieval


def stored(message: Message, hints: tuple[bytes, ...] = ()) -> wire.StoredMessage:
    return wire.StoredMessage(frame=encode(message), digest=bytes(32), retrieval_hints=hints)


def test_a_hint_leads_to_the_wanted_message_only_and_its_causes_follow() -> None:
    causes = (HistoryEntry("known"), HistoryEntry("cause"))
    wanted = Message("wanted", "garden", "ada", 3, causes, content=b"x")
    cause = Message("cause", "garden", "ada", 2, content=b"x")
    known = Message("known", "garden", "ada", 1, content=b"x")
    other = Message("other", "garden", "eve", 3, content=b"x")
    foreign = Message("wanted", "meadow", "eve", 3, content=b"x")
    asked: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("lookup"):
            asked.append(wire.LookupRequest.FromString(request.content))
            reply: Any = wire.LookupReply()
            for message in (other, foreign, wanted):
                match = reply.found.add(digest=bytes(32), message=stored(message, (b"hint",)))
                match.key.retrieval_hint = b"hint"
        else:
            asked.append(wire.AncestorsRequest.FromString(request.content))
            reply = wire.AncestorsPage(messages=[stored(cause)])
        return httpx.Response(200, content=reply.SerializeToString())

    async def scenario() -> None:
        log = MemoryLog()
        log.append(LogEntry(known, encode(known), 1))
        async with AsyncStoreClient("http://store", transport=played_by(answer)) as client:
            retrieval = Retrieval(client, "garden", log)
            await retrieval.run([HistoryEntry("wanted", b"hint"), HistoryEntry("x" * 2_000)])
        assert [each.message for each in retrieval.in_log_order()] == [cause, wanted]
        assert retrieval.found["wanted"].retrieval_hint == b"hint"
        assert retrieval.is_complete
        lookup, walk = asked
        assert (list(lookup.message_ids), list(lookup.retrieval_hints)) == (["wanted"], [b"hint"])
        assert (list(walk.heads), list(walk.known)) == (["wanted"], ["known"])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "",
        "ftp://host",
        "http://",
        "http://h:99999",
        "http://[::1",
        "http://h?x",
        "http://a\x01b",
    ],
)
def test_a_url_that_no_store_can_have_is_refused_at_once(url: str) -> None:
    for make in (StoreClient, AsyncStoreClient, lambda url: ParticipantDriver([url])):
        with pytest.raises(ValueError, match=r"is not a URL of the form http"):
            make(url)


NAN = float("nan")


@pytest.mark.parametrize(
    "wrong",
    [{"close_s": value} for value in (-1, NAN, 1e9, "1", None, True)]
    + [
        {f"{name}_max": value}
        for name in ("channels", "copies")
        for value in (-1, 10_001, 1.5, "1", None, True)
    ]
    + [{"channels_max": 0}, {"back_off": None}, {"client": Retry()}]
    + [
        {"back_off": BackOff(**pauses)}
        for pauses in ({"first_s": 0}, {"max_s": 0.1}, {"max_s": NAN}, {"retry_after_max_s": -1})
    ],
    ids=str,
)
def test_options_without_a_meaning_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError) as refused:
        DriverOptions(**wrong)
    assert refused.value.code == "bad_option"
    assert refused.value.detail.startswith(next(iter(wrong)))


NOWHERE = ["http://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("stores", lambda: ParticipantDriver(5)),  # type: ignore[arg-type]
        ("a store's URL", lambda: ParticipantDriver([None])),  # type: ignore[list-item]
        ("options", lambda: ParticipantDriver(NOWHERE, options=5)),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_of_a_driver_are_refused_by_name(
    name: str, call: Callable[[], object]
) -> None:
    with pytest.raises(LocalProtocolError, match=f"^bad_argument: {name} is "):
        call()


def test_wrong_arguments_of_calls_are_refused_by_name_and_harm_nothing() -> None:
    async def scenario() -> None:
        async with (
            ParticipantDriver(NOWHERE, options=DriverOptions(close_s=0)) as driver,
            AsyncStoreClient(*NOWHERE) as client,
        ):
            channel: Any = await driver.join("garden", "ada")
            join: Any = driver.join
            backfill: Any = client.backfill
            log = MemoryLog()
            for name, calls in {
                "channel_id": [(join, 5, "ada"), (join, None, "ada"), (backfill, None, log)],
                "sender_id": [(join, "meadow", None), (join, "meadow", b"ada")],
                "options": [(join, "meadow", "ada", 5)],
                "number": [(channel.confirm, each) for each in (-1, 0, True, "1", None, 1.0)],
                "content": [(channel.send, each) for each in ("text", None, 5)],
                "log": [(backfill, "garden", None)],
            }.items():
                for call, *arguments in calls:
                    with pytest.raises(LocalProtocolError, match=f"^bad_argument: {name} is "):
                        await call(*arguments)
            with pytest.raises(LocalProtocolError, match="bad_argument: retrieval_hint is 'ab'"):
                await channel.send(b"x", retrieval_hint="ab")
            assert await channel.send(b"x")
            await driver.join("meadow", "ada")

    asyncio.run(scenario())


def test_a_driver_outside_of_its_block_says_so_instead_of_waiting_for_ever() -> None:
    async def scenario() -> None:
        with pytest.raises(DriverError, match="async with") as refused:
            await ParticipantDriver(["http://127.0.0.1:1"]).join("garden", "ada")
        assert refused.value.code == "not_started"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://ada:se@cret@store:80/node", "http://store:80/node"),
        ("https://store/a@b", "https://store/a@b"),
        ("http://ada:secret@[::1", "http://[::1"),
    ],
)
def test_a_store_is_named_without_the_password_of_its_url(url: str, name: str) -> None:
    assert Store(url, CLIENT).name == name
