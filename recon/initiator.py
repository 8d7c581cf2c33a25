"""The initiator: keeps the work list, asks about ranges in batches, tells what it learns.

Sans-I/O: `next_request` gives a message to send, `receive` takes its answer and returns events.
Several requests may be in flight and answers may come in any order; a range is either waiting or
in flight, so no answer can be confused with another. Every answered request makes progress or is
the peer's fault, and all of it is paid from a budget, so a session ends whatever the peer does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from recon.codec import chunks, pack_counts, pack_ranges, unpack_counts, unpack_ranges
from recon.errors import LocalProtocolError, RemoteProtocolError
from recon.events import Busy, Done, Event, Expired, Fault, Have, InSync, Need
from recon.limits import (
    DEFAULT_LIMITS,
    PROTOCOL_VERSION,
    SHORT_ID_BYTES,
    SUMMARY_HASH_BYTES,
    Limits,
)
from recon.progress import Part, Progress, RangeState, measure
from recon.ranges import WHOLE, Range
from recon.responder import COUNT, EQUAL, LIST, SPLIT
from recon.session import SessionHeader, interest_hash
from recon.view import View, columns
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import Answers, Ranges, ReconRequest, ReconResponse, Session


@dataclass(frozen=True, slots=True)
class Options:
    """What to try for. One default setting serves all sizes."""

    parts: int = 16
    list_max: int = 16
    ranges_per_request: int = 4096


class _Work(NamedTuple):
    range: Range
    depth: int
    size: int  # the larger side's, as far as known


class OutgoingRequest(NamedTuple):
    """A message to send; give its answer back with the same `request_id`."""

    request_id: int
    message: ReconRequest


class Initiator:
    """One session. `seed` makes the random cuts; `recent`: own arrivals since the last session."""

    def __init__(
        self,
        view: View,
        header: SessionHeader,
        *,
        options: Options | None = None,
        limits: Limits = DEFAULT_LIMITS,
        seed: int = 0,
        recent: int = 0,
    ) -> None:
        self._view = view
        self._header = header
        self._options = options or Options()
        self._limits = limits
        self._seed = seed
        self._recent = recent
        self._waiting: deque[_Work] = deque([_Work(WHOLE, 0, len(view))])
        self._in_flight: dict[int, tuple[list[_Work], int]] = {}
        self._settled: list[Part] = []
        self._send_interest = False
        self._requests = 0
        self._bytes = 0
        self._credit = 0
        self._over = False

    @property
    def done(self) -> bool:
        """Whether the session is over, in whatever way."""
        return self._over

    @property
    def progress(self) -> Progress:
        """How far the session is."""
        return measure(self._parts())

    def _parts(self) -> Iterator[Part]:
        yield from self._settled
        flying = (work for works, _ in self._in_flight.values() for work in works)
        for work in (*self._waiting, *flying):
            yield work.range, work.size, RangeState.SYNCING

    def credit(self, content_bytes: int) -> None:
        """Content that really arrived (or was taken by the peer): the budget grows with it."""
        self._credit += content_bytes

    def next_request(self, elapsed_s: float = 0.0) -> OutgoingRequest | None:
        """The next message, or None: nothing waits, or enough is in flight, or it is over."""
        if self._over or not self._waiting or len(self._in_flight) >= self._limits.in_flight_max:
            return None
        self._check_time(elapsed_s)
        count = min(self._options.ranges_per_request, len(self._waiting))
        works = sorted(self._waiting.popleft() for _ in range(count))
        message = self._message(works)
        self._requests += 1
        size = message.ByteSize()
        self._bytes += size
        self._in_flight[self._requests] = (works, size)
        return OutgoingRequest(self._requests, message)

    def _message(self, works: list[_Work]) -> ReconRequest:
        summaries = [self._view.summary(work.range) for work in works]
        session = Session(
            initiator_nonce=self._header.initiator_nonce,
            responder_nonce=self._header.responder_nonce,
        )
        if self._send_interest:
            session.interest_bytes = self._header.interest
        else:
            session.interest_hash = interest_hash(self._header.interest)
        ranges = Ranges(
            parts=self._options.parts,
            list_max=self._options.list_max,
            bounds=pack_ranges([work.range for work in works]),
            counts=pack_counts([count for _, count in summaries]),
            hashes=b"".join(digest for digest, _ in summaries),
        )
        return ReconRequest(
            version=PROTOCOL_VERSION,
            session=session,
            ranges=ranges,
            response_bytes_max=self._limits.response_bytes_max,
        )

    def receive(
        self, request_id: int, response: ReconResponse, elapsed_s: float = 0.0
    ) -> list[Event]:
        """Events of one answer. After `Fault`, `Expired`, `Busy` or `Done` the session is over."""
        if request_id not in self._in_flight:
            raise LocalProtocolError(f"no request {request_id} is in flight")
        works, _ = self._in_flight.pop(request_id)
        self._bytes += response.ByteSize()
        try:
            events = self._take(works, response)
            self._check_time(elapsed_s)
            self._check_budget()
        except RemoteProtocolError as error:
            self._over = True
            return [Fault(error)]
        if not (self._over or self._waiting or self._in_flight):
            self._over = True
            events.append(Done(self._requests, self._bytes))
        return events

    def lost(self, request_id: int) -> None:
        """The request got no answer (connection broke): its ranges wait again."""
        works, _ = self._in_flight.pop(request_id)
        self._waiting.extendleft(reversed(works))

    def _take(self, works: list[_Work], response: ReconResponse) -> list[Event]:
        status = response.status
        if status == recon_pb2.OK:
            return self._answers(works, response.answers)
        if status == recon_pb2.UNKNOWN_INTEREST and not self._send_interest:
            self._send_interest = True
            self._waiting.extendleft(reversed(works))
            return []
        if status == recon_pb2.NONCE_EXPIRED:
            self._over = True
            return [Expired(response.responder_nonce)]
        if status in {recon_pb2.BUSY, recon_pb2.REFUSED}:
            self._over = True
            return [Busy(response.retry_after_s, status == recon_pb2.REFUSED)]
        raise RemoteProtocolError("status", recon_pb2.Status.Name(status))

    def _answers(self, works: list[_Work], answers: Answers) -> list[Event]:
        kinds = list(answers.kinds)
        counts = unpack_counts(answers.counts, len(kinds))
        if not 0 < len(kinds) <= len(works) or len(kinds) != answers.answered:
            raise RemoteProtocolError("no_progress", f"{len(kinds)} answers of {len(works)}")
        parts = iter(unpack_ranges(answers.bounds))
        part_counts = iter(unpack_counts(answers.part_counts))
        hashes = iter(chunks(answers.hashes, SUMMARY_HASH_BYTES))
        ids = iter(chunks(answers.short_ids, SHORT_ID_BYTES))
        events: list[Event] = []
        try:
            for work, kind, count in zip(works, kinds, counts, strict=False):
                if kind == EQUAL:
                    events += self._equal(work.range)
                elif kind == COUNT:
                    events += self._lack(work.range, count)
                elif kind == LIST:
                    events += self._list(work.range, {next(ids) for _ in range(count)})
                elif kind == SPLIT:
                    rows = [(next(parts), next(part_counts), next(hashes)) for _ in range(count)]
                    events += self._split(work, rows)
                else:
                    raise RemoteProtocolError("malformed", f"answer kind {kind}")
        except (StopIteration, RuntimeError) as error:
            raise RemoteProtocolError("malformed", "columns too short") from error
        self._waiting.extendleft(reversed(works[len(kinds) :]))
        return events

    def _equal(self, span: Range) -> list[Event]:
        count = self._view.summary(span)[1]
        self._settled.append((span, count, RangeState.IN_SYNC))
        return [InSync(span, count)]

    def _lack(self, span: Range, count: int) -> list[Event]:
        self._settled.append((span, count, RangeState.DONT_HAVE))
        return [Need(span, None, count)]

    def _list(self, span: Range, theirs: set[bytes]) -> list[Event]:
        elements = self._view.slice(span)
        ours = {self._view.short_id(element): element for element in elements}
        events: list[Event] = []
        have = [element for short, element in ours.items() if short not in theirs]
        need = sorted(theirs - ours.keys())
        if have:
            events.append(Have(*columns(have)))
        if need:
            table = np.frombuffer(b"".join(need), dtype=np.uint8).reshape(-1, SHORT_ID_BYTES)
            events.append(Need(span, table, len(need)))
        if not events:
            events.append(InSync(span, len(elements)))
        state = RangeState.DONT_HAVE if need else RangeState.IN_SYNC
        self._settled.append((span, max(len(elements), len(theirs)), state))
        return events

    def _split(self, work: _Work, rows: list[tuple[Range, int, bytes]]) -> list[Event]:
        if len(rows) < 2 or work.depth >= self._limits.depth_max:
            raise RemoteProtocolError("split", "too few parts or too deep")
        edge = work.range.lower
        for part, count, _ in rows:
            if part.lower != edge or count == 0:
                raise RemoteProtocolError("split", "parts must tile the range and be non-empty")
            edge = part.upper
        if edge != work.range.upper:
            raise RemoteProtocolError("split", "parts must tile the range")
        return [e for part, count, digest in rows for e in self._part(work, part, count, digest)]

    def _part(self, work: _Work, part: Range, count: int, digest: bytes) -> list[Event]:
        ours, our_count = self._view.summary(part)
        if our_count == 0:
            return self._lack(part, count)
        if (ours, our_count) == (digest, count):
            return self._equal(part)
        self._waiting.append(_Work(part, work.depth + 1, max(count, our_count)))
        return []

    def _check_budget(self) -> None:
        limits = self._limits
        allowed = limits.bytes_base + limits.bytes_per_element * len(self._view)
        allowed += limits.bytes_per_credit * self._credit
        if self._bytes > allowed:
            raise RemoteProtocolError("budget_bytes", f"{self._bytes} of {allowed}")
        if self._requests > limits.requests_max:
            raise RemoteProtocolError("budget_requests", str(self._requests))

    def _check_time(self, elapsed_s: float) -> None:
        allowed = self._limits.seconds_base
        allowed += self._limits.seconds_per_credit_mib * self._credit / (1 << 20)
        if elapsed_s > allowed:
            raise RemoteProtocolError("budget_seconds", f"{elapsed_s:.0f} of {allowed:.0f}")
