from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SpecFrame(_message.Message):
    __slots__ = ("sender_id", "message_id", "channel_id", "chat_sender_id", "lamport_timestamp", "causal_history", "bloom_filter", "repair_request", "content")
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    CHAT_SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    LAMPORT_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    CAUSAL_HISTORY_FIELD_NUMBER: _ClassVar[int]
    BLOOM_FILTER_FIELD_NUMBER: _ClassVar[int]
    REPAIR_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    sender_id: bytes
    message_id: bytes
    channel_id: bytes
    chat_sender_id: bytes
    lamport_timestamp: int
    causal_history: _containers.RepeatedScalarFieldContainer[bytes]
    bloom_filter: bytes
    repair_request: _containers.RepeatedScalarFieldContainer[bytes]
    content: bytes
    def __init__(self, sender_id: _Optional[bytes] = ..., message_id: _Optional[bytes] = ..., channel_id: _Optional[bytes] = ..., chat_sender_id: _Optional[bytes] = ..., lamport_timestamp: _Optional[int] = ..., causal_history: _Optional[_Iterable[bytes]] = ..., bloom_filter: _Optional[bytes] = ..., repair_request: _Optional[_Iterable[bytes]] = ..., content: _Optional[bytes] = ...) -> None: ...

class NimFrame(_message.Message):
    __slots__ = ("message_id", "lamport_timestamp", "causal_history", "channel_id", "content", "bloom_filter", "sender_id", "repair_request")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    LAMPORT_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    CAUSAL_HISTORY_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    BLOOM_FILTER_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    REPAIR_REQUEST_FIELD_NUMBER: _ClassVar[int]
    message_id: bytes
    lamport_timestamp: int
    causal_history: _containers.RepeatedScalarFieldContainer[bytes]
    channel_id: bytes
    content: bytes
    bloom_filter: bytes
    sender_id: bytes
    repair_request: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, message_id: _Optional[bytes] = ..., lamport_timestamp: _Optional[int] = ..., causal_history: _Optional[_Iterable[bytes]] = ..., channel_id: _Optional[bytes] = ..., content: _Optional[bytes] = ..., bloom_filter: _Optional[bytes] = ..., sender_id: _Optional[bytes] = ..., repair_request: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("message_id", "retrieval_hint", "sender_id")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_HINT_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    message_id: bytes
    retrieval_hint: bytes
    sender_id: bytes
    def __init__(self, message_id: _Optional[bytes] = ..., retrieval_hint: _Optional[bytes] = ..., sender_id: _Optional[bytes] = ...) -> None: ...

class EntryFields(_message.Message):
    __slots__ = ("message_id", "retrieval_hint", "sender_id")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_HINT_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    message_id: _containers.RepeatedScalarFieldContainer[bytes]
    retrieval_hint: _containers.RepeatedScalarFieldContainer[bytes]
    sender_id: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, message_id: _Optional[_Iterable[bytes]] = ..., retrieval_hint: _Optional[_Iterable[bytes]] = ..., sender_id: _Optional[_Iterable[bytes]] = ...) -> None: ...
