"""The effects of a participant: instructions and news, in the order in which to carry them out.

Carry out `Save` before the effects that follow it. If the program stops between the two, the restored
participant delivers and broadcasts again; nothing that was broadcast or delivered is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdstore.sds.model import HistoryEntry, Kind, Message, Rank


@dataclass(frozen=True, slots=True)
class Save:
    """Write these changes of the state, and what was appended to the log since the last `Save`.

    Both belong in one transaction. A value of `None` deletes its key. Several `Save` effects can be
    written together, the later one last.
    """

    changes: tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send this frame to all participants of the channel and to the stores."""

    frame: bytes
    message_id: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Deliver:
    """A content message for the application, which then calls `Participant.confirm(number)`.

    Numbers start at 1 and grow by 1 in a channel. `after_gap`: the IDs of causes of this message that
    are lost. `is_late`: the message was lost, and messages that depend on it were delivered before (if it
    supersedes another one, since that one).
    `rank`: what its ID proves. `supersedes`: a message of a lower rank was delivered under this ID
    before; this one takes its place, in the log too. `message` comes without the bloom filter and the
    repair request of its frame.
    `path`: of `Participant.receive`; with a driver, the URL of the store. Empty if it is unknown, as after a
    restart or for what a backfill brought.
    """

    number: int
    message: Message
    after_gap: tuple[str, ...] = ()
    is_late: bool = False
    rank: Rank = Rank.UNKNOWN
    supersedes: bool = False
    path: str = ""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Another participant has our message."""

    message_id: str


@dataclass(frozen=True, slots=True)
class PossiblyAcknowledged:
    """Another participant's bloom filter contains our message, which is not yet sufficient proof."""

    message_id: str


@dataclass(frozen=True, slots=True)
class StoredRemotely:
    """A store has our message."""

    message_id: str


@dataclass(frozen=True, slots=True)
class Publish:
    """In ordered mode: give this frame to the stores alone, then call `Participant.stored` or `rejected`.

    Repeated until one of them is called.
    """

    frame: bytes
    message_id: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """All stores refuse our message, the last one with this code. It is not broadcast again, and our next
    messages do not name it.

    Others can have it all the same, by another way: then `Acknowledged` follows.
    """

    message_id: str
    code: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Our message is no longer rebroadcast: nobody acknowledged it within the allowed attempts."""

    message_id: str


@dataclass(frozen=True, slots=True)
class Missing:
    """Fetch these messages: others depend on them. Repeated with growing pauses until they arrive."""

    entries: tuple[HistoryEntry, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The participant stopped waiting for this message. If it arrives later it is delivered late.

    `reason`: empty after `lost_after_ms`; else what a store says of it, "refused", "withheld" or
    "retired".
    """

    message_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ephemeral:
    """A message that no log keeps."""

    message: Message


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a channel for people, whenever it changes.

    `missing`: messages known by reference only; `waiting`: messages received whose causes are
    missing; `lost`: messages given up; `unacknowledged`: our messages that nobody acknowledged yet.

    A driver adds `unstored`: our messages that no store has, also given up ones; `refused`: our messages that all
    stores refused and nobody acknowledged; `undelivered`: messages in the log that wait until the application confirms others;
    `obstacle`: "no store answers", "catching up", "nothing can be saved" or "no store takes messages", with a reason.
    """

    missing: int = 0
    waiting: int = 0
    lost: int = 0
    unacknowledged: int = 0
    unstored: int = 0
    refused: int = 0
    undelivered: int = 0
    obstacle: str = ""

    @property
    def is_synced(self) -> bool:
        """Whether all that is known was delivered without a gap, ours is stored, and no obstacle is known."""
        return not (
            self.missing or self.waiting or self.lost or self.unstored or self.refused
            or self.undelivered or self.obstacle
        )  # fmt: skip

    def __str__(self) -> str:
        parts = [
            f"{count:,} {what}"
            for count, what in (
                (self.missing, "missing"),
                (self.waiting, "waiting for their causes"),
                (self.lost, "lost"),
                (self.unstored, "not yet stored"),
                (self.refused, "refused by the stores"),
                (self.undelivered, "not yet delivered"),
            )
            if count
        ]
        if self.obstacle:
            parts.insert(0, self.obstacle)
        return ", ".join(parts) or "all synced"


Effect = (
    Save
    | Broadcast
    | Deliver
    | Acknowledged
    | PossiblyAcknowledged
    | StoredRemotely
    | Publish
    | Rejected
    | GaveUp
    | Missing
    | Lost
    | Ephemeral
    | Status
)
