from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Payload(_message.Message):
    __slots__ = ("acks", "offers", "requests", "messages")
    ACKS_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    acks: _containers.RepeatedScalarFieldContainer[bytes]
    offers: _containers.RepeatedScalarFieldContainer[bytes]
    requests: _containers.RepeatedScalarFieldContainer[bytes]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, acks: _Optional[_Iterable[bytes]] = ..., offers: _Optional[_Iterable[bytes]] = ..., requests: _Optional[_Iterable[bytes]] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("group_id", "timestamp", "body")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    timestamp: int
    body: bytes
    def __init__(self, group_id: _Optional[bytes] = ..., timestamp: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class GoPayload(_message.Message):
    __slots__ = ("acks", "offers", "requests", "messages")
    ACKS_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    acks: _containers.RepeatedScalarFieldContainer[bytes]
    offers: _containers.RepeatedScalarFieldContainer[bytes]
    requests: _containers.RepeatedScalarFieldContainer[bytes]
    messages: _containers.RepeatedCompositeFieldContainer[GoMessage]
    def __init__(self, acks: _Optional[_Iterable[bytes]] = ..., offers: _Optional[_Iterable[bytes]] = ..., requests: _Optional[_Iterable[bytes]] = ..., messages: _Optional[_Iterable[_Union[GoMessage, _Mapping]]] = ...) -> None: ...

class GoMessage(_message.Message):
    __slots__ = ("group_id", "timestamp", "body")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    group_id: bytes
    timestamp: int
    body: bytes
    def __init__(self, group_id: _Optional[bytes] = ..., timestamp: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...
