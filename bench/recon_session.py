"""One measured session: both sides in one process, whole messages counted, views warm."""

from __future__ import annotations

import time
from dataclasses import dataclass

from recon.agreement import SessionHeader
from recon.events import Fault, Have, Need
from recon.initiator import Initiator, Options
from recon.limits import DEFAULT_LIMITS, Limits
from recon.responder import respond
from recon.view import View
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse

HEADER = SessionHeader(b"initiator nonce.", b"responder nonce.", b"")


@dataclass
class Measured:
    """Bytes both ways, round trips (requests sent together count once), ms of both sides."""

    bytes_up: int = 0
    bytes_down: int = 0
    round_trips: int = 0
    requests: int = 0
    ms: float = 0.0
    cpu_ms: float = 0.0  # the same where nothing else runs: all of it is one thread
    have: int = 0
    need: int = 0

    @property
    def bytes(self) -> int:
        """Both ways."""
        return self.bytes_up + self.bytes_down


def session(
    ours: View,
    theirs: View,
    *,
    seed: int,
    limits: Limits = DEFAULT_LIMITS,
    options: Options | None = None,
) -> Measured:
    """Identify the differences, and nothing else."""
    out = Measured()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    initiator = Initiator(ours, HEADER, options=options, limits=limits, seed=seed)
    while not initiator.done:
        sent = []
        while (request := initiator.next_request()) is not None:
            sent.append((request.request_id, request.message.SerializeToString()))
        out.round_trips += 1
        for request_id, raw in sent:
            answer = respond(theirs, ReconRequest.FromString(raw), limits).SerializeToString()
            out.requests += 1
            out.bytes_up += len(raw)
            out.bytes_down += len(answer)
            for event in initiator.receive(request_id, ReconResponse.FromString(answer)):
                _count(out, event)
    out.ms = (time.perf_counter() - start_s) * 1e3
    out.cpu_ms = (time.process_time() - start_cpu_s) * 1e3
    return out


def _count(out: Measured, event: object) -> None:
    if isinstance(event, Have):
        out.have += len(event.ids)
    elif isinstance(event, Need):
        out.need += event.count
    elif isinstance(event, Fault):
        raise event.error
