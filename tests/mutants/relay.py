"""Faults planted in relayed messages and nudges."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, instead, nothing, returns

_STORES = "tests/app/federation/test_relay.py"
_PARTS = ("tests/app/test_relay_parts.py",)


def _fault(name: str, seam: str, plant: Plant, *tests: str) -> Fault:
    named = tuple(f"{_STORES}::{each}" for each in tests) or _PARTS
    return Fault(f"relay: {name}", seam, plant, named)


def _store_what_comes(right: Any) -> Any:
    """Publish what another store relays."""

    async def wrong(relay: Any, frames: Any, origin: str, caller: Any = None) -> Any:
        from app.ingest.prepare import Publication

        return await relay._door.publish_many([Publication(each) for each in frames])

    return wrong


def _named_to_all(right: Any) -> Any:
    def wrong(relay: Any, channels: Any, source: str = "") -> None:
        right(relay, None, source)

    return wrong


def _back_to_where_it_came_from(right: Any) -> Any:
    def wrong(relay: Any, wanted: Any, instance_id: str) -> Any:
        return right(relay, wanted, "")

    return wrong


def _to_every_reader(right: Any) -> Any:
    def wrong(relay: Any, wanted: Any, instance_id: str) -> Any:
        return right(relay, lambda _: True, instance_id)

    return wrong


def _keep_everything(right: Any) -> Any:
    def wrong(relay: Any, passing: Any) -> None:
        relay._queue.append(passing)

    return wrong


def _never_wait(right: Any) -> Any:
    async def wrong(*_: Any) -> None:
        return None

    return wrong


def _for_ever(right: Any) -> Any:
    def wrong(seen: Any, frame_hash: bytes, now_s: float) -> Any:
        return right(seen, frame_hash, 0.0)

    return wrong


def _also_own(right: Any) -> Any:
    def wrong(parts: Any, payload: str) -> Any:
        parts._own = ""
        return right(parts, payload)

    return wrong


FAULTS = [
    _fault(
        "every copy is passed on",
        "app.live.relay:Seen.add",
        returns(True),
        "test_each_reader_of_a_triangle_hears_a_message_once",
    ),
    _fault(
        "content from another store is stored",
        "app.live.relay:Relay.take",
        _store_what_comes,
        "test_content_and_garbage_are_refused_with_codes_and_the_rest_is_relayed",
    ),
    _fault(
        "a nudge goes to every reader",
        "app.live.relay:Relay._nudge",
        _named_to_all,
        "test_a_token_limited_to_a_channel_hears_and_relays_that_channel_alone",
    ),
    _fault(
        "a message goes back to where it came from",
        "app.live.relay:Relay.reader",
        _back_to_where_it_came_from,
        "test_a_stream_gets_nothing_back_that_came_from_its_reader",
    ),
    _fault(
        "a stream ignores the grants of its reader",
        "app.live.relay:Relay.reader",
        _to_every_reader,
        "test_a_token_limited_to_a_channel_hears_and_relays_that_channel_alone",
    ),
    _fault(
        "a commit nudges nobody",
        "app.live.relay:Relay.on_committed",
        nothing,
        "test_news_reach_the_store_that_dials_in_within_a_second",
    ),
    _fault(
        "a link ignores nudges",
        "app.federation.links:Link._read",
        returns(None),
        "test_news_reach_the_store_that_dials_in_within_a_second",
    ),
    _fault(
        "the queue of peers is unbounded",
        "app.live.relay:Relay._append",
        _keep_everything,
        "test_a_peer_that_never_reads_holds_nothing_and_misses_the_oldest",
    ),
    _fault(
        "nothing goes up a link",
        "app.federation.links:Link._post",
        _never_wait,
        "test_a_message_goes_through_a_chain_of_four_stores_and_back",
    ),
    _fault(
        "a flood is taken at any rate",
        "app.federation.links:Link._pace",
        _never_wait,
        "test_a_peer_that_floods_is_read_at_a_bounded_rate",
    ),
    _fault(
        "other processes hear nothing",
        "app.live.relay:Outgoing.send_frame",
        nothing,
        "test_processes_of_one_database_hear_what_the_others_relay_and_commit",
    ),
    _fault(
        "only the own links count as reading",
        "app.federation.records:Processes.reads",
        returns(False),
        "test_a_store_sends_nothing_twice_where_another_process_of_its_peer_reads_its_stream",
    ),
    _fault(
        "a bomb is unpacked at once",
        "app.federation.links:PACKED_PIECE_BYTES",
        instead(1 << 30),
        "test_a_bomb_is_unpacked_in_pieces",
    ),
    _fault(
        "a message takes its way as often as it comes",
        "app.live.relay:tags_in",
        returns(set()),
        "test_no_message_circles_in_a_ring_of_stores_that_remember_next_to_nothing",
    ),
    _fault(
        "a way has no bound",
        "app.live.relay:STORES_PASSED_MAX",
        instead(10**6),
        "test_a_store_that_restarts_in_a_ring_ends_the_message_that_it_has_forgotten",
    ),
    _fault("a hash is remembered for ever", "app.live.relay:Seen.add", _for_ever),
    _fault("a process hears itself", "app.live.notifybus:Parts.join", _also_own),
    _fault("payloads are too long", "app.live.notifybus:PART_CHARS", instead(8_000)),
]
