from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Owner(_message.Message):
    __slots__ = ("channel_id", "sender_id")
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    channel_id: str
    sender_id: str
    def __init__(self, channel_id: _Optional[str] = ..., sender_id: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("lamport_timestamp", "confirmed", "sent_count")
    LAMPORT_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    SENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    lamport_timestamp: int
    confirmed: int
    sent_count: int
    def __init__(self, lamport_timestamp: _Optional[int] = ..., confirmed: _Optional[int] = ..., sent_count: _Optional[int] = ...) -> None: ...

class Sent(_message.Message):
    __slots__ = ("place", "acknowledgement", "is_stored", "attempts", "is_rejected")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGEMENT_FIELD_NUMBER: _ClassVar[int]
    IS_STORED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    IS_REJECTED_FIELD_NUMBER: _ClassVar[int]
    place: int
    acknowledgement: int
    is_stored: bool
    attempts: int
    is_rejected: bool
    def __init__(self, place: _Optional[int] = ..., acknowledgement: _Optional[int] = ..., is_stored: _Optional[bool] = ..., attempts: _Optional[int] = ..., is_rejected: _Optional[bool] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("place", "frame", "retrieval_hint")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_HINT_FIELD_NUMBER: _ClassVar[int]
    place: int
    frame: bytes
    retrieval_hint: bytes
    def __init__(self, place: _Optional[int] = ..., frame: _Optional[bytes] = ..., retrieval_hint: _Optional[bytes] = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("retrieval_hint",)
    RETRIEVAL_HINT_FIELD_NUMBER: _ClassVar[int]
    retrieval_hint: bytes
    def __init__(self, retrieval_hint: _Optional[bytes] = ...) -> None: ...

class Forgone(_message.Message):
    __slots__ = ("place", "retrieval_hint", "sender_id")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_HINT_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    place: int
    retrieval_hint: bytes
    sender_id: str
    def __init__(self, place: _Optional[int] = ..., retrieval_hint: _Optional[bytes] = ..., sender_id: _Optional[str] = ...) -> None: ...
