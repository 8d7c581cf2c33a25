"""Single calls of the reconciliation protocol: counts them and interprets their status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from google.protobuf.message import DecodeError

from recon.codec import read_total
from recon.events import Busy, Expired, Unsupported
from recon.hashing import Total
from recon.initiator import Hello, hello_of, hello_request, refusal_of
from recon.limits import PROTOCOL_VERSION
from recon.marks import MARK_BYTES_MAX
from recon.session import SessionHeader
from sdstore.sync.report import Counts, SyncCode, SyncError, misbehaved
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse

_WITH_POLICY = frozenset(
    {
        recon_pb2.OK,
        recon_pb2.NONCE_EXPIRED,
        recon_pb2.UNKNOWN_INTEREST,
        recon_pb2.UNKNOWN_MARK,
    }
)


class Transport(Protocol):
    """The call that a session makes. It raises `SyncError` if the peer is at fault."""

    bytes_up: int
    bytes_down: int

    async def recon(self, request: bytes) -> bytes:
        """One call of the reconciliation protocol."""


class NonceExpiredError(Exception):
    """The responder requires a new nonce: moved content stays, all other ranges are asked again."""

    def __init__(self, responder_nonce: bytes) -> None:
        super().__init__("the responder's nonce has expired")
        self.responder_nonce = responder_nonce


class InterestChangedError(Exception):
    """A side wants something else by now: moved content stays, and the sides agree again."""


class MarkUnknownError(Exception):
    """A side does not know a mark any more: compare everything."""


def error_of(refusal: Expired | Busy | Unsupported) -> NonceExpiredError | SyncError:
    """The error that a refusal raises in the session."""
    match refusal:
        case Expired():
            return NonceExpiredError(refusal.responder_nonce)
        case Busy(refused=True):
            detail = "the peer refuses to reconcile this interest with us"
            return SyncError(SyncCode.FORBIDDEN, detail)
        case Busy():
            detail = f"the peer is busy; retry after {refusal.retry_after_s} s"
            return SyncError(SyncCode.OVERLOADED, detail)
        case Unsupported():
            detail = f"the peer speaks version {refusal.version}, this node {PROTOCOL_VERSION}"
            return SyncError(SyncCode.PEER_VERSION, detail)


class Exchange:
    """Calls of one session. A round is a call that depends on the answer to another."""

    def __init__(self, transport: Transport, counts: Counts) -> None:
        self._transport = transport
        self._counts = counts
        self._send_interest = False
        self.policy: int | None = None
        """The peer's policy, from its last answer."""
        self.mark = b""
        """The mark of the peer that the current pass is as of, once it gave one."""
        self.total: Total | None = None
        """The total that the peer stated with that mark."""
        self.awaits_mark = False
        """Whether the next answer with a total will have the mark: no other request goes before it."""
        self.has_changed: Callable[[], bool] = lambda: False
        """Whether a side has changed what it wants since both agreed: no request goes out then."""
        self._since = b""
        self._is_bounded = False

    def begin_pass(self, since: bytes, *, wants_mark: bool) -> None:
        """Begin a comparison of what arrived at the peer after its mark `since` (empty: everything)."""
        self.mark, self.total, self._since = b"", None, since
        self.awaits_mark, self._is_bounded = wants_mark, True

    def release(self) -> None:
        """Let the peer answer from its set as it is, instead of as of the mark."""
        self._is_bounded = False

    async def call(self, message: ReconRequest) -> ReconResponse:
        """Send a request; returns the answer with any status. Raises SyncError, InterestChangedError."""
        if self.has_changed():
            raise InterestChangedError
        self._add_marks(message)
        round_number = self._counts["rounds"] + 1
        self._counts["requests"] += 1
        try:
            raw = await self._transport.recon(message.SerializeToString())
            response = ReconResponse.FromString(raw)
        except DecodeError:
            raise misbehaved("an answer is not a ReconResponse") from None
        finally:
            self._counts["bytes_up"] = self._transport.bytes_up
            self._counts["bytes_down"] = self._transport.bytes_down
        self._counts["rounds"] = max(self._counts["rounds"], round_number)
        if response.status in _WITH_POLICY:
            self.policy = response.policy
        self._take_mark(message, response)
        return response

    def _add_marks(self, message: ReconRequest) -> None:
        """Name the marks between which the peer's elements count. A push depends on none."""
        if not (message.HasField("ranges") or message.HasField("fetch") or message.total):
            return
        message.since = self._since
        message.up_to = self.mark if self._is_bounded else b""
        message.mark = self.awaits_mark and message.total

    def _take_mark(self, message: ReconRequest, response: ReconResponse) -> None:
        """Raises MarkUnknownError if the peer did not answer as of the marks of the request."""
        if response.status == recon_pb2.UNKNOWN_MARK and (message.since or message.up_to):
            raise MarkUnknownError
        if response.status != recon_pb2.OK or not message.mark:
            return
        self.awaits_mark = False
        if len(response.mark) > MARK_BYTES_MAX:
            raise misbehaved(f"a mark has {len(response.mark)} bytes, at most {MARK_BYTES_MAX}")
        if not response.mark and message.since:
            raise MarkUnknownError  # it answers for a part of the interest
        if response.mark:
            self.mark, self.total = response.mark, read_total(response)

    async def content_call(self, header: SessionHeader, message: ReconRequest) -> ReconResponse:
        """Send a request without ranges; the answer is OK. Raises SyncError, NonceExpiredError."""
        message.session.CopyFrom(header.message(in_full=self._send_interest))
        response = await self.call(message)
        if response.status == recon_pb2.UNKNOWN_INTEREST and not self._send_interest:
            self._send_interest = True
            return await self.content_call(header, message)
        if refusal := refusal_of(response, header.responder_nonce):
            raise error_of(refusal)
        return response

    async def hello(self) -> Hello:
        """The peer's nonce, interest and policy."""
        found = hello_of(await self.call(hello_request()))
        if isinstance(found, Hello):
            return found
        raise error_of(found)
