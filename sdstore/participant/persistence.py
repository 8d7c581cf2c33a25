"""Where a driver's participants live between its runs."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from sdstore.sds.effects import Effect, Save
from sdstore.sds.log import BackfillLog, MemoryLog, ParticipantLog
from sdstore.sds.options import ParticipantOptions
from sdstore.sds.participant import Participant

DRIVER_KEYS = "driver/"
"""The start of the driver's keys in a channel's saved state; the participant knows nothing of them."""

CURSOR_KEY = DRIVER_KEYS + "cursor/"
"""Followed by a store's URL. The value is a cursor of that store."""

SENT_KEY = DRIVER_KEYS + "sent/"
"""Followed by a key of `send`. The value is a number, which grows, and the ID of the message."""

ORDER_KEY = DRIVER_KEYS + "order"
"""The value is `ChannelOrder.saved`."""

UNSAVED_CODES = frozenset({"busy", "disk_full", "read_only"})
"""Codes of a save that can succeed later."""


def unsaved_code(error: Exception) -> str | None:
    """The code of an error after which a later save can succeed; None for any other error."""
    code = getattr(error, "code", None)
    return code if code in UNSAVED_CODES else None


class ChannelLog(ParticipantLog, BackfillLog, Protocol):
    """A log that a participant uses and that can be backfilled."""


class Persistence(Protocol):
    """Where the participants of a program live: `ParticipantFile`, or `MemoryPersistence`."""

    def participant(
        self, channel_id: str, sender_id: str, options: ParticipantOptions | None = None
    ) -> Participant:
        """The participant of a channel from where its last save left it, or a new one."""

    def log(self, channel_id: str) -> ChannelLog:
        """The log of a channel's participant."""

    def state(self, channel_id: str) -> Mapping[str, bytes]:
        """What the saved effects of a channel have written."""

    def save_all(self, effects: Mapping[str, Iterable[Effect]]) -> None:
        """Write the `Save` effects and the pending rows of the logs of these channels in one transaction.

        Raises an error with a `code` of `UNSAVED_CODES` if nothing was written and a later save, which
        gets the same effects again, can succeed.
        """


class MemoryPersistence:
    """Participants that end with the process."""

    def __init__(self) -> None:
        self._logs: dict[str, MemoryLog] = {}
        self._states: dict[str, dict[str, bytes | None]] = {}

    def participant(
        self, channel_id: str, sender_id: str, options: ParticipantOptions | None = None
    ) -> Participant:
        """See `Persistence`."""
        state = self.state(channel_id)
        own = {key: value for key, value in state.items() if not key.startswith(DRIVER_KEYS)}
        return Participant.restore(
            channel_id, sender_id, own, self.log(channel_id), options=options
        )

    def log(self, channel_id: str) -> MemoryLog:
        """See `Persistence`."""
        return self._logs.setdefault(channel_id, MemoryLog())

    def state(self, channel_id: str) -> dict[str, bytes]:
        """See `Persistence`."""
        saved = self._states.get(channel_id, {})
        return {key: value for key, value in saved.items() if value is not None}

    def save_all(self, effects: Mapping[str, Iterable[Effect]]) -> None:
        """See `Persistence`."""
        for channel_id, some in effects.items():
            state = self._states.setdefault(channel_id, {})
            for effect in some:
                if isinstance(effect, Save):
                    state.update(effect.changes)
            for key in [key for key, value in state.items() if value is None]:
                del state[key]
