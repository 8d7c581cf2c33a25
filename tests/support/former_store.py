"""Makes a store of schema revision 0008 of one of 0009: frames are compressed against frames again."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from importlib.resources import files
from pathlib import Path

from zstandard import DICT_TYPE_RAWCONTENT, ZstdCompressionDict, ZstdCompressor

from app.store.entryrows import FrameUnpacker, PackedFrame
from app.store.formerframes import BUILT_IN, REFERENCE
from sdstore.sds.framecodec import FILTER_BYTES_MIN

FRAMES_PER_REFERENCE, REFERENCES_PER_BASE = 20, 10
ROWS_PER_READ = 500


def make_former(path: Path) -> None:
    """Change the file in place, with references of depth two and two copies of each."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "CREATE TABLE frame_references (seq INTEGER NOT NULL, channel_no INTEGER NOT NULL,"
            " codec SMALLINT NOT NULL, reference_no INTEGER, data BLOB NOT NULL, PRIMARY KEY (seq));"
            "CREATE INDEX frame_references_by_channel ON frame_references (channel_no);"
            "CREATE TABLE refused_digests (refused_no INTEGER NOT NULL, digest BLOB NOT NULL,"
            " PRIMARY KEY (refused_no));"
        )
        with connection:
            _encode(connection)
            connection.execute("DROP TABLE filter_references")
            connection.execute("DROP TABLE retired_content")
            connection.execute("UPDATE alembic_version SET version_num = '0008'")
        connection.execute("PRAGMA auto_vacuum = 0")
        connection.execute("VACUUM")


def _encode(connection: sqlite3.Connection) -> None:
    dictionary = ZstdCompressionDict(files("app.store").joinpath("frames.zdict").read_bytes())
    alone = _compressor(dictionary)
    base, reference = alone, alone
    base_no, reference_no = 0, 0
    for number, (seq, frame) in enumerate(_frames(connection)):
        if number % FRAMES_PER_REFERENCE:
            row = (REFERENCE, reference_no, reference.compress(frame))
        elif number % (FRAMES_PER_REFERENCE * REFERENCES_PER_BASE):
            row = (REFERENCE, base_no, base.compress(frame))
        else:
            row = (BUILT_IN, None, alone.compress(frame))  # type: ignore[assignment]
            base_no, base = seq, _against(frame)
        if number % FRAMES_PER_REFERENCE == 0:
            reference_no, reference = seq, _against(frame)
            connection.execute(
                "INSERT INTO frame_references VALUES (?, (SELECT channel_no FROM messages WHERE seq = ?),"
                " ?, ?, ?)",
                (seq, seq, *row),
            )
        statement = "UPDATE frames SET codec = ?, reference_no = ?, data = ? WHERE seq = ?"
        connection.execute(statement, (*row, seq))


def _frames(connection: sqlite3.Connection) -> Iterator[tuple[int, bytes]]:
    unpacker, after = FrameUnpacker(), 0
    query = (
        "SELECT m.seq, m.frame_bytes, m.frame_hash, m.digest, f.codec, f.reference_no, f.data"
        " FROM messages m JOIN frames f ON f.seq = m.seq WHERE m.seq > ? AND m.frame_bytes >= ?"
        " ORDER BY m.seq LIMIT ?"
    )
    of_number = "SELECT reference_no, data FROM filter_references WHERE reference_no = ?"
    while rows := connection.execute(query, (after, FILTER_BYTES_MIN, ROWS_PER_READ)).fetchall():
        after = rows[-1][0]
        unpacking = unpacker.unpack([PackedFrame(*row) for row in rows])
        try:
            numbers = next(unpacking)
            while True:
                found = [row for each in numbers for row in connection.execute(of_number, (each,))]
                numbers = unpacking.send(found)
        except StopIteration as end:
            yield from sorted(end.value.whole.items())


def _against(frame: bytes) -> ZstdCompressor:
    return _compressor(ZstdCompressionDict(frame, dict_type=DICT_TYPE_RAWCONTENT))


def _compressor(dictionary: ZstdCompressionDict) -> ZstdCompressor:
    return ZstdCompressor(1, dict_data=dictionary, write_content_size=True, write_dict_id=False)
