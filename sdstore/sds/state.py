"""The saved state of a participant: small records under string keys, each written by itself.

| key | value (proto/participant.proto) | written |
|---|---|---|
| `owner` | `Owner` | once |
| `progress` | `Progress` | with every `Save`, 20 bytes |
| `sent/ID` | `Sent` | for each message of ours, and when its state changes |
| `waiting/ID` | `Waiting`, with the frame | for a message that arrives before its causes, until delivery |
| `lost/ID` | `Forgone` | for a lost message |
| `passed/ID` | `Forgone` | for a message that is not logged, when one that depends on it is delivered, until it is too |
| `head/ID` | `Head` | for a message that 128 later ones do not refer to, until one refers to it |
| `unpublished` | `Waiting` | in ordered mode, for a message of ours until a store takes or refuses it |
| `sync/ID` | `Forgone` | for a sync message without a sender, which version 1 refers to |

A value is the format version (one byte), the protobuf message, and the CRC-32 of key, version and
message. The log, the bloom filter and the IDs that are missing are not part of the state: the log is
beside it, and the others follow from both.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from zlib import crc32

from google.protobuf.message import DecodeError, Message

from sdstore.errors import LocalProtocolError
from sdstore.sds.effects import Effect, Save
from sdstore.wire import participant_pb2 as pb

FORMAT_VERSION = 1
"""Raise it when an older program would misread the state. A later version is refused."""

OWNER, PROGRESS, UNPUBLISHED = "owner", "progress", "unpublished"
SENT, WAITING, LOST, SYNC = "sent/", "waiting/", "lost/", "sync/"
PASSED, HEAD = "passed/", "head/"

_VERSION = bytes((FORMAT_VERSION,))
_CRC_BYTES = 4
_pack_crc = struct.Struct(">I").pack

Record = TypeVar("Record", bound=Message)


def seal(key: str, record: Message) -> bytes:
    """The value of a record."""
    value = _VERSION + record.SerializeToString()
    return value + _pack_crc(crc32(value, crc32(key.encode())))


def unseal(key: str, value: bytes, kind: type[Record]) -> Record:
    """The record in a value; `LocalProtocolError` (`state_damaged`, `state_too_new`)."""
    if not isinstance(value, bytes) or len(value) < 1 + _CRC_BYTES:
        raise LocalProtocolError("state_damaged", f"the value of {key!r} is too short")
    body, crc = value[:-_CRC_BYTES], int.from_bytes(value[-_CRC_BYTES:], "big")
    if crc32(body, crc32(key.encode())) != crc:
        raise LocalProtocolError("state_damaged", f"the value of {key!r} has a wrong checksum")
    if body[0] != FORMAT_VERSION:
        raise LocalProtocolError(
            "state_too_new",
            f"the state has format version {body[0]}; this program reads {FORMAT_VERSION}",
        )
    try:
        return kind.FromString(body[1:])
    except (DecodeError, UnicodeDecodeError) as error:
        raise LocalProtocolError("state_damaged", f"the value of {key!r} is malformed") from error


@dataclass(slots=True)
class SavedState:
    """A state that was read: records by message ID, in the order of their places."""

    progress: pb.Progress = field(default_factory=pb.Progress)
    has_owner: bool = False
    unpublished: pb.Waiting | None = None
    sent: dict[str, pb.Sent] = field(default_factory=dict)
    waiting: dict[str, pb.Waiting] = field(default_factory=dict)
    lost: dict[str, pb.Forgone] = field(default_factory=dict)
    sync: dict[str, pb.Forgone] = field(default_factory=dict)
    passed: dict[str, pb.Forgone] = field(default_factory=dict)
    heads: dict[str, pb.Head] = field(default_factory=dict)


def read_state(state: Mapping[str, bytes], channel_id: str, sender_id: str) -> SavedState:
    """The state of this participant; an empty mapping gives an empty state.

    Raises `LocalProtocolError`: `state_damaged`, `state_too_new`, or `state_of_another` if channel or
    sender differ from those that the state was saved for.
    """
    saved = SavedState()
    of_kind: dict[str, tuple[dict[str, Any], type[Any]]] = {
        SENT: (saved.sent, pb.Sent),
        WAITING: (saved.waiting, pb.Waiting),
        LOST: (saved.lost, pb.Forgone),
        PASSED: (saved.passed, pb.Forgone),
        SYNC: (saved.sync, pb.Forgone),
        HEAD: (saved.heads, pb.Head),
    }
    for key, value in state.items():
        kind, slash, message_id = key.partition("/")
        if key == OWNER:
            owner = unseal(key, value, pb.Owner)
            if (owner.channel_id, owner.sender_id) != (channel_id, sender_id):
                raise LocalProtocolError(
                    "state_of_another",
                    f"the state belongs to {owner.sender_id!r} in channel {owner.channel_id!r}",
                )
            saved.has_owner = True
        elif key == PROGRESS:
            saved.progress = unseal(key, value, pb.Progress)
        elif key == UNPUBLISHED:
            saved.unpublished = unseal(key, value, pb.Waiting)
        elif kind + slash in of_kind:
            records, record_type = of_kind[kind + slash]
            records[message_id] = unseal(key, value, record_type)
        else:
            raise LocalProtocolError("state_damaged", f"the state has an unknown key {key!r}")
    if state and not saved.has_owner:
        raise LocalProtocolError("state_damaged", f"the state has no value for {OWNER!r}")
    saved.sent = dict(sorted(saved.sent.items(), key=_place))
    saved.waiting = dict(sorted(saved.waiting.items(), key=_place))
    saved.lost = dict(sorted(saved.lost.items(), key=_place))
    saved.passed = dict(sorted(saved.passed.items(), key=_place))
    saved.sync = dict(sorted(saved.sync.items(), key=_place))
    return saved


def _place(item: tuple[str, pb.Sent | pb.Waiting | pb.Forgone]) -> int:
    return item[1].place


class Turn:
    """What one call of a participant changes in the state, and its effects. Reused by the next call."""

    def __init__(self) -> None:
        self.changes: dict[str, bytes | None] = {}
        self.effects: list[Effect] = []
        self.must_save = False  # also without changes: the log has rows to write

    def put(self, key: str, record: Message) -> None:
        """Write a record."""
        self.changes[key] = seal(key, record)

    def delete(self, key: str) -> None:
        """Delete a record."""
        self.changes[key] = None

    def take_save(self) -> Save:
        """The effect that writes the changes so far."""
        save = Save(tuple(self.changes.items()))
        self.changes.clear()
        self.must_save = False
        return save
