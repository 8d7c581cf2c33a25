"""The tables of a snapshot: their columns with descriptions, and rows of entries.

The Parquet files, the Spark data source and the README inside a snapshot all use these declarations.

Rows of entries are made from columns of the database and frames: sender, content and causal history are in the
frames only. Most frames are plain: version 2, each field once, strict entries. For those, numpy finds the
fields of many frames at once, with a step for each field rather than for each frame. Every other frame is
decoded. The store has decoded these frames before, as their hashes prove, so they are well-formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

import sdstore.wire
from app.roots import DIGEST_BYTES
from pipeline.manifest import PROTO_FILES, README_FILE, FileRecord, write_file
from sdstore.sds.codec import decode
from sdstore.sds.model import Dialect, HistoryEntry, Message

HISTORY_TYPE = pa.struct(
    [
        pa.field("message_id", pa.string(), nullable=False),
        pa.field("retrieval_hint", pa.binary(), nullable=False),
        pa.field("sender_id", pa.string(), nullable=False),
    ]
)
LIST_OF_HISTORY = pa.list_(pa.field("element", HISTORY_TYPE, nullable=False))


def _column(name: str, type_: pa.DataType, description: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, type_, nullable=nullable, metadata={"description": description})


ENTRIES = pa.schema(
    [
        _column("seq", pa.int64(), "place in the arrival order of the exporting store"),
        _column(
            "received_at", pa.timestamp("us", "UTC"), "arrival, by the exporting store's clock"
        ),
        _column("channel_id", pa.string(), "channel, any string"),
        _column("message_id", pa.string(), "the author's name for the message, any string"),
        _column(
            "sender_id", pa.string(), "who says to have sent it; empty where the frame is silent"
        ),
        _column(
            "lamport_timestamp", pa.int64(), "the author's logical clock; unit differs by author"
        ),
        _column("dialect", pa.string(), "how the frame is written: v1, v2, chat_proto or nim"),
        _column(
            "digest",
            pa.binary(),
            "32 bytes, identity of the entry: BLAKE3 of what the author wrote",
        ),
        _column("frame_hash", pa.binary(), "32 bytes, BLAKE3 of the frame"),
        _column("content_bytes", pa.int64(), "length of the content inside the frame"),
        _column(
            "content",
            pa.binary(),
            "what the author wrote, as the application wrote it; null where the store has no frame",
            nullable=True,
        ),
        _column("frame_bytes", pa.int64(), "length of the frame, also of a lost one; 0 if retired"),
        _column("causal_history", LIST_OF_HISTORY, "messages the author had just delivered"),
        _column(
            "frame",
            pa.binary(),
            "the message as received, byte for byte (proto/); null where the store has none: retired, or lost",
            nullable=True,
        ),
    ]
)

ENTRIES_1 = pa.schema([field for field in ENTRIES if field.name != "content"])
"""The columns of snapshots of schema version 1: the content is only in the frame."""

ENTRY_KEYS = pa.schema(
    [
        ENTRIES.field(name)
        for name in (
            "seq",
            "received_at",
            "channel_id",
            "message_id",
            "lamport_timestamp",
            "digest",
            "frame_hash",
        )
    ]
)
"""The columns that the database has without the frame."""

CLAIMS = pa.schema(
    [
        _column("claim_no", pa.int64(), "place in the exporting store's order of claims"),
        _column("channel_id", pa.string(), "channel of the entry"),
        _column("digest", pa.binary(), "32 bytes, the entry that the hint leads to"),
        _column("hint", pa.binary(), "the retrieval hint"),
        _column(
            "claim_id", pa.binary(), "32 bytes, BLAKE3 of digest and hint: the claim as an element"
        ),
    ]
)

CHANNELS = pa.schema(
    [
        _column("channel_id", pa.string(), "channel, any string"),
        _column("count", pa.int64(), "entries of the channel in this snapshot"),
        _column("root", pa.binary(), "32 bytes, BLAKE3 over the channel's sorted digests"),
        _column("lamport_first", pa.int64(), "smallest Lamport timestamp"),
        _column("lamport_last", pa.int64(), "largest Lamport timestamp"),
    ]
)


def history_array(messages: Sequence[Message | None]) -> pa.ListArray:
    """The column `causal_history` of `messages`."""
    offsets = [0]
    flat: list[HistoryEntry] = []
    for message in messages:
        flat.extend(message.causal_history if message else ())
        offsets.append(len(flat))
    elements = pa.StructArray.from_arrays(
        [
            pa.array([entry.message_id for entry in flat], pa.string()),
            pa.array([entry.retrieval_hint for entry in flat], pa.binary()),
            pa.array([entry.sender_id for entry in flat], pa.string()),
        ],
        fields=list(HISTORY_TYPE),
    )
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), elements, type=LIST_OF_HISTORY)


def digest_array(column: pa.Array | pa.ChunkedArray) -> NDArray[np.uint8]:
    """A binary column of 32-byte values as an (n, 32) array; ValueError for other lengths."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if len(column) == 0:
        return np.empty((0, DIGEST_BYTES), np.uint8)
    lengths = pc.unique(pc.binary_length(column)).to_pylist()
    if lengths != [DIGEST_BYTES]:
        raise ValueError(f"digests have 32 bytes, not {lengths[:5]}")
    _, offsets, values = column.cast(pa.binary()).buffers()
    start = int(np.frombuffer(offsets, np.int32)[column.offset])
    stop = start + len(column) * DIGEST_BYTES
    return np.frombuffer(values, np.uint8)[start:stop].reshape(-1, DIGEST_BYTES)


# ---- the documents of a snapshot, which make it readable without this software

_README = """# A snapshot of SDS messages

Everything in this folder can be read with any Parquet reader. `manifest.json` lists every file with
its length and its BLAKE3, and proves the rows by their roots.

- `entries/day=YYYY-MM-DD/FIRST-LAST.parquet`: the messages that arrived on that UTC day, in ranges of
  the exporting store's arrival order. Inside a file rows are sorted by channel, Lamport timestamp,
  message ID (as UTF-8 bytes) and digest, so the row groups of one channel are adjacent.
- `claims/FIRST-LAST.parquet`: claims that a retrieval hint leads to an entry. Hints in the causal
  history of a message are not repeated here.
- `channels.parquet`: one row per channel.
- `proto/`: the schemas of the frames. `sds.proto` is the latest dialect; `sds_raw.proto` has the
  numbering of the others. The column `dialect` says which one a frame is written in.
- `manifest.json`: `entry_ranges` and `claim_ranges` name the files, with (count, root) of each.

## Proofs

A root is BLAKE3 over the sorted 32-byte elements of a set, concatenated without separators: the
digests of entries, the claim IDs of claims. The same set has the same root wherever it is computed; a
store returns the root of a channel at `GET /v1/channels/CHANNEL`.
`manifest_digest`, the last member of the manifest, is BLAKE3 of the file's bytes before the
comma in front of it.

A row's `digest` is BLAKE3 in derive-key mode (context "sdstore entry digest v1") of what the author
wrote: message ID, channel ID and sender ID, each as UTF-8 after its length; the byte 1 and the Lamport
timestamp as a signed 64-bit integer; the number of history entries and for each its message ID,
retrieval hint and sender ID; the content. Lengths and numbers are 32 bits; all integers are
big-endian. `claim_id` is BLAKE3 in derive-key mode (context "sdstore hint claim v1") of digest and
hint. `frame_hash` is BLAKE3 of the frame.
"""


def write_documents(folder: Path) -> tuple[FileRecord, ...]:
    """Write README.md and proto/ into `folder`."""
    protos = _proto_folder()
    texts = {README_FILE: readme().encode()}
    texts |= {path: (protos / Path(path).name).read_bytes() for path in PROTO_FILES}
    return tuple(write_file(folder, path, text) for path, text in texts.items())


def readme() -> str:
    """The README of a snapshot, with the columns of every table."""
    tables = (("entries", ENTRIES), ("claims", CLAIMS), ("channels", CHANNELS))
    return _README + "".join(_described(name, schema) for name, schema in tables)


def _described(name: str, schema: pa.Schema) -> str:
    lines = [f"\n## Columns of `{name}`\n", "| column | type | meaning |", "|---|---|---|"]
    for field in schema:
        meaning = field.metadata[b"description"].decode()
        lines.append(f"| `{field.name}` | {_type_name(field.type)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _type_name(type_: pa.DataType) -> str:
    if pa.types.is_list(type_):
        members = ", ".join(f"{each.name} {each.type}" for each in type_.value_type)
        return f"list of ({members})"
    return str(type_)


def _proto_folder() -> Path:
    """`proto/` beside the checkout, or inside the installed package."""
    [package] = sdstore.wire.__path__
    installed = Path(package) / "proto"
    return installed if installed.is_dir() else Path(package).parents[1] / "proto"


# ---- rows of entries

_Offsets = NDArray[np.int64]
_Mask = NDArray[np.bool_]
_Bytes = NDArray[np.uint8]

_PADDING = bytes(32)  # reading the head of a field never leaves the buffer
_VARINT_BYTES_MAX = 10
_TAG_OR_LENGTH_BYTES_MAX = 5
_ID_TAG = 0x0A  # with it each writer begins an entry; others might be dropped for bad UTF-8
_BYTES, _VARINT = 2, 0  # wire types
_DIALECT_LABELS = {int(dialect): dialect.label for dialect in Dialect}


def entries_batch(
    stored: Sequence[Sequence[Any]], frames: Sequence[bytes | None]
) -> pa.RecordBatch:
    """Rows of the table `ENTRIES`; MessageError for a frame that is not a message.

    `stored` are columns from the database: arrival in milliseconds, channel ID, message ID, Lamport
    timestamp, dialect, digest, sequence number, bytes of the frame, frame hash. A frame is None if it
    was retired (0 bytes) or lost. The entry stays, as an element without content.
    """
    arrivals_ms, channel_ids, message_ids, lamports, dialects, digests, *rest = stored
    seqs, sizes, frame_hashes = rest
    from_frames = told(frames, dialects)
    columns = [
        pa.array(seqs, pa.int64()),
        pa.array(arrivals_ms, pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC")),
        pa.array(channel_ids, pa.string()),
        pa.array(message_ids, pa.string()),
        from_frames.sender_id,
        pa.array(lamports, pa.int64()),
        pa.array([_DIALECT_LABELS[dialect] for dialect in dialects], pa.string()),
        pa.array(digests, pa.binary()),
        pa.array(frame_hashes, pa.binary()),
        from_frames.content_bytes,
        from_frames.content,
        pa.array(
            [len(f) if f else size for f, size in zip(frames, sizes, strict=True)], pa.int64()
        ),
        from_frames.causal_history,
        pa.array(frames, pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ENTRIES)


class Told(NamedTuple):
    """Columns of `pipeline.columns.ENTRIES`; null or empty for rows without a frame."""

    sender_id: pa.Array
    content_bytes: pa.Array
    content: pa.Array
    causal_history: pa.Array


@dataclass(frozen=True, slots=True)
class _Layout:
    """The fields of a plain message by number: of bytes, at most once or repeated, and of integers."""

    once: tuple[int, ...]
    repeated: tuple[int, ...] = ()
    integer: tuple[int, ...] = ()


_SENDER, _CONTENT, _HISTORY = 1, 20, 11
_FRAME = _Layout(once=(1, 2, 3, 12, 20), repeated=(11, 13), integer=(10,))
_ENTRY = _Layout(once=(1, 2, 3))  # message ID, retrieval hint, sender


@dataclass(frozen=True, slots=True)
class _Found:
    """The positions of the fields of n messages: starts and ends of single fields, by field number, and
    (message, start, end) of each occurrence of repeated fields. An absent field has length 0."""

    is_plain: _Mask
    once: dict[int, tuple[_Offsets, _Offsets]]
    repeated: dict[int, tuple[_Offsets, _Offsets, _Offsets]]


def told(frames: Sequence[bytes | None], dialects: Sequence[int]) -> Told:
    """The columns of `frames`, whose dialects the store recorded when it decoded them."""
    is_plain, plain = _told_plainly(frames, dialects)
    if is_plain.all():
        return plain
    others = np.flatnonzero(~is_plain)
    decoded = _told_by_decoding([frames[row] for row in others.tolist()])
    order = pa.array(np.argsort(np.concatenate([np.flatnonzero(is_plain), others])))
    both = zip(plain, decoded, strict=True)
    return Told(*(pa.concat_arrays(columns).take(order) for columns in both))


def _told_by_decoding(frames: Sequence[bytes | None]) -> Told:
    messages = [None if frame is None else decode(frame)[0] for frame in frames]
    return Told(
        pa.array([each.sender_id if each else "" for each in messages], pa.string()),
        pa.array([len(each.content) if each else 0 for each in messages], pa.int64()),
        pa.array([each.content if each else None for each in messages], pa.binary()),
        history_array(messages),
    )


def _told_plainly(frames: Sequence[bytes | None], dialects: Sequence[int]) -> tuple[_Mask, Told]:
    """A mask of the plain frames, and their columns."""
    data = np.frombuffer(b"".join([frame or b"" for frame in frames]) + _PADDING, np.uint8)
    lengths = np.fromiter((len(frame or b"") for frame in frames), np.int64, len(frames))
    ends = np.cumsum(lengths)
    found = _take_apart(data, ends - lengths, ends, _FRAME)
    is_plain = found.is_plain & ((np.asarray(dialects) == Dialect.V2) | (lengths == 0))
    rows, entry_starts, entry_ends = found.repeated[_HISTORY]
    entries = _take_apart(data, entry_starts, entry_ends, _ENTRY)
    ids = entries.once[1]
    is_entry = entries.is_plain & (ids[0] < ids[1]) & (data[entry_starts] == _ID_TAG)
    is_plain[rows[~is_entry]] = False

    kept = is_plain[rows]
    elements = pa.StructArray.from_arrays(
        [
            _slices(data, entries.once[number], kept, field.type)
            for number, field in zip(_ENTRY.once, HISTORY_TYPE, strict=True)
        ],
        fields=list(HISTORY_TYPE),
    )
    counts = np.bincount(rows[kept], minlength=len(frames))[is_plain]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    content_starts, content_ends = found.once[_CONTENT]
    content = _slices(data, found.once[_CONTENT], is_plain, pa.binary())
    has_frame = np.fromiter((frame is not None for frame in frames), bool, len(frames))[is_plain]
    if not has_frame.all():
        content = pc.if_else(pa.array(has_frame), content, None)
    return is_plain, Told(
        _slices(data, found.once[_SENDER], is_plain, pa.string()),
        pa.array((content_ends - content_starts)[is_plain]),
        content,
        pa.ListArray.from_arrays(pa.array(offsets), elements, type=LIST_OF_HISTORY),
    )


def _take_apart(data: _Bytes, starts: _Offsets, ends: _Offsets, layout: _Layout) -> _Found:
    """The fields of the messages from `starts` to `ends`. Each round takes every message's next field.

    A message is plain if all its fields are in the layout.
    """
    is_plain = np.ones(len(starts), bool)
    seen = np.zeros(len(starts), np.int64)  # a bit for each field
    once = {number: (starts.copy(), starts.copy()) for number in layout.once}
    repeated: dict[int, list[tuple[_Offsets, ...]]] = {number: [] for number in layout.repeated}
    rows = np.flatnonzero(starts < ends)
    at = starts[rows]
    while len(rows):
        tags, tag_ends, are_tags = _varints(data, at)
        numbers, wires = tags >> 3, tags & 7
        values, heads, are_values = _varints(data, tag_ends)
        is_bytes = (wires == _BYTES) & np.isin(numbers, (*layout.once, *layout.repeated))
        is_integer = (wires == _VARINT) & np.isin(numbers, layout.integer)
        stops = np.where(is_bytes, heads + values, heads)
        bits = np.where(np.isin(numbers, layout.repeated), 0, 1 << np.minimum(numbers, 62))
        is_good = (
            (is_bytes | is_integer)
            & are_tags
            & (tag_ends - at <= _TAG_OR_LENGTH_BYTES_MAX)
            & are_values
            & (is_integer | (heads - tag_ends <= _TAG_OR_LENGTH_BYTES_MAX))
            & (heads <= stops)
            & (stops <= ends[rows])
            & (seen[rows] & bits == 0)
        )
        is_plain[rows[~is_good]] = False
        rows, numbers, heads, stops, bits = (
            each[is_good] for each in (rows, numbers, heads, stops, bits)
        )
        seen[rows] |= bits
        for number, (firsts, lasts) in once.items():
            its = numbers == number
            firsts[rows[its]], lasts[rows[its]] = heads[its], stops[its]
        for number, found in repeated.items():
            its = numbers == number
            found.append((rows[its], heads[its], stops[its]))
        is_left = stops < ends[rows]
        rows, at = rows[is_left], stops[is_left]
    return _Found(is_plain, once, {number: _in_order(each) for number, each in repeated.items()})


def _varints(data: _Bytes, at: _Offsets) -> tuple[_Offsets, _Offsets, _Mask]:
    """The integers at `at`, the end of each, and a mask of those that end; large ones can be negative."""
    values = np.zeros(len(at), np.int64)
    goes_on = np.ones(len(at), bool)
    ends = at.copy()
    for place in range(_VARINT_BYTES_MAX):
        byte = data[ends].astype(np.int64)
        values |= np.where(goes_on, (byte & 127) << 7 * place, 0)
        ends += goes_on
        goes_on &= byte >= 128
        if not goes_on.any():
            break
    return values, ends, ~goes_on


def _in_order(found: Sequence[tuple[_Offsets, ...]]) -> tuple[_Offsets, _Offsets, _Offsets]:
    empty = np.empty(0, np.int64)
    rows, starts, ends = (
        np.concatenate([empty, *each]) for each in (zip(*found, strict=True) if found else [()] * 3)
    )
    order = np.argsort(starts, kind="stable")
    return rows[order], starts[order], ends[order]


def _slices(
    data: _Bytes, bounds: tuple[_Offsets, _Offsets], wanted: _Mask, type_: pa.DataType
) -> pa.Array:
    """The wanted slices of `data` as an array; the slices are in ascending order."""
    starts, ends = (each[wanted] for each in bounds)
    # The bytes between two slices form a value, which is then dropped.
    offsets = np.zeros(2 * len(starts) + 1, np.int32)
    offsets[:-1:2], offsets[1::2], offsets[-1:] = starts, ends, ends[-1:].sum()
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    both = pa.Array.from_buffers(type_, 2 * len(starts), buffers)
    return both.take(pa.array(np.arange(0, 2 * len(starts), 2)))
