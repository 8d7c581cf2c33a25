from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Absence(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABSENCE_UNKNOWN: _ClassVar[Absence]
    LOST: _ClassVar[Absence]
    RETIRED: _ClassVar[Absence]

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OK: _ClassVar[Status]
    UNSUPPORTED_VERSION: _ClassVar[Status]
    NONCE_EXPIRED: _ClassVar[Status]
    UNKNOWN_INTEREST: _ClassVar[Status]
    BUSY: _ClassVar[Status]
    REFUSED: _ClassVar[Status]
    UNKNOWN_MARK: _ClassVar[Status]

class PushOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORED: _ClassVar[PushOutcome]
    DUPLICATE: _ClassVar[PushOutcome]
    PUSH_REFUSED: _ClassVar[PushOutcome]
    NOT_EXAMINED: _ClassVar[PushOutcome]
    NO_ENTRY: _ClassVar[PushOutcome]
    PUSH_RETIRED: _ClassVar[PushOutcome]
ABSENCE_UNKNOWN: Absence
LOST: Absence
RETIRED: Absence
OK: Status
UNSUPPORTED_VERSION: Status
NONCE_EXPIRED: Status
UNKNOWN_INTEREST: Status
BUSY: Status
REFUSED: Status
UNKNOWN_MARK: Status
STORED: PushOutcome
DUPLICATE: PushOutcome
PUSH_REFUSED: PushOutcome
NOT_EXAMINED: PushOutcome
NO_ENTRY: PushOutcome
PUSH_RETIRED: PushOutcome

class Interest(_message.Message):
    __slots__ = ("all", "channels", "prefixes", "lamport_from", "lamport_to")
    ALL_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    LAMPORT_FROM_FIELD_NUMBER: _ClassVar[int]
    LAMPORT_TO_FIELD_NUMBER: _ClassVar[int]
    all: bool
    channels: _containers.RepeatedScalarFieldContainer[str]
    prefixes: _containers.RepeatedScalarFieldContainer[str]
    lamport_from: int
    lamport_to: int
    def __init__(self, all: _Optional[bool] = ..., channels: _Optional[_Iterable[str]] = ..., prefixes: _Optional[_Iterable[str]] = ..., lamport_from: _Optional[int] = ..., lamport_to: _Optional[int] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("initiator_nonce", "responder_nonce", "interest_hash", "interest_bytes")
    INITIATOR_NONCE_FIELD_NUMBER: _ClassVar[int]
    RESPONDER_NONCE_FIELD_NUMBER: _ClassVar[int]
    INTEREST_HASH_FIELD_NUMBER: _ClassVar[int]
    INTEREST_BYTES_FIELD_NUMBER: _ClassVar[int]
    initiator_nonce: bytes
    responder_nonce: bytes
    interest_hash: bytes
    interest_bytes: bytes
    def __init__(self, initiator_nonce: _Optional[bytes] = ..., responder_nonce: _Optional[bytes] = ..., interest_hash: _Optional[bytes] = ..., interest_bytes: _Optional[bytes] = ...) -> None: ...

class Ranges(_message.Message):
    __slots__ = ("parts", "list_max", "runs", "bounds", "asks", "counts", "hashes", "phase")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LIST_MAX_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    parts: int
    list_max: int
    runs: bytes
    bounds: bytes
    asks: bytes
    counts: bytes
    hashes: bytes
    phase: int
    def __init__(self, parts: _Optional[int] = ..., list_max: _Optional[int] = ..., runs: _Optional[bytes] = ..., bounds: _Optional[bytes] = ..., asks: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., phase: _Optional[int] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("runs", "bounds", "counts", "short_ids")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SHORT_IDS_FIELD_NUMBER: _ClassVar[int]
    runs: bytes
    bounds: bytes
    counts: bytes
    short_ids: bytes
    def __init__(self, runs: _Optional[bytes] = ..., bounds: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., short_ids: _Optional[bytes] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("entry", "claim", "absent", "order", "id")
    class Entry(_message.Message):
        __slots__ = ("frame", "hints")
        FRAME_FIELD_NUMBER: _ClassVar[int]
        HINTS_FIELD_NUMBER: _ClassVar[int]
        frame: bytes
        hints: _containers.RepeatedScalarFieldContainer[bytes]
        def __init__(self, frame: _Optional[bytes] = ..., hints: _Optional[_Iterable[bytes]] = ...) -> None: ...
    class Claim(_message.Message):
        __slots__ = ("digest", "hint")
        DIGEST_FIELD_NUMBER: _ClassVar[int]
        HINT_FIELD_NUMBER: _ClassVar[int]
        digest: bytes
        hint: bytes
        def __init__(self, digest: _Optional[bytes] = ..., hint: _Optional[bytes] = ...) -> None: ...
    class Absent(_message.Message):
        __slots__ = ("reason", "hints")
        REASON_FIELD_NUMBER: _ClassVar[int]
        HINTS_FIELD_NUMBER: _ClassVar[int]
        reason: Absence
        hints: _containers.RepeatedScalarFieldContainer[bytes]
        def __init__(self, reason: _Optional[_Union[Absence, str]] = ..., hints: _Optional[_Iterable[bytes]] = ...) -> None: ...
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    entry: Item.Entry
    claim: Item.Claim
    absent: Item.Absent
    order: int
    id: bytes
    def __init__(self, entry: _Optional[_Union[Item.Entry, _Mapping]] = ..., claim: _Optional[_Union[Item.Claim, _Mapping]] = ..., absent: _Optional[_Union[Item.Absent, _Mapping]] = ..., order: _Optional[int] = ..., id: _Optional[bytes] = ...) -> None: ...

class ReconRequest(_message.Message):
    __slots__ = ("version", "session", "ranges", "fetch", "push", "response_bytes_max", "total", "mark", "since", "up_to", "without")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UP_TO_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_FIELD_NUMBER: _ClassVar[int]
    version: int
    session: Session
    ranges: Ranges
    fetch: Fetch
    push: _containers.RepeatedCompositeFieldContainer[Item]
    response_bytes_max: int
    total: bool
    mark: bool
    since: bytes
    up_to: bytes
    without: _containers.RepeatedCompositeFieldContainer[Retired]
    def __init__(self, version: _Optional[int] = ..., session: _Optional[_Union[Session, _Mapping]] = ..., ranges: _Optional[_Union[Ranges, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., push: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., response_bytes_max: _Optional[int] = ..., total: _Optional[bool] = ..., mark: _Optional[bool] = ..., since: _Optional[bytes] = ..., up_to: _Optional[bytes] = ..., without: _Optional[_Iterable[_Union[Retired, _Mapping]]] = ...) -> None: ...

class Retired(_message.Message):
    __slots__ = ("after", "until")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    after: bytes
    until: bytes
    def __init__(self, after: _Optional[bytes] = ..., until: _Optional[bytes] = ...) -> None: ...

class Answers(_message.Message):
    __slots__ = ("answered", "kinds", "counts", "part_counts", "bounds", "hashes", "short_ids")
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    PART_COUNTS_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    SHORT_IDS_FIELD_NUMBER: _ClassVar[int]
    answered: int
    kinds: bytes
    counts: bytes
    part_counts: bytes
    bounds: bytes
    hashes: bytes
    short_ids: bytes
    def __init__(self, answered: _Optional[int] = ..., kinds: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., part_counts: _Optional[bytes] = ..., bounds: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., short_ids: _Optional[bytes] = ...) -> None: ...

class Total(_message.Message):
    __slots__ = ("count", "sum")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    count: int
    sum: bytes
    def __init__(self, count: _Optional[int] = ..., sum: _Optional[bytes] = ...) -> None: ...

class ReconResponse(_message.Message):
    __slots__ = ("status", "version", "responder_nonce", "interest", "policy", "answers", "items", "truncated", "resume", "push_outcomes", "retry_after_s", "total", "mark", "moment")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESPONDER_NONCE_FIELD_NUMBER: _ClassVar[int]
    INTEREST_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    PUSH_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    MOMENT_FIELD_NUMBER: _ClassVar[int]
    status: Status
    version: int
    responder_nonce: bytes
    interest: bytes
    policy: int
    answers: Answers
    items: _containers.RepeatedCompositeFieldContainer[Item]
    truncated: bool
    resume: bytes
    push_outcomes: _containers.RepeatedScalarFieldContainer[PushOutcome]
    retry_after_s: int
    total: Total
    mark: bytes
    moment: bytes
    def __init__(self, status: _Optional[_Union[Status, str]] = ..., version: _Optional[int] = ..., responder_nonce: _Optional[bytes] = ..., interest: _Optional[bytes] = ..., policy: _Optional[int] = ..., answers: _Optional[_Union[Answers, _Mapping]] = ..., items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., truncated: _Optional[bool] = ..., resume: _Optional[bytes] = ..., push_outcomes: _Optional[_Iterable[_Union[PushOutcome, str]]] = ..., retry_after_s: _Optional[int] = ..., total: _Optional[_Union[Total, _Mapping]] = ..., mark: _Optional[bytes] = ..., moment: _Optional[bytes] = ...) -> None: ...
