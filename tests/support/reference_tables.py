"""docs/limits.md and docs/settings.md, made from the code: `python -m tests.support.reference_tables`."""

import dataclasses
from pathlib import Path

from pydantic_core import PydanticUndefined

import recon.limits
from app.server.connection import READ_BYTES
from app.server.limits import DEFAULT_LIMITS, MIB, limits_table
from app.server.settings import Settings
from sdstore.sync.memory import RETRIES_MAX, SET_ASIDE_MAX
from sdstore.sync.proof import PASSED_OVER_MAX

DOCS = Path(__file__).parents[2] / "docs"

_LIMITS_HEAD = """# Limits

Every queue, loop, cache and reply of a node has a bound. `sdstore serve --show-limits` prints this
table; a test compares it with the code. A value equal to its bound is accepted.
"""
_SHARED_HEAD = """
## What all requests share

A bound per request does not bound many requests. These bounds hold for one process, under any load
([decision 18](decisions/0018-shares-and-turns.md) explains the turns). The index and the caches come
on top.
"""
_RECON_HEAD = """
## The reconciliation engine

Per session and per message. [recon-protocol.md](recon-protocol.md), section 10, describes the effect of
each.
"""
_ASIDE_HEAD = """
## What is set aside

Messages of a peer that this node refuses, and others that one side cannot get, per peer and interest
([recon-protocol.md](recon-protocol.md), section 8.4).
"""
_ASIDE_ROWS = [
    (
        "SET_ASIDE_MAX",
        SET_ASIDE_MAX,
        "elements",
        "remembered and not fetched again: 25 MB; of others only the number is kept",
    ),
    (
        "PASSED_OVER_MAX",
        PASSED_OVER_MAX,
        "elements",
        "others, in one session: 40 MB; beyond it the session ends as partial",
    ),
    ("RETRIES_MAX", RETRIES_MAX, "elements", "tried again in one session: about one batch"),
]
_SETTINGS_HEAD = """# Settings

Defaults < a TOML file (`--config FILE`) < environment (`SDSTORE_` and the name in capitals) < flags.
An unknown name is an error in every layer. `sdstore serve --show-config` prints each value and its
source.
"""


def limits_page() -> str:
    """The page of all bounds."""
    node = _table("bound", "value", "unit", "reason", rows=limits_table())
    engine = _table(
        "bound",
        "value",
        rows=[
            (field.name, getattr(recon.limits.DEFAULT_LIMITS, field.name))
            for field in dataclasses.fields(recon.limits.Limits)
        ],
    )
    shared = _table("of", "by", "MiB at most", rows=_shared_rows())
    aside = _table("bound", "value", "unit", "reason", rows=_ASIDE_ROWS)
    tables = f"{_SHARED_HEAD}\n{shared}{_RECON_HEAD}\n{engine}{_ASIDE_HEAD}\n{aside}"
    return f"{_LIMITS_HEAD}\n{node}{tables}"


def _shared_rows() -> list[tuple[object, ...]]:
    """Memory that strangers can ask for, summed up from the bounds."""
    limits = DEFAULT_LIMITS
    beside = READ_BYTES + limits.header_bytes_max + limits.body_free_bytes
    rows = [
        (
            "connections: headers, a small body, bytes that arrived ahead",
            "connections_max × (header_bytes_max + body_free_bytes + 16 KiB)",
            limits.connections_max * beside,
        ),
        ("bodies, packed and unpacked", "bodies_bytes_max", limits.bodies_bytes_max),
        ("replies, in work or unread", "replies_bytes_max", limits.replies_bytes_max),
        (
            "events that wait for live readers",
            "live_unread_bytes_max",
            limits.live_unread_bytes_max,
        ),
        ("the buffer of live readers", "live_queue_bytes_max", limits.live_queue_bytes_max),
        (
            "frames that wait for the writer",
            "ingest_queue_bytes_max",
            limits.ingest_queue_bytes_max,
        ),
    ]
    total = ("all of these at once", "", sum(row[2] for row in rows))
    return [(what, by, count // MIB) for what, by, count in [*rows, total]]


def settings_page() -> str:
    """The page of all settings."""
    rows = []
    for name, field in Settings.model_fields.items():
        made = field.default is PydanticUndefined
        default = "sqlite:///DATA_DIR/sdstore.db" if made else str(field.default)
        rows.append((name, default, f"SDSTORE_{name.upper()}", field.description or ""))
    return f"{_SETTINGS_HEAD}\n{_table('name', 'default', 'environment', 'meaning', rows=rows)}"


def _table(*head: str, rows: list[tuple[object, ...]] | list[tuple[str, int, str, str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


if __name__ == "__main__":
    (DOCS / "limits.md").write_text(limits_page())
    (DOCS / "settings.md").write_text(settings_page())
