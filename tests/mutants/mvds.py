"""Faults planted in the MVDS node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.mutants.fault import Fault, Plant, after, before, instead

_FLOWS = ("tests/mvds/test_flows.py",)
_WORLDS = ("tests/mvds/test_simulation.py",)
_BOTH = (*_FLOWS, *_WORLDS)
_NODES = ("tests/app/http/test_mvds.py",)
_ENDLESS = 1 << 40


def _fault(name: str, method: str, plant: Plant, tests: tuple[str, ...] = _FLOWS) -> Fault:
    return Fault(f"mvds: {name}", f"sdstore.mvds.node:Node.{method}", plant, tests)


@contextmanager
def _changed(node: Any, attribute: str, value: Any) -> Iterator[None]:
    right = getattr(node, attribute)
    setattr(node, attribute, value)
    try:
        yield
    finally:
        setattr(node, attribute, right)


def _while_changed(attribute: str, make: Callable[..., Any]) -> Plant:
    """Run a method of the node while one of its attributes is `make(node, *args)`."""

    def plant(right: Any) -> Any:
        def wrong(node: Any, *args: Any, **kwargs: Any) -> Any:
            with _changed(node, attribute, make(node, *args)):
                return right(node, *args, **kwargs)

        return wrong

    return plant


def _with_options(**changes: Any) -> Plant:
    return _while_changed("_options", lambda node, *_: replace(node._options, **changes))


def _put_message(node: Any, peer: str, message_id: bytes) -> None:
    from sdstore.mvds.node import Record, RecordType

    node._state.put(peer, [Record(RecordType.MESSAGE, message_id)])


def _acknowledge_at_once(effects: Any, node: Any, peer: str, _messages: Any) -> Any:
    for effect in effects:
        if hasattr(effect, "message"):
            node._acknowledge(peer, effect.message.message_id)
    return effects


def _send_what_was_never_offered(node: Any, peer: str, ids: Any) -> list[Any]:
    for message_id in ids:
        record = node._state.get(peer, message_id)
        if record is None or record.type.name == "OFFER":
            _put_message(node, peer, message_id)
    return []


FAULTS = [
    _fault(
        "a repeated message is not acknowledged",
        "_take_messages",
        before(
            lambda node, peer, messages: (
                node,
                peer,
                [each for each in messages if not node._messages.is_known(each.message_id)],
            )
        ),
        _BOTH,
    ),
    _fault(
        "a message is acknowledged before it is dealt with",
        "_take_messages",
        after(_acknowledge_at_once),
    ),
    _fault("a request gives anything", "_take_requests", instead(_send_what_was_never_offered)),
    _fault("records of a peer have no bound", "send", _with_options(records_per_peer_max=_ENDLESS)),
    Fault(
        "mvds: the store node acknowledges what it could not commit",
        "app.mvds:FAULT_OF_NODE_MIN",
        instead(600),
        _NODES,
    ),
]
