"""The tables of a snapshot: their columns with descriptions, and the documents that
explain them.

The Parquet files, the Spark data source and the README inside a snapshot all use these declarations.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

import sdstore.wire
from app.roots import DIGEST_BYTES
from pipeline.folders import write_file
from pipeline.manifest import PROTO_FILES, README_FILE, FileRecord
from sdstore.sds.model import HistoryEntry, Message

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
