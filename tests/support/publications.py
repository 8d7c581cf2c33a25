"""Frames as they come: few names, so that variants, repeats and collisions happen by themselves."""

from __future__ import annotations

import hashlib

from hypothesis import strategies as st

from app.ingest.prepare import Publication, WakuEnvelope
from sdstore.sds.codec import encode
from sdstore.sds.model import LAMPORT_MAX, LAMPORT_MIN, Dialect, HistoryEntry, Message

CHANNELS = ["", "0", "/app/1/chat/proto", "é", "zz"]
CONTENTS = [b"ok", b"no", b"x" * 40]
VERIFYING_IDS = [hashlib.sha256(content).hexdigest() for content in CONTENTS]
MESSAGE_IDS = ["a", "b", "Z", "é", "\U0001f600", "\uffff", *VERIFYING_IDS]
HINTS = [b"", b"h", b"hint", bytes(32)]
LAMPORTS = [LAMPORT_MIN, -1, 0, 1, 2, 1_763_000_000_123, LAMPORT_MAX]

history_entries = st.builds(
    HistoryEntry, st.sampled_from([*MESSAGE_IDS, "never"]), st.sampled_from(HINTS)
)

messages = st.builds(
    Message,
    message_id=st.sampled_from(MESSAGE_IDS),
    channel_id=st.sampled_from(CHANNELS),
    sender_id=st.sampled_from(["", "alice"]),
    lamport_timestamp=st.sampled_from(LAMPORTS),
    causal_history=st.lists(history_entries, max_size=3).map(tuple),
    bloom_filter=st.sampled_from([b"", b"filter"]),
    content=st.sampled_from([b"", *CONTENTS, *CONTENTS]),
)
ephemeral = st.builds(
    Message, st.sampled_from(MESSAGE_IDS), st.sampled_from(CHANNELS), content=st.just(b"gone")
)
frames = st.one_of(
    st.builds(encode, messages, st.sampled_from([Dialect.V2, Dialect.NIM])),
    st.builds(encode, messages, st.sampled_from([Dialect.V2, Dialect.NIM])),
    st.builds(encode, messages, st.sampled_from([Dialect.V2, Dialect.NIM])),
    st.builds(encode, ephemeral),
    st.binary(max_size=12),
)
envelopes = st.none() | st.builds(
    WakuEnvelope, st.just("/waku/2"), st.just("/app"), st.just(b""), st.integers(1, 2)
)
publications = st.builds(
    Publication,
    frames,
    st.lists(st.sampled_from(HINTS[1:]), max_size=3, unique=True).map(tuple),
    envelopes,
)
groups = st.lists(st.lists(publications, max_size=8), max_size=6)


def content_frame(
    number: int,
    *,
    channel_id: str = "channel",
    message_id: str | None = None,
    lamport: int | None = None,
    history: tuple[HistoryEntry, ...] = (),
    content: bytes | None = None,
) -> bytes:
    """A content message that `number` alone makes different from every other."""
    return encode(
        Message(
            f"message-{number:06}" if message_id is None else message_id,
            channel_id,
            lamport_timestamp=number if lamport is None else lamport,
            causal_history=history,
            content=b"content %d" % number if content is None else content,
        )
    )
