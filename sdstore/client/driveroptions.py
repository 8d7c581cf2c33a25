"""The options of a `ParticipantDriver`, and its error."""

from dataclasses import dataclass, field

from sdstore.client.exchange import Options
from sdstore.client.retry import Retry
from sdstore.client.stores import BackOff


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """Pauses and bounds of a driver."""

    tick_s: float = 1.0
    """Between two ticks of each participant; sweeps and resends need no finer clock."""
    channels_max: int = 64
    """Each channel has a connection for its live stream; `join` refuses more."""
    requests_max: int = 8
    """Lookups and walks at the same time, of all channels. Publications do not wait for them."""
    copies_max: int = 2
    """Other stores that get a copy of each frame, for participants that follow those."""
    backfills_max: int = 2
    """Channels that are backfilled at the same time."""
    missed_messages_max: int = 1_000
    """Messages read after a kept cursor, about a page. After a longer absence reconciling is cheaper."""
    close_s: float = 2.0
    """How long the end of the `async with` waits for frames that are on their way to a store."""
    back_off: BackOff = field(default_factory=BackOff)
    """Pauses before a failed store is tried again."""
    client: Options = field(
        default_factory=lambda: Options(retry=Retry(attempts_max=2, retry_after_max_s=1.0))
    )
    """Timeouts and bounds of the clients. They try little: another store may answer at once."""


class DriverError(Exception):
    """The driver cannot do this, or cannot go on.

    `code` is stable: `not_started`, `already_joined`, `too_many_channels`, `closed`, `unsaved` if the
    last changes could not be saved before the end, or `failed` if the persistence does not work at all
    or the program has a fault (the cause of this exception). After `unsaved`, a `ParticipantFile` that
    stays open writes the changes with its next save.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
