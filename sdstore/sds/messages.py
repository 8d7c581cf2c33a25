"""Messages on their way through a participant: what is refused, what applications get, what copies show."""

from __future__ import annotations

from sdstore.sds.model import Message, rank
from sdstore.sds.options import ParticipantOptions

ID_LENGTH_MAX = 1_024
"""Characters of a message ID or sender ID. With longer ones, messages that refer to them would not fit
into a frame; a store refuses them as well."""

set_field = object.__setattr__
"""Changes a message that nobody else has yet; a changed copy costs ten times as much."""


def refusal(message: Message, channel_id: str, options: ParticipantOptions) -> str | None:
    """Why a received message is ignored whatever it says; `None`: it is not."""
    if message.channel_id != channel_id:
        return "other_channel"
    if len(message.causal_history) > options.history_read_max:
        return "history_too_long"
    if len(message.message_id) > ID_LENGTH_MAX or len(message.sender_id) > ID_LENGTH_MAX:
        return "id_too_long"
    for entry in message.causal_history:
        if len(entry.message_id) > ID_LENGTH_MAX or len(entry.sender_id) > ID_LENGTH_MAX:
            return "id_too_long"
    is_logged = message.content and message.lamport_timestamp is not None
    if is_logged and options.rank_min and rank(message) < options.rank_min:
        return "rank_too_low"
    return None


def keep_for_application(message: Message) -> None:
    """Remove what is for participants only, which is most of a message: the filter has 19 kB."""
    set_field(message, "bloom_filter", b"")
    set_field(message, "repair_request", ())


def copied(message: Message) -> Message:
    """A message to change."""
    # Positional: `replace` takes five times as long.
    return Message(
        message.message_id,
        message.channel_id,
        message.sender_id,
        message.lamport_timestamp,
        message.causal_history,
        message.bloom_filter,
        message.repair_request,
        message.content,
    )
