from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WakuEnvelope(_message.Message):
    __slots__ = ("pubsub_topic", "content_topic", "meta", "timestamp_ns")
    PUBSUB_TOPIC_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TOPIC_FIELD_NUMBER: _ClassVar[int]
    META_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_NS_FIELD_NUMBER: _ClassVar[int]
    pubsub_topic: str
    content_topic: str
    meta: bytes
    timestamp_ns: int
    def __init__(self, pubsub_topic: _Optional[str] = ..., content_topic: _Optional[str] = ..., meta: _Optional[bytes] = ..., timestamp_ns: _Optional[int] = ...) -> None: ...

class PublishItem(_message.Message):
    __slots__ = ("frame", "retrieval_hints", "waku", "via", "without_quarantine")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_HINTS_FIELD_NUMBER: _ClassVar[int]
    WAKU_FIELD_NUMBER: _ClassVar[int]
    VIA_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    retrieval_hints: _containers.RepeatedScalarFieldContainer[bytes]
    waku: WakuEnvelope
    via: bytes
    without_quarantine: bool
    def __init__(self, frame: _Optional[bytes] = ..., retrieval_hints: _Optional[_Iterable[bytes]] = ..., waku: _Optional[_Union[WakuEnvelope, _Mapping]] = ..., via: _Optional[bytes] = ..., without_quarantine: _Optional[bool] = ...) -> None: ...

class PublishBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[PublishItem]
    def __init__(self, items: _Optional[_Iterable[_Union[PublishItem, _Mapping]]] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("code", "status", "title", "detail")
    CODE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    code: str
    status: int
    title: str
    detail: str
    def __init__(self, code: _Optional[str] = ..., status: _Optional[int] = ..., title: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class PublishOutcome(_message.Message):
    __slots__ = ("outcome", "message_id", "channel_id", "digest", "problem", "hints_dropped")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    HINTS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    message_id: str
    channel_id: str
    digest: bytes
    problem: Problem
    hints_dropped: int
    def __init__(self, outcome: _Optional[str] = ..., message_id: _Optional[str] = ..., channel_id: _Optional[str] = ..., digest: _Optional[bytes] = ..., problem: _Optional[_Union[Problem, _Mapping]] = ..., hints_dropped: _Optional[int] = ...) -> None: ...

class PublishOutcomes(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[PublishOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[PublishOutcome, _Mapping]]] = ...) -> None: ...

class StoredMessage(_message.Message):
    __slots__ = ("frame", "digest", "frame_hash", "dialect", "received_at_ms", "seq", "variants", "retrieval_hints", "filter_lost", "filter_left_out")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FRAME_HASH_FIELD_NUMBER: _ClassVar[int]
    DIALECT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    VARIANTS_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_HINTS_FIELD_NUMBER: _ClassVar[int]
    FILTER_LOST_FIELD_NUMBER: _ClassVar[int]
    FILTER_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    frame: bytes
    digest: bytes
    frame_hash: bytes
    dialect: str
    received_at_ms: int
    seq: int
    variants: _containers.RepeatedScalarFieldContainer[bytes]
    retrieval_hints: _containers.RepeatedScalarFieldContainer[bytes]
    filter_lost: bool
    filter_left_out: bool
    def __init__(self, frame: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., frame_hash: _Optional[bytes] = ..., dialect: _Optional[str] = ..., received_at_ms: _Optional[int] = ..., seq: _Optional[int] = ..., variants: _Optional[_Iterable[bytes]] = ..., retrieval_hints: _Optional[_Iterable[bytes]] = ..., filter_lost: _Optional[bool] = ..., filter_left_out: _Optional[bool] = ...) -> None: ...

class MessagePage(_message.Message):
    __slots__ = ("messages", "next", "left_out")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[StoredMessage]
    next: str
    left_out: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, messages: _Optional[_Iterable[_Union[StoredMessage, _Mapping]]] = ..., next: _Optional[str] = ..., left_out: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("message_ids", "retrieval_hints", "channel_id", "presence_only")
    MESSAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_HINTS_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_ONLY_FIELD_NUMBER: _ClassVar[int]
    message_ids: _containers.RepeatedScalarFieldContainer[str]
    retrieval_hints: _containers.RepeatedScalarFieldContainer[bytes]
    channel_id: str
    presence_only: bool
    def __init__(self, message_ids: _Optional[_Iterable[str]] = ..., retrieval_hints: _Optional[_Iterable[bytes]] = ..., channel_id: _Optional[str] = ..., presence_only: _Optional[bool] = ...) -> None: ...

class LookupKey(_message.Message):
    __slots__ = ("message_id", "retrieval_hint", "state")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_HINT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    retrieval_hint: bytes
    state: str
    def __init__(self, message_id: _Optional[str] = ..., retrieval_hint: _Optional[bytes] = ..., state: _Optional[str] = ...) -> None: ...

class LookupMatch(_message.Message):
    __slots__ = ("key", "digest", "message")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    key: LookupKey
    digest: bytes
    message: StoredMessage
    def __init__(self, key: _Optional[_Union[LookupKey, _Mapping]] = ..., digest: _Optional[bytes] = ..., message: _Optional[_Union[StoredMessage, _Mapping]] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("found", "missing", "not_examined", "left_out")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    NOT_EXAMINED_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    found: _containers.RepeatedCompositeFieldContainer[LookupMatch]
    missing: _containers.RepeatedCompositeFieldContainer[LookupKey]
    not_examined: _containers.RepeatedCompositeFieldContainer[LookupKey]
    left_out: _containers.RepeatedCompositeFieldContainer[LookupMatch]
    def __init__(self, found: _Optional[_Iterable[_Union[LookupMatch, _Mapping]]] = ..., missing: _Optional[_Iterable[_Union[LookupKey, _Mapping]]] = ..., not_examined: _Optional[_Iterable[_Union[LookupKey, _Mapping]]] = ..., left_out: _Optional[_Iterable[_Union[LookupMatch, _Mapping]]] = ...) -> None: ...

class EntriesRequest(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class EntryItem(_message.Message):
    __slots__ = ("entry", "missing", "lost", "retired")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    entry: StoredMessage
    missing: bytes
    lost: bytes
    retired: bytes
    def __init__(self, entry: _Optional[_Union[StoredMessage, _Mapping]] = ..., missing: _Optional[bytes] = ..., lost: _Optional[bytes] = ..., retired: _Optional[bytes] = ...) -> None: ...

class Channel(_message.Message):
    __slots__ = ("channel_id", "count", "lamport_first", "lamport_last", "root")
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LAMPORT_FIRST_FIELD_NUMBER: _ClassVar[int]
    LAMPORT_LAST_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    channel_id: str
    count: int
    lamport_first: int
    lamport_last: int
    root: bytes
    def __init__(self, channel_id: _Optional[str] = ..., count: _Optional[int] = ..., lamport_first: _Optional[int] = ..., lamport_last: _Optional[int] = ..., root: _Optional[bytes] = ...) -> None: ...

class ChannelPage(_message.Message):
    __slots__ = ("channels", "next")
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    channels: _containers.RepeatedCompositeFieldContainer[Channel]
    next: str
    def __init__(self, channels: _Optional[_Iterable[_Union[Channel, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("message_id", "retrieval_hints", "met_as_sync", "state", "named_by")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    RETRIEVAL_HINTS_FIELD_NUMBER: _ClassVar[int]
    MET_AS_SYNC_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NAMED_BY_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    retrieval_hints: _containers.RepeatedScalarFieldContainer[bytes]
    met_as_sync: bool
    state: str
    named_by: str
    def __init__(self, message_id: _Optional[str] = ..., retrieval_hints: _Optional[_Iterable[bytes]] = ..., met_as_sync: _Optional[bool] = ..., state: _Optional[str] = ..., named_by: _Optional[str] = ...) -> None: ...

class GapPage(_message.Message):
    __slots__ = ("gaps", "next")
    GAPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    gaps: _containers.RepeatedCompositeFieldContainer[Gap]
    next: str
    def __init__(self, gaps: _Optional[_Iterable[_Union[Gap, _Mapping]]] = ..., next: _Optional[str] = ...) -> None: ...

class AncestorsRequest(_message.Message):
    __slots__ = ("channel_id", "heads", "known", "limit", "after")
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    channel_id: str
    heads: _containers.RepeatedScalarFieldContainer[str]
    known: _containers.RepeatedScalarFieldContainer[str]
    limit: int
    after: str
    def __init__(self, channel_id: _Optional[str] = ..., heads: _Optional[_Iterable[str]] = ..., known: _Optional[_Iterable[str]] = ..., limit: _Optional[int] = ..., after: _Optional[str] = ...) -> None: ...

class AncestorsPage(_message.Message):
    __slots__ = ("messages", "missing", "next", "left_out", "met_as_sync", "withheld", "refused")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    MET_AS_SYNC_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[StoredMessage]
    missing: _containers.RepeatedScalarFieldContainer[str]
    next: str
    left_out: _containers.RepeatedScalarFieldContainer[bytes]
    met_as_sync: _containers.RepeatedScalarFieldContainer[str]
    withheld: _containers.RepeatedScalarFieldContainer[str]
    refused: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, messages: _Optional[_Iterable[_Union[StoredMessage, _Mapping]]] = ..., missing: _Optional[_Iterable[str]] = ..., next: _Optional[str] = ..., left_out: _Optional[_Iterable[bytes]] = ..., met_as_sync: _Optional[_Iterable[str]] = ..., withheld: _Optional[_Iterable[str]] = ..., refused: _Optional[_Iterable[str]] = ...) -> None: ...

class OrderItem(_message.Message):
    __slots__ = ("message_id", "sender_id", "digest", "confirmed", "message")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    sender_id: str
    digest: bytes
    confirmed: bool
    message: StoredMessage
    def __init__(self, message_id: _Optional[str] = ..., sender_id: _Optional[str] = ..., digest: _Optional[bytes] = ..., confirmed: _Optional[bool] = ..., message: _Optional[_Union[StoredMessage, _Mapping]] = ...) -> None: ...

class OrderBreach(_message.Message):
    __slots__ = ("kind", "sender_id", "message_id", "detail", "other_message_id")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    OTHER_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    kind: str
    sender_id: str
    message_id: str
    detail: str
    other_message_id: str
    def __init__(self, kind: _Optional[str] = ..., sender_id: _Optional[str] = ..., message_id: _Optional[str] = ..., detail: _Optional[str] = ..., other_message_id: _Optional[str] = ...) -> None: ...

class OrderIndexer(_message.Message):
    __slots__ = ("sender_id", "message_count", "last_message_id", "unseen_count")
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    UNSEEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    sender_id: str
    message_count: int
    last_message_id: str
    unseen_count: int
    def __init__(self, sender_id: _Optional[str] = ..., message_count: _Optional[int] = ..., last_message_id: _Optional[str] = ..., unseen_count: _Optional[int] = ...) -> None: ...

class OrderWaitsFor(_message.Message):
    __slots__ = ("message_id", "count", "sender_ids")
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SENDER_IDS_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    count: int
    sender_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, message_id: _Optional[str] = ..., count: _Optional[int] = ..., sender_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class OrderPage(_message.Message):
    __slots__ = ("items", "confirmed_count", "tail_count", "waiting_count", "missing", "breaches", "senderless_count", "complete", "next", "next_confirmed", "left_out", "indexers", "waits_for")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_COUNT_FIELD_NUMBER: _ClassVar[int]
    TAIL_COUNT_FIELD_NUMBER: _ClassVar[int]
    WAITING_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    BREACHES_FIELD_NUMBER: _ClassVar[int]
    SENDERLESS_COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    NEXT_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    INDEXERS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[OrderItem]
    confirmed_count: int
    tail_count: int
    waiting_count: int
    missing: _containers.RepeatedScalarFieldContainer[str]
    breaches: _containers.RepeatedCompositeFieldContainer[OrderBreach]
    senderless_count: int
    complete: bool
    next: str
    next_confirmed: str
    left_out: _containers.RepeatedScalarFieldContainer[bytes]
    indexers: _containers.RepeatedCompositeFieldContainer[OrderIndexer]
    waits_for: OrderWaitsFor
    def __init__(self, items: _Optional[_Iterable[_Union[OrderItem, _Mapping]]] = ..., confirmed_count: _Optional[int] = ..., tail_count: _Optional[int] = ..., waiting_count: _Optional[int] = ..., missing: _Optional[_Iterable[str]] = ..., breaches: _Optional[_Iterable[_Union[OrderBreach, _Mapping]]] = ..., senderless_count: _Optional[int] = ..., complete: _Optional[bool] = ..., next: _Optional[str] = ..., next_confirmed: _Optional[str] = ..., left_out: _Optional[_Iterable[bytes]] = ..., indexers: _Optional[_Iterable[_Union[OrderIndexer, _Mapping]]] = ..., waits_for: _Optional[_Union[OrderWaitsFor, _Mapping]] = ...) -> None: ...
