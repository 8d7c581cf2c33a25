"""The claims of a channel in the order of their arrival: a session over the news reads the last ones."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the index."""
    # SQLite's indexes end in the key by themselves.
    ending = [] if op.get_bind().dialect.name == "sqlite" else ["claim_no"]
    op.create_index(
        "published_claims_in_arrival_order", "published_claims", ["channel_no", *ending]
    )
