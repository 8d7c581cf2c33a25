"""Scans: bounds on the entries to read, shared by all partitions of one read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Self

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
DAY_MS = 86_400_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Interval:
    """The integers from `first` to `last`, both inside; empty when `first` > `last`."""

    first: int = INT64_MIN
    last: int = INT64_MAX

    def at_least(self, first: int) -> Interval:
        """The part from `first` on."""
        return Interval(max(self.first, first), self.last)

    def at_most(self, last: int) -> Interval:
        """The part up to `last`."""
        return Interval(self.first, min(self.last, last))

    @property
    def is_empty(self) -> bool:
        """Whether no integer is inside."""
        return self.first > self.last


@dataclass(frozen=True, slots=True)
class Scan:
    """The entries whose sequence number, Lamport timestamp, arrival and channel are inside.

    `channel_ids` None means every channel; `received_ms` counts from the epoch.
    """

    seq: Interval = Interval()
    lamport: Interval = Interval()
    received_ms: Interval = Interval()
    channel_ids: frozenset[str] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the bounds alone exclude every entry."""
        intervals = (self.seq, self.lamport, self.received_ms)
        return self.channel_ids == frozenset() or any(each.is_empty for each in intervals)

    def of_channels(self, channel_ids: Sequence[str] | frozenset[str]) -> Self:
        """The part of it in `channel_ids`."""
        wanted = frozenset(channel_ids)
        known = self.channel_ids
        return replace(self, channel_ids=wanted if known is None else wanted & known)

    def of_seq(self, first: int, last: int) -> Self:
        """The part of it with sequence numbers from `first` to `last`."""
        return replace(self, seq=self.seq.at_least(first).at_most(last))

    def of_day(self, day: str) -> Self:
        """The part of it that arrived on the UTC day `day` (ISO 8601)."""
        start = day_start_ms(day)
        window = self.received_ms.at_least(start).at_most(start + DAY_MS - 1)
        return replace(self, received_ms=window)


def day_of(received_at_ms: int) -> str:
    """The UTC day of an arrival, ISO 8601."""
    return (_EPOCH + timedelta(milliseconds=received_at_ms)).date().isoformat()


def day_start_ms(day: str) -> int:
    """Milliseconds from the epoch to the start of the UTC day `day`."""
    return (datetime.fromisoformat(day).replace(tzinfo=UTC) - _EPOCH) // _MILLISECOND


def floor_ms(moment: datetime) -> int:
    """Whole milliseconds from the epoch to `moment`; without a zone it is taken as UTC."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - _EPOCH) // _MILLISECOND


def ceil_ms(moment: datetime) -> int:
    """As `floor_ms`, rounded up."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return -((_EPOCH - aware) // _MILLISECOND)
