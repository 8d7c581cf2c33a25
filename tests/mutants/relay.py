"""Faults planted in relayed messages and nudges."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, returns

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
        "the queue of peers is unbounded",
        "app.live.relay:Relay._append",
        _keep_everything,
        "test_a_peer_that_never_reads_holds_nothing_and_misses_the_oldest",
    ),
]
