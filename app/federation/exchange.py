"""Single calls of the reconciliation protocol, counted, and what their status means."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from app.errors import Code, Problem
from app.federation.report import Traffic
from app.federation.transport import PeerTransport
from recon.limits import PROTOCOL_VERSION
from recon.session import SessionHeader, interest_hash
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse, Session


class NonceExpiredError(Exception):
    """The responder wants another nonce: what was moved stays, the rest is asked again."""

    def __init__(self, responder_nonce: bytes) -> None:
        super().__init__("the responder's nonce has expired")
        self.responder_nonce = responder_nonce


class Exchange:
    """Calls of one session. A round is a call that could not be made before another's answer."""

    def __init__(self, transport: PeerTransport, traffic: Traffic) -> None:
        self._transport = transport
        self._traffic = traffic
        self._send_interest = False
        self.policy: int | None = None
        """The peer's policy, as its last answer told."""

    async def call(self, message: ReconRequest) -> ReconResponse:
        """Send a request; the answer, whatever its status. Raises Problem."""
        round_number = self._traffic.rounds + 1
        self._traffic.requests += 1
        try:
            raw = await self._transport.recon(message.SerializeToString())
            response = ReconResponse.FromString(raw)
        except DecodeError:
            raise Problem(Code.PEER_MISBEHAVED, "an answer is not a ReconResponse") from None
        finally:
            self._traffic.bytes_up = self._transport.bytes_up
            self._traffic.bytes_down = self._transport.bytes_down
        self._traffic.rounds = max(self._traffic.rounds, round_number)
        if response.status == recon_pb2.OK and not message.idle_root:
            self.policy = response.policy
        return response

    async def content_call(self, header: SessionHeader, message: ReconRequest) -> ReconResponse:
        """Send a request without ranges; the answer is OK. Raises Problem, NonceExpiredError."""
        message.session.CopyFrom(header.message(in_full=self._send_interest))
        response = await self.call(message)
        if response.status == recon_pb2.UNKNOWN_INTEREST and not self._send_interest:
            self._send_interest = True
            return await self.content_call(header, message)
        if response.status == recon_pb2.NONCE_EXPIRED:
            raise NonceExpiredError(response.responder_nonce)
        if response.status != recon_pb2.OK:
            raise problem_of(response)
        return response

    async def first_contact(self, initiator_nonce: bytes, interest: bytes) -> bytes:
        """The responder's nonce."""
        session = Session(initiator_nonce=initiator_nonce, interest_bytes=interest)
        response = await self.call(ReconRequest(version=PROTOCOL_VERSION, session=session))
        if response.status != recon_pb2.NONCE_EXPIRED:
            raise problem_of(response)
        return response.responder_nonce

    async def same_root(self, root: bytes, interest: bytes) -> bool:
        """Whether the peer holds what has this root. False also where it cannot tell."""
        session = Session(interest_hash=interest_hash(interest))
        response = await self.call(
            ReconRequest(version=PROTOCOL_VERSION, session=session, idle_root=root)
        )
        return response.status == recon_pb2.OK and response.same_root


def problem_of(response: ReconResponse) -> Problem:
    """What a status other than the expected one means for the session."""
    if response.status == recon_pb2.BUSY:
        return busy(response.retry_after_s)
    if response.status == recon_pb2.REFUSED:
        return Problem(Code.FORBIDDEN, "the peer refuses to reconcile this interest with us")
    if response.status == recon_pb2.UNSUPPORTED_VERSION and response.version != PROTOCOL_VERSION:
        return unsupported(response.version)
    detail = f"an answer with the status {response.status} out of turn"
    return Problem(Code.PEER_MISBEHAVED, detail)


def unsupported(version: int) -> Problem:
    """The peer speaks another version of the protocol."""
    detail = f"the peer speaks version {version}, we speak {PROTOCOL_VERSION}"
    return Problem(Code.PEER_VERSION, detail)


def busy(retry_after_s: int) -> Problem:
    """The peer has no room for us now."""
    return Problem(
        Code.OVERLOADED,
        f"the peer is busy, try again in {retry_after_s} s",
        headers={"Retry-After": str(retry_after_s)},
    )
