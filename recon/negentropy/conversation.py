"""Negentropy v1: reconciliation with clients that speak the published protocol.

Sans-I/O. The client sends `initiate()`, then the message that `reconcile` makes of each answer, until
it returns no message. The server answers each message with `respond` and keeps no state. `wire` has
the format, `records` the sums and fingerprints.

The fingerprints have no key: anyone who can publish can make two different sets look equal, with about
an hour of computing (docs/negentropy.md). Stores speak recon; this is for existing clients.
"""

import sys
from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recon.errors import LocalProtocolError, RemoteProtocolError
from recon.negentropy.records import Records
from recon.negentropy.wire import (
    END,
    FINGERPRINT,
    ID_BYTES,
    ID_LIST,
    ORIGIN,
    PROTOCOL_VERSION,
    VERSION_BYTES,
    Bound,
    MessageWriter,
    Range,
    read_ranges,
)

BUCKETS: Final = 16
"""Parts of a split. The protocol leaves it open; with the others' number messages are the same."""

LISTED_RECORDS_MAX: Final = 2 * BUCKETS - 1
"""A range of at most so many records is listed rather than split."""

FRAME_BYTES_MIN: Final = 4096
"""A split (up to 960 bytes) or a list (up to 1 kB) must fit, or no progress is certain."""

FRAME_RESERVE_BYTES: Final = 200
"""Kept free behind the last range: a skip, the bounds of a cut list and the remainder, 150 at most."""

MESSAGE_BYTES_MAX: Final = 64 << 20
"""Of one message received: two million IDs. Servers set a lower bound on request bodies."""

ROUNDS_MAX: Final = 1 << 16
"""Of one client session. Two disjoint sets of 10^6 in 4096-byte frames take about 17,000 (1,724
measured at 10^5, growing in proportion); in 60 kB frames 1,414."""

BATCH_RANGES_MAX: Final = 1024
"""Ranges handled at a time: at most 17 places each and 1.5 kB a place, 27 MB of scratch."""

SPLIT_BYTES_MIN: Final = BUCKETS * 19
"""A frame divided by this bounds the splits it holds: the first batch need not be larger. If it
did not fill the frame, the next one doubles."""

Buckets = list[tuple[Bound, bytes]]
"""Upper bound and fingerprint of each part of a range."""

Positions = NDArray[np.int64]

_Compare = Callable[[int, int, bytes], None]


class Step(NamedTuple):
    """The outcome of one answer for the client, and the next message (None: the end)."""

    message: bytes | None
    have_ids: list[bytes]
    """IDs that this side has and the server lacks, in record order."""
    need_ids: list[bytes]
    """IDs that the server has and this side lacks, in the server's order."""


class Negentropy:
    """One side of the conversation, over an immutable set of records.

    As a server it keeps no state, so one object can answer many clients; as a client it counts
    rounds, so each session has its own.
    """

    def __init__(
        self,
        records: Records,
        frame_limit_bytes: int = 0,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        ranges_max: int = sys.maxsize,
        rounds_max: int = ROUNDS_MAX,
    ) -> None:
        """Bound the messages sent (0: no limit), those taken and their ranges, a client's rounds.

        Raises LocalProtocolError for a frame limit below 4096 other than 0.
        """
        if frame_limit_bytes and frame_limit_bytes < FRAME_BYTES_MIN:
            raise LocalProtocolError(f"a frame limit must be 0 or at least {FRAME_BYTES_MIN} bytes")
        self._records = records
        self._frame_limit_bytes = frame_limit_bytes or sys.maxsize
        self._message_bytes_max = message_bytes_max
        self._ranges_max = ranges_max
        self._rounds_left = rounds_max

    def initiate(self) -> bytes:
        """Open the conversation: the client's first message."""
        reply = _Reply(self._records, self._frame_limit_bytes)
        everything = np.array([0, len(self._records)])
        [buckets] = _split(self._records, everything[:1], everything[1:], [END])
        reply.write_split(END, len(self._records), buckets)
        return reply.to_bytes()

    def reconcile(self, message: bytes) -> Step:
        """Take the server's answer.

        Under a frame limit a later step can repeat an ID: keep sets.
        Raises RemoteProtocolError for an answer that is malformed, too large, of another version,
        or one more than `rounds_max`.
        """
        if not self._rounds_left:
            raise RemoteProtocolError("negentropy_endless", "the round budget is used up")
        self._rounds_left -= 1
        if not self._is_current(message):
            raise RemoteProtocolError("negentropy_version", f"version byte {message[0]:#x}")
        have_ids: list[bytes] = []
        need_ids: list[bytes] = []

        def compare(lower: int, upper: int, listed: bytes) -> None:
            ours, theirs = _rows(self._records.ids(lower, upper)), _rows(listed)
            have_ids.extend(_without(ours, theirs))
            need_ids.extend(_without(theirs, ours))

        answer = self._answer(message, compare)
        return Step(answer if len(answer) > 1 else None, have_ids, need_ids)

    def respond(self, message: bytes) -> bytes:
        """Answer a client's message; one of another version with the version spoken here.

        Raises RemoteProtocolError for a message that is malformed or too large.
        """
        if not self._is_current(message):
            return bytes([PROTOCOL_VERSION])
        return self._answer(message, None)

    def _is_current(self, message: bytes) -> bool:
        if len(message) > self._message_bytes_max:
            raise RemoteProtocolError("negentropy_too_large", f"{len(message)} bytes")
        if not message or message[0] not in VERSION_BYTES:
            raise RemoteProtocolError("negentropy_malformed", "no version byte")
        return message[0] == PROTOCOL_VERSION

    def _answer(self, message: bytes, compare: _Compare | None) -> bytes:
        """Go through the ranges; a client compares listed IDs, a server (None) lists its own."""
        reply = _Reply(self._records, self._frame_limit_bytes)
        ranges = read_ranges(message, self._ranges_max)
        size = min(self._frame_limit_bytes // SPLIT_BYTES_MIN, BATCH_RANGES_MAX)
        while batch := list(islice(ranges, size)):
            size = min(2 * size, BATCH_RANGES_MAX)
            uppers = self._records.positions([found.upper for found in batch])
            splits = _split_different(self._records, batch, reply.index, uppers)
            for place, (found, upper) in enumerate(zip(batch, uppers.tolist(), strict=True)):
                if place in splits:
                    reply.write_split(found.upper, upper, splits[place])
                elif found.mode == ID_LIST and compare is None:
                    reply.write_list(found.upper, upper)
                else:
                    if found.mode == ID_LIST and compare is not None:
                        compare(reply.index, upper, found.payload)
                    reply.skip(found.upper, upper)
                if reply.is_full:
                    return reply.to_bytes()
        return reply.to_bytes()


class _Reply:
    """An answer in the making. Everything before `index` is dealt with, and `reach` bounds it."""

    def __init__(self, records: Records, frame_limit_bytes: int) -> None:
        self._records = records
        self._limit_bytes = frame_limit_bytes - FRAME_RESERVE_BYTES
        self._writer = MessageWriter()
        self._reach = ORIGIN
        self._is_skipping = False
        self.index = 0
        self.is_full = False

    def skip(self, reach: Bound, index: int) -> None:
        """Say nothing up to here; written only when something follows."""
        self._reach, self.index = reach, index
        self._is_skipping = True

    def write_split(self, reach: Bound, index: int, buckets: Buckets) -> None:
        """Write the fingerprints of a range's buckets, or its IDs if it has no buckets."""
        mark = self._writer.mark()
        if self._is_skipping:
            self._writer.skip(self._reach)
        if buckets:
            self._writer.fingerprints(buckets)
        else:
            self._writer.id_list(reach, self._records.ids(self.index, index))
        self.is_full = len(self._writer) > self._limit_bytes
        if self.is_full:
            self._writer.rewind(mark)
        else:
            self._advance(reach, index)

    def write_list(self, reach: Bound, index: int) -> None:
        """List a range's IDs, or as many of the first ones as fit (at least one)."""
        if self._is_skipping:
            self._writer.skip(self._reach)
        fitting = max(1, (self._limit_bytes - len(self._writer)) // ID_BYTES)
        if index - self.index > fitting:
            index = self.index + fitting
            [reach] = self._records.bounds_between(np.array([index]))
            self.is_full = True
        self._writer.id_list(reach, self._records.ids(self.index, index))
        self.is_full |= len(self._writer) > self._limit_bytes
        self._advance(reach, index)

    def to_bytes(self) -> bytes:
        """The message. If the frame is full, its last range covers the rest."""
        if self.is_full and self._reach != END:
            if self._is_skipping:
                self._writer.skip(self._reach)
            self._write_rest()
        return self._writer.to_bytes()

    def _write_rest(self) -> None:
        # An empty rest is listed: other implementations, when their frame is full too, drop the
        # range at hand from the fingerprint of their rest, and would call two empty ones equal.
        if self.index == len(self._records):
            self._writer.id_list(END, b"")
        else:
            edges = np.array([[self.index, len(self._records)]])
            [fingerprint] = self._records.fingerprints(edges)
            self._writer.fingerprints([(END, fingerprint)])

    def _advance(self, reach: Bound, index: int) -> None:
        self._reach, self.index = reach, index
        self._is_skipping = False


def _split_different(
    records: Records, batch: list[Range], lower: int, uppers: Positions
) -> dict[int, Buckets]:
    """The buckets of those ranges of a batch whose fingerprints differ, by place in the batch."""
    asked = [place for place, found in enumerate(batch) if found.mode == FINGERPRINT]
    lowers = np.concatenate([[lower], uppers[:-1]])
    ours = records.fingerprints(np.stack([lowers[asked], uppers[asked]], axis=1))
    pairs = zip(asked, ours, strict=True)
    different = [place for place, fingerprint in pairs if fingerprint != batch[place].payload]
    reaches = [batch[place].upper for place in different]
    splits = _split(records, lowers[different], uppers[different], reaches)
    return dict(zip(different, splits, strict=True))


def _split(
    records: Records, lowers: Positions, uppers: Positions, reaches: list[Bound]
) -> list[Buckets]:
    """Cut ranges into buckets of equal counts, the first ones taking what is over.

    Ranges that are short enough to be listed get no buckets.
    """
    counts = uppers - lowers
    wide = np.flatnonzero(counts > LISTED_RECORDS_MAX)
    sizes, over = counts[wide, None] // BUCKETS, counts[wide, None] % BUCKETS
    steps = np.arange(BUCKETS + 1)
    edges = lowers[wide, None] + sizes * steps + np.minimum(steps, over)
    bounds = iter(records.bounds_between(edges[:, 1:-1].ravel()))
    fingerprints = iter(records.fingerprints(edges))
    splits: list[Buckets] = [[] for _ in reaches]
    for place in wide.tolist():
        uppers_of_buckets = [*islice(bounds, BUCKETS - 1), reaches[place]]
        splits[place] = list(zip(uppers_of_buckets, islice(fingerprints, BUCKETS), strict=True))
    return splits


def _rows(ids: bytes) -> list[bytes]:
    return [ids[start : start + ID_BYTES] for start in range(0, len(ids), ID_BYTES)]


def _without(ids: list[bytes], others: list[bytes]) -> list[bytes]:
    """The distinct IDs that are not among the others, in order."""
    excluded = set(others)
    return [found for found in dict.fromkeys(ids) if found not in excluded]
