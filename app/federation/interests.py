"""The interest of this node: the channels and Lamport timestamps that it syncs with its peers.

The settings name an interest. An operator can set another one while the node runs: it is kept in the
database, holds in every process over that database within a second, and wins over the settings until
it is reset.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from blake3 import blake3

from app.errors import Code, Problem
from app.ingest.door import GroupCommitter
from app.server.limits import Limits
from app.server.settings import Settings
from app.server.supervisor import Supervisor
from app.store.store import Store
from recon.agreement import Interest, decode_interest
from recon.errors import LocalProtocolError
from recon.limits import INTEREST_BYTES_MAX, INTEREST_NAMES_MAX
from sdstore.sds.codec import DECODER_VERSION

LOOK_S = 0.5
"""From one look at the database to the next: a change holds in every process within a second."""

_log = logging.getLogger(__name__)


class InterestOrigin(StrEnum):
    """Where the interest of a node comes from."""

    SETTINGS = "settings"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class InterestState:
    """An interest, its origin, and the policy revision of a node with this interest.

    `set_at_ms`: when an operator set it; None for the interest of the settings.
    """

    interest: Interest
    origin: InterestOrigin
    policy: int
    set_at_ms: int | None = None

    def document(self) -> dict[str, Any]:
        """The state as JSON."""
        own = {"origin": self.origin, "set_at_ms": self.set_at_ms}
        return {**interest_document(self.interest), **own}


class Interests:
    """The interest as this process knows it. Use `watched` while the node runs.

    `listeners` are called after each change. A process that cannot read the database keeps the last
    interest that it knew.
    """

    def __init__(
        self,
        store: Store,
        committer: GroupCommitter,
        limits: Limits,
        configured: Interest,
        revision: str = "",
    ) -> None:
        """`revision`: that of the operator's policy."""
        self.listeners: list[Callable[[], None]] = []
        self._store = store
        self._committer = committer
        self._limits = limits
        self._configured = configured
        self._revision = revision
        self._kept: bytes | None = None
        self._changes_count = 0
        self.state = self._state_of(None)

    @property
    def current(self) -> Interest:
        """The interest of this moment."""
        return self.state.interest

    @property
    def policy(self) -> int:
        """The policy revision of this moment (`policy_of`)."""
        return self.state.policy

    async def set(self, interest: Interest) -> InterestState:
        """Set the interest; it is kept, and wins over the settings until `reset`.

        Raises Problem: `invalid_parameter`, `too_many_items`, and the errors of a write to the database.
        """
        check_interest(interest, self._limits)
        document = {"interest": interest.encode().hex(), "set_at_ms": _now_ms()}
        await self._keep(json.dumps(document).encode())
        return self.state

    async def reset(self) -> InterestState:
        """Return to the interest of the settings. Raises Problem as a write to the database."""
        await self._keep(None)
        return self.state

    def configure(self, configured: Interest) -> None:
        """Take over the interest of changed settings. One that an operator set still wins."""
        self._configured = configured
        self._take(self._kept)

    def revise(self, revision: str) -> None:
        """Take over the revision of another policy: sessions and peers learn it as a change of interest."""
        self._revision = revision
        self._take(self._kept)

    async def look(self) -> None:
        """Read the database. Raises Problem if that fails."""
        before = self._changes_count
        kept = await self._store.kept_interest()
        if self._changes_count == before:  # else this process has just changed it
            self._take(kept)

    @asynccontextmanager
    async def watched(self, supervisor: Supervisor) -> AsyncIterator[None]:
        """Follow the database while the block runs. Raises Problem if the first look fails."""
        await self.look()
        async with supervisor.repeating("interests", self.look, LOOK_S):
            yield

    async def _keep(self, kept: bytes | None) -> None:
        await self._committer.call(lambda: self._store.keep_interest(kept))
        self._changes_count += 1
        self._take(kept)

    def _take(self, kept: bytes | None) -> None:
        before = self.state
        try:
            state = self._state_of(kept)
        except Exception as error:  # noqa: BLE001 - damage fails in every way that values can
            if kept != self._kept:
                _log.error("the interest in the database is damaged, so it stays: %s", error)
            self._kept = kept
            return
        self._kept = kept
        if state == before:
            return
        self.state = state
        _log.info("the interest is now %s (%s)", described(state.interest), state.origin)
        if (state.interest, state.policy) != (before.interest, before.policy):
            for listener in self.listeners:
                listener()

    def _state_of(self, kept: bytes | None) -> InterestState:
        if kept is None:
            policy = policy_of(self._limits, self._configured, self._revision)
            return InterestState(self._configured, InterestOrigin.SETTINGS, policy)
        document = json.loads(kept)
        interest = decode_interest(bytes.fromhex(document["interest"]))
        policy = policy_of(self._limits, interest, self._revision)
        set_at_ms = int(document["set_at_ms"])
        return InterestState(interest, InterestOrigin.OPERATOR, policy, set_at_ms)


def policy_of(limits: Limits, interest: Interest, revision: str = "") -> int:
    """A 32-bit number that changes when this node might accept entries that it refused before.

    It depends on the decoder, the bounds, the interest and the revision of the operator's policy.
    """
    bounds = (
        limits.frame_bytes_max,
        limits.message_id_bytes_max,
        limits.channel_id_bytes_max,
        limits.sender_id_bytes_max,
        limits.history_entries_max,
        limits.bloom_filter_bytes_max,
        limits.hint_bytes_max,
        limits.hint_claims_per_entry_max,
    )
    text = ",".join(map(str, (DECODER_VERSION, *bounds))).encode()
    text += interest.encode()
    if revision:
        text += b"\0" + revision.encode(errors="surrogatepass")
    return int.from_bytes(blake3(text).digest(length=4), "little")


def interest_of(settings: Settings) -> Interest:
    """The interest that the settings name: channels and prefixes, or everything; and a window.

    Raises Problem: `invalid_parameter`, `too_many_items`.
    """
    return made_interest(
        everything=not (settings.channels or settings.channel_prefixes),
        channels=frozenset(settings.channels),
        prefixes=frozenset(settings.channel_prefixes),
        lamport_from=settings.lamport_from,
        lamport_to=settings.lamport_to,
    )


def made_interest(**parts: Any) -> Interest:
    """`Interest.make`, for parts that an operator wrote. Raises Problem(INVALID_PARAMETER)."""
    try:
        return Interest.make(**parts)
    except LocalProtocolError as error:
        raise Problem(Code.INVALID_PARAMETER, str(error)) from None


def check_interest(interest: Interest, limits: Limits) -> None:
    """Raise Problem unless a node can have this interest and tell its peers."""
    names = (*interest.channels, *interest.prefixes)
    if len(names) > INTEREST_NAMES_MAX:
        detail = f"an interest has at most {INTEREST_NAMES_MAX:,} channels and prefixes, not {len(names):,}"
        raise Problem(Code.TOO_MANY_ITEMS, detail)
    bytes_max = limits.channel_id_bytes_max
    for name in names:
        if len(name.encode()) > bytes_max:
            detail = f"a channel or prefix has at most {bytes_max} bytes: {name[:100]!r}"
            raise Problem(Code.INVALID_PARAMETER, detail)
    size = len(interest.encode())
    if size > INTEREST_BYTES_MAX:
        detail = f"an interest takes at most {INTEREST_BYTES_MAX:,} bytes, not {size:,}"
        raise Problem(Code.TOO_MANY_ITEMS, detail)
    low, high = interest.lamport_from, interest.lamport_to
    if low is not None and high is not None and low >= high:
        detail = f"no Lamport timestamp is at least {low} and below {high}"
        raise Problem(Code.INVALID_PARAMETER, detail)


def interest_document(interest: Interest) -> Mapping[str, Any]:
    """An interest as JSON."""
    return {
        "all": interest.everything,
        "channels": list(interest.channels),
        "prefixes": list(interest.prefixes),
        "lamport_from": _text(interest.lamport_from),
        "lamport_to": _text(interest.lamport_to),
    }


def described(interest: Interest) -> str:
    """An interest in a few words, without names of channels."""
    if interest.everything:
        names = "every channel"
    else:
        channels, prefixes = len(interest.channels), len(interest.prefixes)
        names = f"{channels} channel{'s' * (channels != 1)}"
        names += f" and {prefixes} prefix{'es' * (prefixes != 1)}"
    low, high = interest.lamport_from, interest.lamport_to
    low_text = "" if low is None else f" from Lamport timestamp {low}"
    return names + low_text + ("" if high is None else f" below Lamport timestamp {high}")


def _text(lamport: int | None) -> str | None:
    return None if lamport is None else str(lamport)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
