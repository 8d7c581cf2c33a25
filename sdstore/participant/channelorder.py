"""The order of a participant's channel: what its log holds, in the order of `sdstore.ordering`.

`load` reads the log from its start in slices; `add` takes each message after that. A message counts
once it is saved: one of our own that was lost in a crash would confirm what nobody else can see. So call
`add` for a message of ours when `ParticipantChannel.send` has returned, and for others at `Deliver`; without a
driver, when the `Save` effect of the same call was carried out.

What was confirmed stays confirmed over a restart if the program keeps `saved`, best in the transaction of the
work that it does on confirmed messages: a log does not know in which order its messages arrived, and with a
breach the order depends on that. Without it the order is made anew from the log. The changes of roles are in it too.

A driver keeps the order of a channel whose participant has `indexers`, and lets an indexer vote: `Voting`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sdstore.ordering import (
    Breach,
    BreachKind,
    Change,
    Ordering,
    OrderingError,
    Proof,
    Roles,
    RolesChange,
)
from sdstore.sds.codec import decode
from sdstore.sds.log import ParticipantLog, Reference
from sdstore.sds.model import LAMPORT_MAX, VOTE, Message, is_disproved

LOADED_AT_ONCE = 500
"""Messages that one call of `load` orders: some 30 ms of the event loop."""

IDS_AT_ONCE = 4_096
"""IDs that a call of `load` reads, also some 30 ms; those of the whole log are in memory until it ends."""

CHANGES_MAX = 100
"""Changes of roles that are kept; each costs a second order of some messages when the log is loaded."""

VOTE_SLOT_MS = 2_000
"""One indexer after the other has a turn to vote: time for the vote of one to reach the next."""

VOTES_MAX = 6
"""Votes of ours since anybody wrote content, or an indexer was heard for the first time: nine indexers need three."""


class ChannelOrder:
    """See the module. `ordering` has the confirmed prefix, the tail, what waits, and the breaches."""

    def __init__(self, log: ParticipantLog, roles: Roles, saved: bytes = b"") -> None:
        """`log`: of the participant (`channel.log`). `saved`: of an earlier order of this channel.

        Raises `OrderingError` for wrong roles: `invalid_indexers`, and `other_roles` if `saved` has others.
        If the log does not show what `saved` says, `ordering.breaches` names it (`proof`), or
        `ordering.missing` has the messages that the log lacks.
        """
        stages = _stages_of(saved, roles) if saved else [("", roles, None)]
        _, _, proof = stages[0]
        self.ordering = Ordering(roles, proof)
        self._past: list[tuple[str, Roles, Proof]] = []  # of the orders before the last change
        self._after = ""  # where the present roles begin
        self._coming = stages[1:]
        self._log = log
        self._steps: Iterator[bool] | None = None
        self._votes: dict[str, str] = {}  # those that are not confirmed, and their senders

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
            self._change_when_confirmed()
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
        if message.is_vote and not self.ordering.is_confirmed(message_id):
            self._votes[message_id] = message.sender_id
        change = self.ordering.add(message_id, message.sender_id, causes, path)
        for each in change.confirmed:
            self._votes.pop(each, None)
        self._change_when_confirmed()
        return change

    def change_roles(self, roles: Roles, after: str) -> list[str]:
        """Order what comes after a confirmed message by other roles, now and after a restart.

        All readers must change at the same message, before they act on what was confirmed after it. Returns what
        an indexer must name in its next messages (`Participant.change_indexers`). Costs as much as adding the messages
        after it again. Raises `OrderingError`: `not_confirmed` also if `after` is before the last change,
        `invalid_indexers`, `too_many_changes`.
        """
        ordering = self.ordering
        if self._after and ordering.is_confirmed(after):
            prefix = ordering.confirmed
            if prefix.index(after) < prefix.index(self._after):
                detail = f"the roles changed after {after!r}, at {self._after!r}"
                raise OrderingError("not_confirmed", detail)
        if len(self._past) >= CHANGES_MAX or self._coming:
            detail = f"at most {CHANGES_MAX} changes of roles, one after the other"
            raise OrderingError("too_many_changes", detail)
        self._change(after, roles, None)
        return [after, *self.ordering.unnamed]

    def _change(self, after: str, roles: Roles, proof: Proof | None) -> None:
        changed = self.ordering.with_roles(roles, after, proof)
        self._past.append((self._after, self.ordering.roles, self.ordering.proof))
        self.ordering, self._after = changed, after

    def _change_when_confirmed(self) -> None:
        """Change as the saved order did, at the same messages."""
        while self._coming and self.ordering.is_confirmed(self._coming[0][0]):
            self._change(*self._coming.pop(0))

    @property
    def saved(self) -> bytes:
        """What is confirmed, and its proof. It changes with `Change.confirmed`, `ordering.breaches` and roles."""
        stages = [
            *self._past,
            (self._after, self.ordering.roles, self.ordering.proof),
            *self._coming,
        ]
        document = [
            {"after": after, "roles": _document(roles), "proof": proof and asdict(proof)}
            for after, roles, proof in stages
        ]
        return json.dumps(document, separators=(",", ":")).encode()

    @property
    def version(self) -> tuple[str, int, int]:
        """Changes whenever `saved` does."""
        ordering = self.ordering
        return self._after, ordering.confirmed_count, len(ordering.breaches)

    @property
    def changes(self) -> list[RolesChange]:
        """The changes of roles, also those of a saved order whose message is not confirmed yet."""
        past = [RolesChange(after, roles) for after, roles, _ in [*self._past[1:], *self._coming]]
        if self._past:
            past.insert(len(self._past) - 1, RolesChange(self._after, self.ordering.roles))
        return past

    @property
    def first_roles(self) -> Roles:
        """The roles at the start of the channel."""
        return self._past[0][1] if self._past else self.ordering.roles

    @property
    def last_roles(self) -> Roles:
        """The roles after all changes, also those that a saved order has and whose message is not confirmed yet."""
        return self._coming[-1][1] if self._coming else self.ordering.roles

    def vote_pause_ms(self, sender_id: str) -> int | None:
        """The pause before this indexer votes; None if a vote of it would confirm nothing, or it voted enough.

        One vote after the other confirms, votes at once contend. So the indexers have turns, in the order of their
        names after the one that wrote the last message of the order; one that is away costs its turn.
        """
        ordering, indexers = self.ordering, self.ordering.indexers
        mine = next((each for each in indexers if each.sender_id == sender_id), None)
        tail = [] if mine is None or ordering.breaches else ordering.tail
        if mine is None or all(each in self._votes for each in tail):
            return None  # nobody waits for the confirmation of votes
        if tail[-1] == mine.last_message_id and not mine.unseen_count:
            return None  # our last message shows all that we have seen
        votes_count, heard = 0, {sender_id}
        for each in tail:
            sender = self._votes.get(each)
            votes_count += sender == sender_id
            if sender is None:
                votes_count, heard = 0, {sender_id}
            elif sender not in heard:
                votes_count = 0
                heard.add(sender)
        if votes_count >= VOTES_MAX:
            return None
        names = [each.sender_id for each in indexers]
        last = {each.last_message_id: at for at, each in enumerate(indexers)}
        at = next((last[each] for each in reversed(tail) if each in last), -1)
        turn = (names.index(sender_id) - at) % len(names) or len(names)
        return VOTE_SLOT_MS * turn << max(votes_count - 2, 0)

    def message(self, message_id: str) -> Message:
        """A message of the log; `KeyError` if it has none with this ID."""
        frame = self._log.frame(message_id)
        if frame is None:
            raise KeyError(message_id)
        return decode(frame)[0]


def _document(roles: Roles) -> list[list[str]]:
    return [sorted(roles.indexers), sorted(roles.relayed)]


def _stages_of(saved: bytes, roles: Roles | None) -> list[tuple[str, Roles, Proof | None]]:
    """The roles of a saved order: where they begin, and what they confirmed. `roles`: the first ones."""
    found: list[tuple[str, Roles, Proof | None]] = []
    for each in json.loads(saved):
        indexers, relayed = each["roles"]
        proof = each["proof"] and _proof_of(each["proof"])
        found.append((each["after"], Roles(indexers=indexers, relayed=frozenset(relayed)), proof))
    first = found[0][1]
    if roles is not None and _document(roles) != _document(first):
        indexers = ", ".join(first.indexers)
        detail = f"the saved order began with other roles; its indexers were {indexers}; see `change_roles`"
        raise OrderingError("other_roles", detail)
    return found


def _proof_of(proof: dict[str, Any]) -> Proof:
    breaches = tuple(
        Breach(**each | {"kind": BreachKind(each["kind"])}) for each in proof["breaches"]
    )
    return Proof(tuple(proof["heads"]), proof["confirmed_count"], proof["hash"], breaches)


class Voting:
    """When an indexer votes. Times are those of the caller, in milliseconds."""

    def __init__(self, sender_id: str) -> None:
        self._sender_id = sender_id
        self._since_ms: int | None = None
        self._heard_count = 0

    def is_due(self, order: ChannelOrder, now_ms: int) -> bool:
        """Whether to write a vote now. A message of any indexer begins the pause anew: one of several is enough."""
        pause_ms = order.vote_pause_ms(self._sender_id)
        heard_count = sum(each.message_count for each in order.ordering.indexers)
        if pause_ms is None:
            self._since_ms = None
            return False
        if self._since_ms is None or heard_count != self._heard_count or now_ms < self._since_ms:
            self._since_ms, self._heard_count = now_ms, heard_count
        return now_ms - self._since_ms >= pause_ms


def vote_of(sender_id: str, now_ms: int) -> bytes:
    """The content of a vote."""
    return VOTE + f"{now_ms} {sender_id}".encode()


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
