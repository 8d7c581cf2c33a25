"""The arrival chain: a counter for each kind of row, and a running sum in every row.

Computes the sums of existing rows, in batches inside the migration's single transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

from alembic import op
from sqlalchemy import BigInteger, Column, Connection, Integer, SmallInteger, text

from app.store.arrivals import ArrivalChain

revision = "0002"
down_revision = "0003"
branch_labels = None
depends_on = None

ROWS_PER_BATCH = 8_192

_Number = BigInteger().with_variant(Integer(), "sqlite")
_CHAINS = (
    ("messages", "seq", "digest"),
    ("published_claims", "claim_no", "element_id"),
)


def upgrade() -> None:
    """Add the counters and the sums."""
    connection = op.get_bind()
    op.create_table(
        "watermark",
        Column("row_no", SmallInteger, primary_key=True, autoincrement=False),
        Column("seq", _Number, nullable=False),
        Column("claim_no", _Number, nullable=False),
    )
    found = connection.execute(text("SELECT value FROM store_meta WHERE name = 'key_secret'"))
    chain = ArrivalChain(bytes(found.scalar_one()))
    last_numbers = []
    for table, number, element in _CHAINS:
        op.add_column(
            table, Column("arrival_sum", _Number, nullable=False, server_default=text("0"))
        )
        last_numbers.append(_fill(connection, chain, table, number, element))
    connection.execute(
        text("INSERT INTO watermark (row_no, seq, claim_no) VALUES (1, :seq, :claim_no)"),
        dict(zip(("seq", "claim_no"), last_numbers, strict=True)),
    )


def _fill(
    connection: Connection, chain: ArrivalChain, table: str, number: str, element: str
) -> int:
    """Set the sums of a table; returns its highest number."""
    last_number = last_sum = 0
    batch = text(
        f"SELECT {number}, {element} FROM {table} WHERE {number} > :after ORDER BY {number} LIMIT :most"  # noqa: S608
    )
    while rows := connection.execute(batch, {"after": last_number, "most": ROWS_PER_BATCH}).all():
        numbers, elements = zip(*rows, strict=True)
        sums = chain.sums(last_sum, numbers, [_element(each) for each in elements])
        _set_sums(connection, table, number, numbers, sums)
        last_number, last_sum = numbers[-1], sums[-1]
    return last_number


def _element(stored: bytes) -> bytes:
    """32 bytes, even for a damaged row: the migration must not stop at it."""
    return bytes(stored).ljust(32, b"\0")[:32]


def _set_sums(
    connection: Connection, table: str, number: str, numbers: Sequence[int], sums: Sequence[int]
) -> None:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(
            f"UPDATE {table} SET arrival_sum = ? WHERE {number} = ?",  # noqa: S608
            list(zip(sums, numbers, strict=True)),
        )
        return
    connection.exec_driver_sql(
        f"UPDATE {table} SET arrival_sum = made.arrival_sum"  # noqa: S608
        " FROM unnest(%s::bigint[], %s::bigint[]) AS made (number, arrival_sum)"
        f" WHERE {table}.{number} = made.number",
        (list(numbers), list(sums)),
    )
