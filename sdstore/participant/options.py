"""The options of a `ParticipantDriver`, and its error."""

import reprlib
from dataclasses import dataclass, field

from sdstore.client.exchange import Options, Retry
from sdstore.errors import SdstoreError
from sdstore.participant.stores import BackOff
from sdstore.sds.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class DriverOptions:
    """Pauses and bounds of a driver.

    Values outside of these ranges are a `LocalProtocolError` (`bad_option`): `tick_s` 0.001 to 60 (a
    participant counts at most a minute per tick), `missed_messages_max` 1 to 1,000 (a page of a node),
    the other counts 1 to 10,000 (`copies_max` from 0), `close_s` 0 to 3,600. Pauses of `back_off` are
    0.001 to 86,400 s, with `first_s` <= `max_s`.
    """

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

    def __post_init__(self) -> None:
        """Raises `LocalProtocolError` (`bad_option`)."""
        _check_number("tick_s", self.tick_s, 0.001, 60)
        _check_count("channels_max", self.channels_max, 1, 10_000)
        _check_count("requests_max", self.requests_max, 1, 10_000)
        _check_count("copies_max", self.copies_max, 0, 10_000)
        _check_count("backfills_max", self.backfills_max, 1, 10_000)
        _check_count("missed_messages_max", self.missed_messages_max, 1, 1_000)
        _check_number("close_s", self.close_s, 0, 3_600)
        for name, value, wanted in (
            ("back_off", self.back_off, BackOff),
            ("client", self.client, Options),
        ):
            if not isinstance(value, wanted):
                raise _bad_option(name, value, f"of the class {wanted.__name__}")
        _check_number("back_off.first_s", self.back_off.first_s, 0.001, 86_400)
        _check_number("back_off.max_s", self.back_off.max_s, self.back_off.first_s, 86_400)
        _check_number("back_off.retry_after_max_s", self.back_off.retry_after_max_s, 0, 86_400)


class DriverError(SdstoreError):
    """The driver cannot do this, or cannot go on.

    `code` is stable: `not_started`, `already_joined`, `too_many_channels`, `closed`, `rejected` if all
    stores refused an ordered message, `events_taken_over` if another iteration of `events` began,
    `unsaved` if the last changes could not be saved before the end, or `failed` if the persistence does
    not work at all or the program has a fault (the cause of this exception). After `unsaved`, a
    `ParticipantFile` that stays open writes the changes with its next save.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


def _check_number(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise _bad_option(name, value, f"a number from {low:,} to {high:,}")


def _check_count(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _bad_option(name, value, f"an integer from {low:,} to {high:,}")


def _bad_option(name: str, value: object, wanted: str) -> LocalProtocolError:
    return LocalProtocolError(
        "bad_option", f"{name} is {reprlib.repr(value)}, and must be {wanted}"
    )
