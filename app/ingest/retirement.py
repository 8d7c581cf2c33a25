"""Retiring: entries lose their content on purpose and stay elements of the set (docs/operations.md).

Ranges stay equal, so nothing comes back from a peer and nothing looks like a difference. The content is
erased once no file of the database contains it; where a reader still keeps it, the node tries again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from app.errors import Code, Problem
from app.ingest.door import GroupCommitter
from app.ingest.quarantine import Quarantine
from app.live.hub import LiveHub
from app.server.limits import Limits
from app.store.database import Erasure, chunks
from app.store.groupwriter import Retired, Retiring
from app.store.store import Store

ERASE_EVERY_S = 1.0
"""Between two attempts to erase while readers keep the old state of the database."""

DIGESTS_PER_STEP = 500
"""Entries that are retired in one transaction: some 50 ms of the writer."""

_log = logging.getLogger(__name__)


class RetiredNow(NamedTuple):
    """The outcome of a call: counts, and whether the files still contain the content."""

    counts: Retired
    erasure: Erasure


class Retirement:
    """Retires entries of one node, and erases what they contained."""

    def __init__(
        self,
        store: Store,
        committer: GroupCommitter,
        quarantine: Quarantine,
        live: LiveHub,
        limits: Limits,
    ) -> None:
        self._store = store
        self._committer = committer
        self._quarantine = quarantine
        self._live = live
        self._limits = limits
        # A process that was killed can have left content in the log of SQLite.
        self.erasure = Erasure.PENDING

    async def retire_id(
        self, message_id: str, channel_id: str | None, reason: str, *, with_history: bool = False
    ) -> RetiredNow:
        """Retire all entries under an ID. A later variant is another entry. Raises Problem: `not_found`."""
        digests = await self._store.entries.digests_of(message_id, channel_id)
        if not digests:
            detail = (
                f"no message has the ID {message_id!r}; retire it by its digest before it arrives"
            )
            raise Problem(Code.NOT_FOUND, detail)
        return await self.retire(digests, reason, with_history=with_history)

    async def retire(
        self, digests: Sequence[bytes], reason: str, *, with_history: bool = False
    ) -> RetiredNow:
        """Retire entries by digest; those that are not here are stored without content on arrival.

        Raises Problem: `too_many_items` beyond the number of entries that can be retired ahead.
        """
        counts = Retired(0, 0, 0)
        for part in chunks(digests, DIGESTS_PER_STEP):
            done = await self.retire_step(part, reason, with_history=with_history)
            counts = Retired(*map(sum, zip(counts, done, strict=True)))
        return RetiredNow(counts, await self.erase())

    async def retire_step(
        self,
        digests: Sequence[bytes],
        reason: str,
        *,
        with_history: bool = False,
        tells: bool = True,
    ) -> Retired:
        """As `retire`, in one transaction; the caller calls `erase` after the last step.

        `tells`: live readers are told, so that they can drop their copies.
        """
        self.erasure = Erasure.PENDING
        part = Retiring(digests, reason, with_history)
        counts = await self._committer.call(lambda: self._store.writer.retire(part))
        self._store.frames.has_retired = True
        await self._live.forget(digests, tells=tells)
        await asyncio.to_thread(self._quarantine.erase, digests)
        return counts

    async def erase(self) -> Erasure:
        """Try to erase what was retired, once."""
        self.erasure = Erasure.PENDING
        self.erasure = await self._committer.call(self._store.erase)
        return self.erasure

    async def erase_pending(self) -> None:
        """As `erase`, if the last attempt met a reader."""
        if self.erasure is Erasure.PENDING and await self.erase() is Erasure.DONE:
            _log.debug("no file of the database contains retired content")
