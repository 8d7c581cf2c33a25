"""What a participant finds in its log and its saved state when it starts again.

Either can be behind the other, because a program can have copied one of them back. Nothing here
delivers: messages that need not wait any more are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sdstore.errors import LocalProtocolError
from sdstore.sds.codec import decode
from sdstore.sds.incoming import Arrived, Incoming
from sdstore.sds.log import ParticipantLog
from sdstore.sds.messages import keep_for_application
from sdstore.sds.model import LAMPORT_MAX, Message, MessageError, rank
from sdstore.sds.outgoing import Outgoing
from sdstore.sds.references import HEADS_UNSAVED_COUNT, References
from sdstore.sds.shares import Member
from sdstore.sds.state import HEAD, WAITING, SavedState, Turn
from sdstore.wire import participant_pb2 as pb

RESTORED_COUNT = 256
"""Logged messages read at restore to find the heads: 5 ms. The state has the older heads. As many of the last
deliveries tell which senders are known."""


def last_number(log: ParticipantLog, after: int) -> int:
    """The last delivery number in the log, or `after` if there is none above it."""
    low, step = after, 1
    while log.deliveries(low + step - 1, 1):
        low, step = low + step, step * 2
    # `low` or a later number exists (or `low` is `after`); none above `low + step - 1` does.
    while step > 1:
        step //= 2
        if log.deliveries(low + step - 1, 1):
            low += step
    return low


def load_incoming(
    saved: SavedState,
    incoming: Incoming,
    log: ParticipantLog,
    turn: Turn,
    member: Callable[[Message], Member],
) -> list[Arrived]:
    """Restore the messages that wait; returns those that can be delivered now."""
    incoming.restore(saved)
    ready = []
    for message_id, record in saved.waiting.items():
        logged = log.frame(message_id)
        try:
            message, _ = decode(record.frame)
        except MessageError as error:
            raise LocalProtocolError(
                "state_damaged", f"the frame of {message_id!r} is damaged: {error}"
            ) from error
        waiting_rank = rank(message)
        if logged is not None and rank(decode(logged)[0]) >= waiting_rank:
            turn.delete(WAITING + message_id)
            continue
        keep_for_application(message)
        hint, supersedes = record.retrieval_hint, logged is not None
        arrived = Arrived(message, record.frame, hint, waiting_rank, member(message), supersedes)
        arrived.place = record.place
        if incoming.causes(arrived):
            ready.append(arrived)
        else:
            incoming.wait(arrived, 0, is_saved=True)
    for message_id in incoming.waiting_ids():
        incoming.arrive(message_id)  # messages before it named it as missing
    incoming.restored(saved)
    return ready


def load_references(
    references: References,
    heads: Mapping[str, pb.Head],
    log: ParticipantLog,
    outgoing: Outgoing,
    turn: Turn,
    *,
    clock: int,
    history_size: int,
    is_ordered: bool,
) -> None:
    """Restore what our messages refer to: the saved heads, and the newest messages of the log.

    `clock`: our Lamport clock. It has not followed the timestamps above it.
    """
    for message_id, head in heads.items():
        if (frame := log.frame(message_id)) is None:
            turn.delete(HEAD + message_id)  # the log lost it
        else:
            references.restore(decode(frame)[0], head.retrieval_hint)
    count = max(RESTORED_COUNT, HEADS_UNSAVED_COUNT + history_size)
    reached = log.newest(count, clock + 1)
    newest = log.newest(count, LAMPORT_MAX)
    for reference in (*reached, *(each for each in newest if each.lamport_timestamp > clock)):
        message_id = reference.entry.message_id
        if outgoing.is_rejected(message_id):
            continue
        if (frame := log.frame(message_id)) is not None:
            is_reached = reference.lamport_timestamp <= clock
            hint = reference.entry.retrieval_hint
            message = decode(frame)[0]
            named = (entry.message_id for entry in message.causal_history) if is_ordered else ()
            gap = [each for each in named if not log.contains(each)]
            references.logged(message, hint, is_reached=is_reached, gap=gap)
    if (own_id := outgoing.newest) is not None:
        frame = log.frame(own_id)
        own_lamport = decode(frame)[0].lamport_timestamp if frame is not None else None
        references.sent_before(own_id, own_lamport or clock)
