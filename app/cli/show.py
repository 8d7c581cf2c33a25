"""Messages as people and as programs see them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from app.cli.output import human_bytes, table
from sdstore.sds.codec import decode
from sdstore.sds.digest import frame_hash
from sdstore.sds.jsonform import to_json

PREVIEW_CHARS = 400
HISTORY_SHOWN = 4


def message_document(
    frame: bytes,
    digest: bytes,
    dialect: str,
    *,
    variants_count: int | None = None,
    hints: Sequence[bytes] | None = None,
) -> dict[str, Any]:
    """`{"message": …, "meta": …}` as the node's JSON has it, as far as it is known here."""
    meta: dict[str, Any] = {
        "digest": digest.hex(),
        "frame_hash": frame_hash(frame).hex(),
        "dialect": dialect,
    }
    if variants_count is not None:
        meta["variants_count"] = variants_count
    if hints is not None:
        meta["hints"] = [each.hex() for each in hints]
    message, _ = decode(frame)
    return {"message": to_json(message), "meta": meta}


def message_table(document: dict[str, Any]) -> Table:
    """One message, a line for each thing worth knowing."""
    message, meta = document["message"], document["meta"]
    history = [entry["message_id"] for entry in message.get("causal_history", [])]
    rows = [
        ("message ID", message["message_id"]),
        ("channel", message.get("channel_id", "")),
        ("sender", message.get("sender_id", "")),
        ("Lamport", message.get("lamport_timestamp", "")),
        ("content", content_preview(message)),
        ("history", _shortened(history)),
        ("bloom filter", human_bytes(len(base64.b64decode(message.get("bloom_filter", ""))))),
        ("dialect", meta["dialect"]),
        ("digest", meta["digest"]),
        ("variants", str(meta.get("variants_count", ""))),
    ]
    grid = table("", "", rows=[row for row in rows if row[1] not in ("", "0 B")])
    grid.show_header = False
    return grid


def content_preview(message: dict[str, Any]) -> str:
    """The beginning of a message's content, as text where it is text."""
    return _preview(base64.b64decode(message.get("content", "")))


def _preview(content: bytes) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = content[: PREVIEW_CHARS // 2].hex()
        return f"{human_bytes(len(content))}: {text}"
    return text if len(text) <= PREVIEW_CHARS else f"{text[:PREVIEW_CHARS]}…"


def _shortened(ids: list[str]) -> str:
    rest = len(ids) - HISTORY_SHOWN
    return ", ".join(ids[:HISTORY_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
