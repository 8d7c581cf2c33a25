"""Hypothesis strategies for SDS messages."""

from hypothesis import strategies as st

from sdstore.sds.model import LAMPORT_MAX, LAMPORT_MIN, Dialect, HistoryEntry, Message

# Any text UTF-8 can carry but U+0000, which no message may hold.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
ids = st.one_of(texts.filter(bool), st.binary(min_size=32, max_size=32).map(bytes.hex))
lamports = st.one_of(
    st.integers(LAMPORT_MIN, LAMPORT_MAX),
    st.sampled_from([LAMPORT_MIN, -1, 0, 1, 2**31 - 1, 2**31, LAMPORT_MAX]),
)
entries = st.builds(HistoryEntry, ids, st.binary(max_size=300), texts)


# Version 1 has IDs alone; one that begins with these could be taken for a serialized entry.
plain_entries = ids.filter(lambda i: i[0] not in "\x0a\x12\x1a").map(HistoryEntry)


@st.composite
def messages(draw: st.DrawFn, dialect: Dialect = Dialect.V2) -> Message:
    """Any valid message that `dialect` can express; version 2 can express every one."""
    content = draw(st.binary(max_size=60))
    lamport = draw(lamports if dialect is not Dialect.CHAT_PROTO else lamports.filter(bool))
    is_ephemeral = content and dialect is not Dialect.NIM and draw(st.booleans())
    history = plain_entries if dialect is Dialect.V1 else entries
    repairs_max = 3 if dialect in {Dialect.V2, Dialect.NIM} else 0
    return Message(
        message_id=draw(ids),
        channel_id=draw(texts),
        sender_id="" if dialect is Dialect.V1 else draw(texts),
        lamport_timestamp=None if is_ephemeral else lamport,
        causal_history=draw(st.lists(history, max_size=6).map(tuple)),
        bloom_filter=draw(st.binary(max_size=80)),
        repair_request=draw(st.lists(entries, max_size=repairs_max).map(tuple)),
        content=content,
    )
