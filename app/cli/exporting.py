"""Exporting: a store's messages to a file that can be continued."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.cli.audit import channels_of
from app.cli.database import existing_store
from app.cli.existing import ExistingMessages, continued
from app.cli.exits import CliError, Exit
from app.cli.frames import FileFormat, record_of
from app.entries import Entry
from app.limits import DEFAULT_LIMITS
from app.settings import Settings
from app.store.store import Store
from sdstore.sds.codec import decode
from sdstore.sds.digest import entry_digest
from sdstore.sds.model import Message

PAGE_ENTRIES = 1_000
Tell = Callable[[int, int], None]


async def export_to(
    settings: Settings, file: Path, file_format: FileFormat, channels: frozenset[str], tell: Tell
) -> dict[str, Any]:
    """Write what the file lacks; counts of messages before and now, and bytes written.

    `damaged`: digests of messages, of any channel, whose frames cannot be read: left out. `lacking`:
    how many the file should have had before its last one, and has not.
    `tell` is called with how far the store has been read, and how far it goes.
    """
    async with existing_store(settings) as store:
        wanted_count = await _count(store, channels)
        existing = ExistingMessages(file, file_format)
        before = held = seq = 0
        last: Message | None = None
        for item in existing:
            last, _ = decode(item.frame)
            before += 1
            held += _is_wanted(last.channel_id, channels)
        if last is not None:
            seq = await _seq_of(store, last, file)
        total, _ = await store.arrivals.watermark()
        written = messages = 0
        damaged: list[str] = []
        with continued(existing) as target:
            while (
                page := await store.channels.feed(seq, PAGE_ENTRIES, _PAGE_BYTES)
            ).last_seq is not None:
                wanted = [e for e in page.entries if _is_wanted(e.channel_id, channels)]
                written += target.write(await _records(store, wanted, file_format))
                messages += len(wanted)
                damaged += [left_out.digest.hex() for left_out in page.left_out]
                seq = page.last_seq
                tell(seq, total)
        lacking = max(0, wanted_count - held - messages - len(damaged)) if before else 0
        counts = {"messages": messages, "bytes": written, "before": before, "lacking": lacking}
        return {**counts, "damaged": damaged}


_PAGE_BYTES = DEFAULT_LIMITS.reply_bytes_max


def _is_wanted(channel_id: str, channels: frozenset[str]) -> bool:
    return not channels or channel_id in channels


async def _count(store: Store, channels: frozenset[str]) -> int:
    """How many messages these channels have; all channels if none is named."""
    counts = [
        each.count async for each in channels_of(store) if _is_wanted(each.channel_id, channels)
    ]
    return sum(counts)


async def _seq_of(store: Store, message: Message, file: Path) -> int:
    """Where the store has the message that the file ends with."""
    entries = await store.entries.by_digest([entry_digest(message)])
    if not entries:
        detail = f"{file} ends with a message that this store does not have"
        raise CliError(Exit.REFUSED, "foreign_file", detail)
    return entries[0].seq


async def _records(store: Store, entries: list[Entry], file_format: FileFormat) -> bytes:
    claims = {}
    if file_format is FileFormat.NDJSON:
        claims = await store.claims.of([entry.digest for entry in entries])
    return b"".join(
        record_of(entry.frame, [c.hint for c in claims.get(entry.digest, ())], file_format)
        for entry in entries
    )
