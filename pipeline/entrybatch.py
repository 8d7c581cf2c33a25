"""Rows of the table of entries, made from database columns and frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from pipeline.columns import ENTRIES
from pipeline.framecolumns import told
from sdstore.sds.model import Dialect

_DIALECT_LABELS = {int(dialect): dialect.label for dialect in Dialect}


def entries_batch(
    stored: Sequence[Sequence[Any]], frames: Sequence[bytes | None]
) -> pa.RecordBatch:
    """The columns of `ENTRIES`; MessageError for a frame that is not a message.

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
