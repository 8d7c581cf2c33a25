"""Peers that lie, on either side: sessions end within their budgets and nothing wrong is taken.

Whatever a peer does, it costs what the limits say, ends in a `Fault` (or in what a peer may rightly
do: be busy, be finished), and nothing is taken that was not asked for.
"""

from __future__ import annotations

import contextlib
import functools
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest

from recon.elements import Bound, Range
from recon.errors import RemoteProtocolError
from recon.events import Busy, Expired, Fault, Need
from recon.fetch import pack_fetch, read_fetch
from recon.initiator import Initiator
from recon.limits import DEFAULT_LIMITS, PROTOCOL_VERSION, Limits
from recon.responder import respond
from sdstore.wire.recon_pb2 import ReconRequest
from tests.support import liars
from tests.support.liars import Liar, Strategy, World
from tests.support.recon_session import (
    CONTENT_BYTES,
    FETCH_IDS_MAX,
    Outcome,
    Session,
    header,
    view_of,
    was_wanted,
)

MIB = 1 << 20
LIMITS = replace(
    DEFAULT_LIMITS, response_bytes_max=64 << 10, requests_max=200, bytes_base=512 << 10
)
EXTRA_BYTES = 4 * MIB  # what one call may take beyond the size of its message

# Strategies that break the protocol in the first answer that they touch: always a fault.
MALFORMED: list[Strategy] = [
    liars.answers_nothing,
    liars.answers_too_many,
    liars.splits_too_finely,
    liars.duplicates,
    liars.cuts_columns,
    liars.extends_columns,
    liars.answers_another_question,
    liars.interest_always_unknown,
    liars.status_from_the_future,
    liars.nonce_malformed,
    liars.resumes_where_it_began,
    liars.resumes_crawling,
]
# Strategies that may be seen through, or end as an honest but useless session would.
DECEITFUL: list[Strategy] = [
    liars.new_elements_every_time,
    liars.peels,
    liars.repeats_itself,
    liars.denies_and_admits,
    liars.counts_too_large,
    liars.counts_zero,
    liars.counts_a_little_off,
    liars.wrong_hashes,
    liars.random_bytes,
    liars.damaged_bytes,
    liars.disordered_bounds,
    liars.offers_what_it_never_serves,
    liars.serves_what_was_not_asked,
    liars.resumes_anywhere,
    liars.nonce_always_expired,
]
SEEDS = [
    pytest.param(range(20), id="20 seeds"),
    pytest.param(range(20, 220), id="200 seeds", marks=pytest.mark.soak),
]


def world(seed: int) -> World:
    """Two sets with a common part, ties, and differences on both sides, some at one end."""
    rng = random.Random(seed)
    spread = rng.choice([3, 50, 2**40])
    common, ours, theirs = (
        {(2**63 + rng.randrange(spread), rng.randbytes(32)) for _ in range(count)}
        for count in (rng.choice([50, 400]), rng.choice([3, 60]), rng.choice([5, 300]))
    )
    newest = {(2**63 + spread + n, rng.randbytes(32)) for n in range(80)}
    return World(
        header(seed), frozenset(common | ours), frozenset(common | theirs | newest), LIMITS, rng
    )


def requests_of(place: World) -> list[ReconRequest]:
    """Every request of an honest session; some carry a fetch."""
    requests: list[ReconRequest] = []
    view = view_of(place.ours, place.header)
    session = Session(view, place.header, place.honest, limits=LIMITS)
    session.listen(requests.append)
    session.run()
    return requests


def session_with(strategy: Strategy, seed: int, limits: Limits = LIMITS) -> tuple[World, Outcome]:
    place = world(seed)
    view = view_of(place.ours, place.header)
    session = Session(view, place.header, Liar(place, strategy), limits=limits, seed=seed)
    outcome = session.run()
    assert_within_budgets(outcome, len(view), limits)
    assert outcome.have <= place.ours
    for element in outcome.accepted:
        assert was_wanted(view, outcome.needs, element)
    return place, outcome


def assert_within_budgets(outcome: Outcome, own_count: int, limits: Limits) -> None:
    assert outcome.end is None or isinstance(outcome.end, Fault | Expired | Busy)
    # The message that overdraws a budget tells so, with others still in flight.
    assert outcome.rounds <= limits.requests_max + limits.in_flight_max
    bytes_max = limits.bytes_base + limits.bytes_per_element * own_count
    bytes_max += limits.bytes_per_credit * CONTENT_BYTES * len(outcome.accepted)
    assert outcome.bytes <= bytes_max + (1 + limits.in_flight_max) * outcome.message_bytes_max
    # Every further fetch is owed to a need, to something that really came, or to a responder that
    # had to look at very much; of those a session forgives few.
    named = sum(need.count for need in outcome.needs if need.short_ids is not None)
    batches = len(outcome.needs) + named // FETCH_IDS_MAX
    assert outcome.fetches <= batches + len(outcome.accepted) + limits.fetch_barren_max + 1


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("strategy", MALFORMED, ids=lambda each: each.__name__)
def test_a_malformed_answer_ends_the_session_as_a_fault(strategy: Strategy, seeds: range) -> None:
    for seed in seeds:
        _, outcome = session_with(strategy, seed)
        assert isinstance(outcome.end, Fault), f"seed {seed}: {outcome.end}"


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("strategy", DECEITFUL, ids=lambda each: each.__name__)
def test_a_session_with_a_liar_ends_within_its_budgets(strategy: Strategy, seeds: range) -> None:
    for seed in seeds:
        session_with(strategy, seed)


@pytest.mark.parametrize("seed", range(20))
def test_the_same_session_with_an_honest_peer_finds_everything(seed: int) -> None:
    place, outcome = session_with(lambda liar, request: liar.honestly(request), seed)
    assert outcome.end is None
    assert outcome.have == place.ours - place.theirs
    assert outcome.accepted == place.theirs - place.ours
    assert not outcome.refused


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (LIMITS, "depth"),
        (replace(LIMITS, depth_max=10**6, requests_max=40), "budget_requests"),
        (replace(LIMITS, depth_max=10**6, bytes_base=4096, bytes_per_element=1), "budget_bytes"),
        (replace(LIMITS, depth_max=10**6, seconds_base=0.02), "budget_seconds"),
    ],
    ids=["depth", "requests", "bytes", "seconds"],
)
def test_splits_without_end_stop_at_each_budget(limits: Limits, code: str) -> None:
    for seed in range(3):
        _, outcome = session_with(liars.peels, seed, limits)
        assert isinstance(outcome.end, Fault)
        assert outcome.end.error.code == code


def peak_bytes(call: Callable[[], object]) -> int:
    """Most memory that was allocated at once while `call` ran, whether it failed or not."""
    tracemalloc.start()
    try:
        with contextlib.suppress(RemoteProtocolError):
            call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_huge_answer_takes_no_more_memory_than_its_bytes(rounds: int) -> None:
    place = world(2)
    view = view_of(place.ours, place.header)
    for response in liars.huge_columns(2 * MIB, random.Random(0)):
        session = Initiator(view, place.header, limits=LIMITS)
        asked = session.next_request()
        for _ in range(rounds):
            assert asked is not None
            answer = respond(place.honest.view, asked.message, LIMITS)
            session.receive(asked.request_id, answer)
            asked = session.next_request()
        assert asked is not None
        receive = functools.partial(session.receive, asked.request_id, response)
        assert peak_bytes(receive) <= response.ByteSize() + EXTRA_BYTES
        assert session.done


# Initiators that lie to us

WORLDS = [(place, requests_of(place)) for place in map(world, range(6))]
REQUESTS = [
    pytest.param(2_000, id="2,000 requests"),
    pytest.param(100_000, id="100,000 requests", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("count", REQUESTS)
def test_damaged_requests_are_refused_or_answered_within_the_limit(count: int) -> None:
    limits = replace(LIMITS, response_bytes_max=8192)
    answered = 0
    for seed in range(count):
        rng = random.Random(seed)
        place, requests = WORLDS[seed % len(WORLDS)]
        request = liars.damaged_request(rng.choice(requests), rng)
        try:
            response = respond(place.honest.view, request, limits)
        except RemoteProtocolError:
            continue
        answered += 1
        room = min(limits.response_bytes_max, request.response_bytes_max or 2**32)
        assert response.ByteSize() <= room, f"seed {seed}"
    assert 0 < answered < count


@pytest.mark.parametrize(
    "count", [pytest.param(100_000), pytest.param(1_000_000, marks=pytest.mark.soak)]
)
def test_a_flood_of_tiny_ranges_is_refused_and_takes_little_memory(count: int) -> None:
    place, _ = WORLDS[0]
    tiny = [Need(Range(Bound(at), Bound(at + 1)), None, 1) for at in range(count)]
    fetch = pack_fetch(tiny)
    request = ReconRequest(version=PROTOCOL_VERSION)
    request.ranges.parts = 2
    request.ranges.runs, request.ranges.bounds = fetch.runs, fetch.bounds
    for call in (lambda: read_fetch(fetch), lambda: respond(place.honest.view, request)):
        with pytest.raises(RemoteProtocolError):
            call()
        assert peak_bytes(call) <= fetch.ByteSize() + EXTRA_BYTES


def test_a_huge_request_takes_no_more_memory_than_its_bytes() -> None:
    place, requests = WORLDS[0]
    for response in liars.huge_columns(2 * MIB, random.Random(0)):
        request = ReconRequest()
        request.CopyFrom(requests[0])
        for name in liars.byte_columns(response.answers):
            for message in (request.ranges, request.fetch):
                if name in message.DESCRIPTOR.fields_by_name:
                    setattr(message, name, getattr(response.answers, name))
        size = request.ByteSize() + EXTRA_BYTES
        assert peak_bytes(functools.partial(respond, place.honest.view, request)) <= size
        assert peak_bytes(functools.partial(read_fetch, request.fetch)) <= size
