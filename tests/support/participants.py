"""Participants with their logs and states, and what they said: for tests of the SDS participant."""

from __future__ import annotations

from copy import deepcopy
from typing import TypeVar

from sdstore.sds import (
    Broadcast,
    Deliver,
    Effect,
    Kind,
    MemoryLog,
    Participant,
    ParticipantOptions,
    Publish,
    Save,
    Status,
    decode,
)

CHANNEL = "room"
NOON_MS = 1_763_000_000_000
E = TypeVar("E")


def of(kind: type[E], effects: list[Effect]) -> list[E]:
    """The effects of one kind."""
    return [each for each in effects if isinstance(each, kind)]


class Device:
    """A participant with its disk. Its effects are carried out; `crash` restores it from its disk.

    `has_store`: a store takes at once what is to be published first.
    """

    has_store = True

    def __init__(self, name: str, options: ParticipantOptions | None = None) -> None:
        self.name = name
        self.options = options or ParticipantOptions(bloom=None, sync_ms=0)
        self.log = MemoryLog()
        self.state: dict[str, bytes] = {}
        self.delivered: list[Deliver] = []
        self.effects: list[Effect] = []
        self.status = Status()  # as the effects said
        self.now_ms = NOON_MS
        self.participant = Participant(CHANNEL, name, options=self.options, log=self.log)

    def say(self, text: str) -> bytes:
        """Send content; the frame."""
        effects = self.carry_out(self.participant.send(text.encode(), self.now_ms))
        (broadcast,) = (each for each in of(Broadcast, effects) if each.kind is Kind.CONTENT)
        return broadcast.frame

    def hear(self, *frames: bytes) -> list[Effect]:
        """Receive frames; the effects of all."""
        effects = []
        for frame in frames:
            effects += self.carry_out(self.participant.receive(frame, self.now_ms))
        return effects

    def wait(self, seconds: float, step_s: float = 1.0) -> list[Effect]:
        """Let time pass, a tick each `step_s`; the effects of all."""
        effects = []
        for _ in range(round(seconds / step_s)):
            self.now_ms += round(step_s * 1_000)
            effects += self.carry_out(self.participant.tick(self.now_ms))
        return effects

    def carry_out(self, effects: list[Effect]) -> list[Effect]:
        """Write the saves, confirm the deliveries."""
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Save):
                self.write(effect)
            elif isinstance(effect, Publish) and self.has_store:
                effects = effects + self.carry_out(self.participant.stored(effect.message_id))
            elif isinstance(effect, Deliver):
                self.delivered.append(effect)
            elif isinstance(effect, Status):
                self.status = effect
        if deliveries := of(Deliver, effects):
            effects = effects + self.carry_out(self.participant.confirm(deliveries[-1].number))
        return effects

    def write(self, save: Save) -> None:
        """Apply the changes of a save."""
        for key, value in save.changes:
            if value is None:
                self.state.pop(key, None)
            else:
                self.state[key] = value

    def crash(self) -> None:
        """Start again from what is on the disk."""
        self.log = deepcopy(self.log)
        self.status = Status()
        self.participant = Participant.restore(
            CHANNEL, self.name, dict(self.state), self.log, options=self.options
        )

    @property
    def texts(self) -> list[str]:
        """The delivered contents, in the order of delivery."""
        return [each.message.content.decode() for each in self.delivered]

    @property
    def order(self) -> list[str]:
        """The contents of the log, in log order."""
        references = self.log.newest(len(self.log), 2**63)
        frames = (self.log.frame(each.entry.message_id) or b"" for each in references)
        return [decode(frame)[0].content.decode() for frame in frames]
