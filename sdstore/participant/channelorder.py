"""The order of a participant's channel: what its log holds, in the order of `sdstore.ordering`.

`load` reads the log from its start in slices; `add` takes each message after that. A message counts
once it is saved: one of our own that was lost in a crash would confirm what nobody else can see. So call
`add` for a message of ours when `ParticipantChannel.send` has returned, and for others at `Deliver`; without a
driver, when the `Save` effect of the same call was carried out.

What was confirmed stays confirmed over a restart if the program keeps `saved`, best in the transaction of the
work that it does on confirmed messages: a log does not know in which order its messages arrived, and with a
breach the order depends on that. Without it the order is made anew from the log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from sdstore.ordering import Breach, BreachKind, Change, Ordering, OrderingError, Proof, Roles
from sdstore.sds.codec import decode
from sdstore.sds.log import ParticipantLog, Reference
from sdstore.sds.model import LAMPORT_MAX, Message, is_disproved

LOADED_AT_ONCE = 500
"""Messages that one call of `load` orders: some 30 ms of the event loop."""

IDS_AT_ONCE = 4_096
"""IDs that a call of `load` reads, also some 30 ms; those of the whole log are in memory until it ends."""


class ChannelOrder:
    """See the module. `ordering` has the confirmed prefix, the tail, what waits, and the breaches."""

    def __init__(self, log: ParticipantLog, roles: Roles, saved: bytes = b"") -> None:
        """`log`: of the participant (`channel.log`). `saved`: of an earlier order of this channel.

        Raises `OrderingError` for wrong roles: `invalid_indexers`, and `other_roles` if `saved` has others.
        If the log does not show what `saved` says, `ordering.breaches` names it (`proof`), or
        `ordering.missing` has the messages that the log lacks.
        """
        self.ordering = Ordering(roles, _proof_of(saved, roles) if saved else None)
        self._log = log
        self._steps: Iterator[bool] | None = None

    def load(self) -> bool:
        """Order some more of the log; False at its end. Call it until then, before the first `add`.

        Raises `OrderingError` as `add` does.
        """
        if self._steps is None:
            self._steps = self._loading()
        return next(self._steps, False)

    def _loading(self) -> Iterator[bool]:
        """Yields True after each slice."""
        ids: list[str] = []
        for page in _pages_from_the_end(self._log):
            ids += (each.entry.message_id for each in reversed(page))
            yield True
        for count in range(len(ids), 0, -1):
            self.add(ids.pop())
            if count % LOADED_AT_ONCE == 0:
                yield True
        while self.ordering.is_behind:
            self.ordering.go_on()
            yield True

    def add(self, message_id: str, path: str = "") -> Change:
        """Order a message of the log. Adding it again changes nothing, nor does a copy that its ID disproves.

        A message whose causes are not ordered yet waits: it is in `ordering.waiting`, and joins the order
        with the last of its causes. If that releases more than 1,000, `ordering.is_behind` is true, and
        `ordering.go_on()` orders 1,000 more. Raises `OrderingError` (`too_many_waiting`) at 100,000 of them: then
        the message is not ordered; begin anew with another `ChannelOrder` when `ordering.missing` has
        arrived. Raises `KeyError` for a message that the log does not have. `path`: of `Deliver`, for breaches.
        """
        message = self.message(message_id)
        if is_disproved(message):
            return Change()
        causes = (entry.message_id for entry in message.causal_history)
        return self.ordering.add(message_id, message.sender_id, causes, path)

    @property
    def saved(self) -> bytes:
        """What is confirmed, and its proof. It changes with `Change.confirmed` and with `ordering.breaches`."""
        roles, proof = self.ordering.roles, self.ordering.proof
        document = {"roles": _document(roles), "proof": asdict(proof)}
        return json.dumps(document, separators=(",", ":")).encode()

    def message(self, message_id: str) -> Message:
        """A message of the log; `KeyError` if it has none with this ID."""
        frame = self._log.frame(message_id)
        if frame is None:
            raise KeyError(message_id)
        return decode(frame)[0]


def _document(roles: Roles) -> list[list[str]]:
    return [sorted(roles.indexers), sorted(roles.relayed)]


def _proof_of(saved: bytes, roles: Roles) -> Proof:
    document = json.loads(saved)
    if document["roles"] != _document(roles):
        indexers = ", ".join(document["roles"][0])
        raise OrderingError(
            "other_roles", f"the saved order has other roles; its indexers are {indexers}"
        )
    proof = document["proof"]
    breaches = tuple(
        Breach(**each | {"kind": BreachKind(each["kind"])}) for each in proof["breaches"]
    )
    return Proof(tuple(proof["heads"]), proof["confirmed_count"], proof["hash"], breaches)


def _pages_from_the_end(log: ParticipantLog) -> Iterator[Sequence[Reference]]:
    """A log in parts, each in log order, the last one first."""
    before, count = LAMPORT_MAX + 1, IDS_AT_ONCE
    while page := log.newest(count, before):
        before = page[0].lamport_timestamp
        if len(page) == count:
            # It may begin in the middle of messages with one timestamp: leave those to the next part.
            after = [each for each in page if each.lamport_timestamp != before]
            if not after:
                before, count = page[-1].lamport_timestamp + 1, count * 2
                continue
            page, before = after, before + 1
        count = IDS_AT_ONCE
        yield page
