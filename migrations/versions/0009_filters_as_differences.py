"""Filters are stored as differences from filters; SQLite's incremental vacuum is on.

Frames with a filter are encoded again, some hundred in each transaction, into a table beside `frames`; the
last transaction moves them over. So a reader of the old schema reads on until then, and a migration that
was killed goes on where it was. SQLite builds the file anew at the end (VACUUM): only that makes it able
to give pages back later, and it gives back what the former references took.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from alembic import op
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Integer,
    LargeBinary,
    SmallInteger,
    bindparam,
    inspect,
    text,
)
from sqlalchemy.exc import DBAPIError

from app.store.entryrows import FramePacker, StoredFrame, reference_filter
from app.store.formerframes import REFERENCE, CopyRow, FormerFrame, FormerFrames
from sdstore.sds.framecodec import FILTER_BYTES_MIN, REFERENCES_MAX, References, difference, split

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

FRAMES_PER_STEP = 500
CHANNELS_REMEMBERED_MAX = 50
"""Channels whose references stay in memory; those of another one are read from the database."""

_PLACE = "reencoded_seq"  # in `store_meta`: the last frame that was looked at
_VACUUM_INCREMENTAL = 2

WRITER_LOCK = 0x5D5_0001
"""PostgreSQL's advisory lock of writers."""

_log = logging.getLogger(__name__)

Number = BigInteger().with_variant(Integer(), "sqlite")


def upgrade() -> None:
    """Encode the frames again, then remove the former references and a table that nothing reads."""
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        # Of this session, because the transactions are several: other nodes wait with their writing.
        connection.exec_driver_sql(f"SELECT pg_advisory_lock({WRITER_LOCK})")
    if inspect(connection).has_table("frame_references"):
        _make_tables(connection)
        encoder = _Encoder(connection)
        while encoder.step():
            _commit(connection)
        _move_over(connection)
    if connection.dialect.name == "sqlite":
        _turn_incremental_vacuum_on(connection)
    else:
        connection.exec_driver_sql(f"SELECT pg_advisory_unlock({WRITER_LOCK})")


def _make_tables(connection: Connection) -> None:
    if inspect(connection).has_table("filter_references"):
        return
    op.create_table(
        "filter_references",
        Column("reference_no", Number, primary_key=True, autoincrement=False),
        Column("channel_no", Integer, nullable=False),
        Column("last_seq", Number, nullable=False),
        Column("data", LargeBinary, nullable=False),
    )
    # SQLite's indexes end in the key by themselves.
    ending = [] if connection.dialect.name == "sqlite" else ["reference_no"]
    op.create_index("filter_references_by_channel", "filter_references", ["channel_no", *ending])
    op.create_table(
        "frames_reencoded",
        Column("seq", Number, primary_key=True, autoincrement=False),
        Column("codec", SmallInteger, nullable=False),
        Column("reference_no", Number),
        Column("data", LargeBinary, nullable=False),
    )


def _move_over(connection: Connection) -> None:
    for statement in (
        "DELETE FROM frames WHERE seq IN (SELECT seq FROM frames_reencoded)",
        "INSERT INTO frames SELECT seq, codec, reference_no, data FROM frames_reencoded",
        f"DELETE FROM store_meta WHERE name = '{_PLACE}'",  # noqa: S608 - a constant
    ):
        connection.execute(text(statement))
    for table in ("frames_reencoded", "frame_references", "refused_digests"):
        op.drop_table(table)


def _turn_incremental_vacuum_on(connection: Connection) -> None:
    if connection.exec_driver_sql("PRAGMA auto_vacuum").scalar() == _VACUUM_INCREMENTAL:
        return  # a new file
    connection.exec_driver_sql("COMMIT")
    try:
        connection.exec_driver_sql(f"PRAGMA auto_vacuum = {_VACUUM_INCREMENTAL}")
        connection.exec_driver_sql("VACUUM")
    except DBAPIError as error:
        _log.warning(
            "the database file was not built anew (%s); it works, but cannot become smaller: "
            "run `sdstore reindex` when there is room for a second copy",
            error.orig,
        )
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _commit(connection: Connection) -> None:
    connection.exec_driver_sql("COMMIT")
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    # psycopg begins with the next statement.


class _Encoder:
    """Encodes frames again, in the order of their arrival."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._former = FormerFrames(self._copies)
        self._packer = FramePacker()
        self._channels: dict[int, References] = {}

    def step(self) -> bool:
        """Encode some frames; False at the end."""
        query = text(
            "SELECT m.seq, m.frame_bytes, m.frame_hash, f.codec, f.reference_no, f.data,"
            " m.channel_no FROM messages m JOIN frames f ON f.seq = m.seq"
            " WHERE m.seq > :after AND m.frame_bytes >= :least ORDER BY m.seq LIMIT :most"
        )
        asked = {"after": self._place(), "least": FILTER_BYTES_MIN, "most": FRAMES_PER_STEP}
        rows = self._connection.execute(query, asked).all()
        if not rows:
            return False
        stored = {row[0]: FormerFrame(*row[:6]) for row in rows}
        whole = self._former.read(list(stored.values()))
        encoded: list[dict[str, Any]] = []
        references: list[dict[str, Any]] = []
        used: dict[int, int] = {}
        for seq, *_, channel_no in rows:
            if seq not in whole:
                continue  # the content is lost, and will be found so
            columns = self._encoded(seq, channel_no, whole[seq], references, used)
            if columns is not None or stored[seq].codec == REFERENCE:
                codec, reference_no, data = columns or self._packer.pack_whole([whole[seq]])[0]
                encoded.append(
                    {"seq": seq, "codec": int(codec), "reference_no": reference_no, "data": data}
                )
        self._insert("frames_reencoded", encoded)
        self._insert("filter_references", references)
        if used:
            self._connection.execute(
                text("UPDATE filter_references SET last_seq = :last WHERE reference_no = :number"),
                [{"number": number, "last": last} for number, last in used.items()],
            )
        self._move_place(rows[-1][0])
        return True

    def _encoded(
        self,
        seq: int,
        channel_no: int,
        frame: bytes,
        made: list[dict[str, Any]],
        used: dict[int, int],
    ) -> StoredFrame | None:
        """The columns of a frame with a filter; None for another."""
        parts = split(frame)
        if parts is None:
            return None
        references = self._references_of(channel_no)
        found = references.difference(parts)
        if found is None:
            references.add(seq, parts.bloom_filter)
            data = self._packer.pack_reference(parts.bloom_filter)
            made.append(
                {"reference_no": seq, "channel_no": channel_no, "last_seq": seq, "data": data}
            )
            found = seq, difference(parts, parts.bloom_filter)
        number, written = found
        used[number] = seq
        return self._packer.pack_difference(parts, number, written)

    def _references_of(self, channel_no: int) -> References:
        if (known := self._channels.get(channel_no)) is not None:
            return known
        if len(self._channels) >= CHANNELS_REMEMBERED_MAX:
            del self._channels[next(iter(self._channels))]
        references = self._channels[channel_no] = References()
        query = text(
            "SELECT reference_no, data FROM filter_references WHERE channel_no = :channel_no"
            " ORDER BY reference_no DESC LIMIT :most"
        )
        asked = {"channel_no": channel_no, "most": REFERENCES_MAX}
        for number, data in reversed(self._connection.execute(query, asked).all()):
            if (bloom_filter := reference_filter(bytes(data))) is not None:
                references.add(number, bloom_filter, is_new=False)
        return references

    def _copies(self, table: str, seqs: Sequence[int]) -> Iterable[CopyRow]:
        query = text(
            f"SELECT seq, codec, reference_no, data FROM {table} WHERE seq IN :seqs"  # noqa: S608
        ).bindparams(bindparam("seqs", expanding=True))
        rows = self._connection.execute(query, {"seqs": list(seqs)})
        return [(seq, codec, reference_no, bytes(data)) for seq, codec, reference_no, data in rows]

    def _insert(self, table: str, rows: Sequence[dict[str, Any]]) -> None:
        if rows:
            names = list(rows[0])
            marks = ", ".join(f":{name}" for name in names)
            statement = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})"  # noqa: S608
            self._connection.execute(text(statement), list(rows))

    def _place(self) -> int:
        query = text("SELECT value FROM store_meta WHERE name = :name")
        found = self._connection.execute(query, {"name": _PLACE}).scalar()
        return 0 if found is None else int.from_bytes(bytes(found), "big")

    def _move_place(self, seq: int) -> None:
        self._connection.execute(
            text("DELETE FROM store_meta WHERE name = :name"), {"name": _PLACE}
        )
        self._connection.execute(
            text("INSERT INTO store_meta (name, value) VALUES (:name, :value)"),
            {"name": _PLACE, "value": seq.to_bytes(8, "big")},
        )
