"""Faults planted in the MVDS node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.mutants.fault import Fault, Plant, after, before, instead, nothing, returns

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
    from sdstore.mvds.state import Record, RecordType

    node._state.put(peer, [Record(RecordType.MESSAGE, message_id)])


class _InAnyGroup:
    """Groups of which a peer is always a member."""

    def __init__(self, peer: str) -> None:
        self._members = {peer}

    def get(self, group_id: bytes, default: Any = None) -> set[str]:
        return self._members


def _stay_silent(receive: Any) -> Any:
    def wrong(node: Any, peer: str, raw: bytes) -> Any:
        count = node._silent_count.get(peer, 0)
        effects = receive(node, peer, raw)
        node._silent_count[peer] = count
        return effects

    return wrong


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


def _keep_the_record(take: Any) -> Any:
    def wrong(node: Any, peer: str, ids: Any) -> Any:
        ids = list(ids)
        records = [node._state.get(peer, message_id) for message_id in ids]
        effects = take(node, peer, ids)
        node._state.put(peer, [each for each in records if each is not None])
        return effects

    return wrong


def _forget_the_epoch(node: Any, peer: str, epoch: int) -> tuple[Any, str, int]:
    node._sent_epoch.pop(peer, None)
    return node, peer, epoch


def _leave_out_known(take: Any) -> Any:
    async def wrong(endpoint: Any, messages: Any, node: Any) -> Any:
        new = [each for each in messages if each.message_id not in endpoint._known]
        return await take(endpoint, new, node)

    return wrong


FAULTS = [
    _fault("an ack is kept in state", "_acknowledge", instead(_put_message), _BOTH),
    Fault(
        "mvds: a record is sent early",
        "sdstore.mvds.state:MemoryState.due",
        before(lambda state, peer, epoch, limit: (state, peer, epoch + 1, limit)),
        _WORLDS,
    ),
    _fault("a request is dropped", "_take_requests", returns([]), _BOTH),
    _fault(
        "the wait does not grow",
        "_after_sending",
        after(
            lambda record, node, _peer, _record, epoch: replace(
                record, send_epoch=epoch + node._options.retry_epochs_first
            )
        ),
    ),
    _fault("the wait has no limit", "_after_sending", _with_options(retry_epochs_max=_ENDLESS)),
    _fault("a peer that answers is waited for like a silent one", "receive", _stay_silent),
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
        "an offer of what we hold is not acknowledged",
        "_take_offers",
        _while_changed("_acknowledge", lambda *_: nothing(None)),
    ),
    _fault(
        "a message is acknowledged before it is dealt with",
        "_take_messages",
        after(_acknowledge_at_once),
    ),
    _fault(
        "the second giver gets no ack",
        "_take_messages",
        before(
            lambda node, peer, messages: (
                node,
                peer,
                [each for each in messages if each.message_id not in node._in_process],
            )
        ),
    ),
    _fault("a request gives anything", "_take_requests", instead(_send_what_was_never_offered)),
    _fault(
        "anybody may give",
        "_take_messages",
        _while_changed("_groups", lambda _node, peer, _messages: _InAnyGroup(peer)),
    ),
    _fault("records of a peer have no bound", "send", _with_options(records_per_peer_max=_ENDLESS)),
    _fault("offers have no bound", "_take_offers", _with_options(records_per_peer_max=_ENDLESS)),
    _fault("two payloads in one epoch", "tick_peer", before(_forget_the_epoch)),
    _fault("a payload has no bound", "_payload", _with_options(payload_bytes_max=_ENDLESS)),
    _fault(
        "acks fill the payload",
        "_take_acks",
        before(lambda node, peer, count_max: (node, peer, 2 * count_max)),
    ),
    _fault("nothing is given up", "_is_spent", returns(False)),
    _fault("an ack ends nothing", "_take_acknowledged", _keep_the_record),
    Fault(
        "mvds: the store node acknowledges what it could not commit",
        "app.mvds:FAULT_OF_NODE_MIN",
        instead(600),
        _NODES,
    ),
    Fault(
        "mvds: the store node moves positions without writing the records",
        "app.store.peerrows:MvdsPeers.write",
        before(lambda peers, state, positions, _changed: (peers, state, positions, {})),
        _NODES,
    ),
    Fault(
        "mvds: the store node does not acknowledge duplicates",
        "app.mvds:MvdsEndpoint._take",
        _leave_out_known,
        _NODES,
    ),
]
