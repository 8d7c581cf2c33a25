"""Payloads and messages of MVDS as values, their IDs, and their bytes.

The specification numbers the fields of a payload 5001 to 5004; the Go implementation numbers them 1
to 4. Both can be read; `Numbering` selects the one to write. Message IDs do not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from hashlib import sha256

from google.protobuf.message import DecodeError

from sdstore.errors import SdstoreError
from sdstore.wire import mvds_pb2

ID_BYTES = 32
ID_FIELD_BYTES = ID_BYTES + 4
"""An ID in a payload: tag of up to three bytes, length, the ID."""

MESSAGE_FIELD_BYTES = 32
"""Maximum bytes of a message's fields besides group and body: tags, lengths, timestamp."""


class MvdsError(SdstoreError):
    """Base class of both errors."""


class LocalProtocolError(MvdsError):
    """This program misused the library."""


class RemoteProtocolError(MvdsError):
    """The peer sent bytes that are not a payload."""


class Numbering(Enum):
    """Field numbers that a payload is written with."""

    SPECIFICATION = "specification"
    GO = "go"


@dataclass(frozen=True)
class Message:
    """One message of a group. `timestamp`: signed 64 bits, in a unit that the group agrees on."""

    group_id: bytes
    timestamp: int
    body: bytes

    def __post_init__(self) -> None:
        if not -(2**63) <= self.timestamp < 2**63:
            detail = f"timestamp {self.timestamp} is not a signed 64-bit integer"
            raise LocalProtocolError("invalid_timestamp", detail)

    @cached_property
    def message_id(self) -> bytes:
        """SHA-256 over "MESSAGE_ID", group, timestamp (8 bytes, little-endian) and body.

        The specification leaves the encoding of the timestamp open; this is the Go
        implementation's.
        """
        number = self.timestamp.to_bytes(8, "little", signed=True)
        return sha256(b"MESSAGE_ID" + self.group_id + number + self.body).digest()

    @property
    def field_bytes(self) -> int:
        """The maximum bytes that it adds to a payload."""
        return MESSAGE_FIELD_BYTES + len(self.group_id) + len(self.body)


@dataclass(frozen=True)
class Payload:
    """The records that one peer sends another in one epoch. Acks, offers and requests are message IDs."""

    acks: tuple[bytes, ...] = ()
    offers: tuple[bytes, ...] = ()
    requests: tuple[bytes, ...] = ()
    messages: tuple[Message, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.acks or self.offers or self.requests or self.messages)


def encode(payload: Payload, numbering: Numbering = Numbering.SPECIFICATION) -> bytes:
    """The bytes of a payload."""
    is_go = numbering is Numbering.GO
    kind = mvds_pb2.GoMessage if is_go else mvds_pb2.Message
    messages = [
        kind(group_id=each.group_id, timestamp=each.timestamp, body=each.body)
        for each in payload.messages
    ]
    out: mvds_pb2.Payload | mvds_pb2.GoPayload = (
        mvds_pb2.GoPayload() if is_go else mvds_pb2.Payload()
    )
    out.acks.extend(payload.acks)
    out.offers.extend(payload.offers)
    out.requests.extend(payload.requests)
    out.messages.extend(messages)  # type: ignore[arg-type]
    return out.SerializeToString()


def decode(raw: bytes) -> Payload:
    """Decode a payload in either numbering. Raises `RemoteProtocolError`.

    Bytes with a field of the specification's numbering are read in that numbering, all others in the
    Go implementation's; unknown fields are skipped.
    """
    try:
        read: mvds_pb2.Payload | mvds_pb2.GoPayload = mvds_pb2.Payload.FromString(raw)
        if not read.ListFields():
            read = mvds_pb2.GoPayload.FromString(raw)
    except DecodeError:
        raise RemoteProtocolError("malformed", f"{len(raw)} bytes are not a payload") from None
    messages = tuple(Message(m.group_id, m.timestamp, m.body) for m in read.messages)
    return Payload(tuple(read.acks), tuple(read.offers), tuple(read.requests), messages)
