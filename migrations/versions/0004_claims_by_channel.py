"""Claims by hint and channel; gaps that were dropped because a sync message had their ID.

Earlier versions deleted a missing reference, or did not write it, if a sync message had its ID. Only
histories still name those IDs, so the migration reads the frames of these channels again. It skips
unreadable frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alembic import op
from sqlalchemy import Column, Connection, Integer, bindparam, text

from app.store.entryrows import Keys
from app.store.formerframes import CopyRow, FormerFrame, FormerFrames
from sdstore.sds.codec import MessageError, decode

revision = "0004"
down_revision = "0002"
branch_labels = None
depends_on = None

FRAMES_PER_BATCH = 500
NAMES_REMEMBERED_MAX = 65_536
"""References remembered for one channel, because histories repeat."""

NAMES_PER_QUERY = 500


def upgrade() -> None:
    """Add the column and the indexes, then the missing references."""
    connection = op.get_bind()
    op.add_column(
        "published_claims",
        Column("channel_no", Integer, nullable=False, server_default=text("0")),
    )
    connection.execute(
        text(
            "UPDATE published_claims SET channel_no = coalesce((SELECT m.channel_no"
            " FROM messages m WHERE m.seq = published_claims.seq), 0)"
        )
    )
    op.create_index(
        "published_claims_by_hint_and_channel",
        "published_claims",
        ["hint_key", "channel_no", "source", "seq"],
    )
    is_sqlite = connection.dialect.name == "sqlite"
    op.drop_index("history_claims_by_hint", "history_claims")
    # SQLite's indexes end in the key by themselves.
    ending = [] if is_sqlite else ["claim_no"]
    op.create_index("history_claims_by_hint", "history_claims", ["hint_key", "channel_no", *ending])
    found = connection.execute(text("SELECT value FROM store_meta WHERE name = 'key_secret'"))
    keys = Keys(bytes(found.scalar_one()))
    for channel_no in _channels_with_met_ids(connection):
        _add_missing_references(connection, keys, channel_no)


def _channels_with_met_ids(connection: Connection) -> list[int]:
    """The channels of known sync messages; all channels if the oldest of these were forgotten."""
    oldest = connection.execute(text("SELECT min(met_no) FROM met_ids")).scalar_one()
    if oldest is None:
        return []
    which = "" if oldest > 1 else " WHERE channel_id IN (SELECT channel_id FROM met_ids)"
    rows = connection.execute(text(f"SELECT channel_no FROM channels{which}"))  # noqa: S608
    return [number for (number,) in rows]


def _add_missing_references(connection: Connection, keys: Keys, channel_no: int) -> None:
    insert = text(
        "INSERT INTO missing_references (channel_no, message_id) VALUES (:channel_no, :message_id)"
        " ON CONFLICT DO NOTHING"
    )
    remembered: set[str] = set()
    for frames in _frames_of(connection, channel_no):
        named = set[str]()
        for frame in frames:
            try:
                message, _ = decode(frame)
            except MessageError:
                continue
            named.update(told.message_id for told in message.causal_history)
        new = sorted(named - remembered)
        if len(remembered) > NAMES_REMEMBERED_MAX:
            remembered.clear()
        remembered |= named
        missing = sorted({*new} - _here(connection, keys, channel_no, new))
        if missing:
            rows = [{"channel_no": channel_no, "message_id": each} for each in missing]
            connection.execute(insert, rows)


def _here(
    connection: Connection, keys: Keys, channel_no: int, message_ids: Sequence[str]
) -> set[str]:
    query = text(
        "SELECT message_id FROM messages WHERE id_key IN :keys AND channel_no = :channel_no"
    ).bindparams(bindparam("keys", expanding=True))
    found: set[str] = set()
    for start in range(0, len(message_ids), NAMES_PER_QUERY):
        wanted = [keys.of_text(each) for each in message_ids[start : start + NAMES_PER_QUERY]]
        rows = connection.execute(query, {"keys": wanted, "channel_no": channel_no})
        found.update(message_id for (message_id,) in rows)
    return found


def _frames_of(connection: Connection, channel_no: int) -> Iterator[list[bytes]]:
    """The frames of a channel, some at a time, in the order of their arrival."""
    query = text(
        "SELECT m.seq, m.frame_bytes, m.frame_hash, f.codec, f.reference_no, f.data"
        " FROM messages m LEFT JOIN frames f ON f.seq = m.seq"
        " WHERE m.channel_no = :channel_no AND m.seq > :after ORDER BY m.seq LIMIT :most"
    )

    def copies(table: str, seqs: Sequence[int]) -> list[CopyRow]:
        query = text(
            f"SELECT seq, codec, reference_no, data FROM {table} WHERE seq IN :seqs"  # noqa: S608
        ).bindparams(bindparam("seqs", expanding=True))
        return [tuple(row) for row in connection.execute(query, {"seqs": list(seqs)})]

    former, after = FormerFrames(copies), 0
    while True:
        asked = {"channel_no": channel_no, "after": after, "most": FRAMES_PER_BATCH}
        rows = connection.execute(query, asked).all()
        if not rows:
            return
        after = rows[-1][0]
        yield list(former.read([FormerFrame(*row) for row in rows]).values())
