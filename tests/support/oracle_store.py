"""The store as a few dictionaries and sorts: every database must give the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.entries import ClaimSource, MetId, NewEntry
from app.server.limits import Limits


@dataclass
class Kept:
    """One entry; hints in the order they were learned."""

    seq: int
    entry: NewEntry
    hints: dict[bytes, int] = field(default_factory=dict)

    @property
    def channel_id(self) -> str:
        return self.entry.message.channel_id

    @property
    def message_id(self) -> str:
        return self.entry.message.message_id

    @property
    def lamport(self) -> int:
        lamport = self.entry.message.lamport_timestamp
        assert lamport is not None
        return lamport

    @property
    def digest(self) -> bytes:
        return self.entry.digest

    @property
    def log_key(self) -> tuple[int, bytes, bytes]:
        return self.lamport, self.message_id.encode(), self.digest

    @property
    def served_key(self) -> tuple[bool, int]:
        return not self.entry.id_verifies, self.seq


class OracleStore:
    """Takes what the store takes, one at a time."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.kept: dict[bytes, Kept] = {}
        self.met: set[tuple[str, str]] = set()
        self.channel_numbers: dict[str, int] = {}
        self.history_claims: list[tuple[bytes, str, str]] = []

    def write(self, entries: Sequence[NewEntry], met: Sequence[MetId] = ()) -> list[bool]:
        """Whether each entry is new."""
        self.met.update((each.channel_id, each.message_id) for each in met)
        new = {e.message.channel_id for e in entries if e.digest not in self.kept}
        for channel_id in sorted(new - self.channel_numbers.keys()):
            self.channel_numbers[channel_id] = len(self.channel_numbers) + 1
        of_peers = {entry.digest for entry in entries if entry.is_from_peer}
        return [self._write(entry, is_from_peer=entry.digest in of_peers) for entry in entries]

    def _write(self, entry: NewEntry, *, is_from_peer: bool) -> bool:
        is_new = entry.digest not in self.kept
        if is_new:
            self.kept[entry.digest] = Kept(len(self.kept) + 1, entry)
            self._learn_history(entry)
        hints = self.kept[entry.digest].hints
        limits = self.limits
        most = limits.hint_claims_per_entry_max
        if is_from_peer:
            most = limits.hint_claims_with_peers_max
        for claim in entry.claims:
            if claim.hint in hints:
                hints[claim.hint] = min(hints[claim.hint], int(claim.source))
            elif len(hints) < most:
                hints[claim.hint] = int(claim.source)
        return is_new

    def _learn_history(self, entry: NewEntry) -> None:
        channel_id = entry.message.channel_id
        for told in entry.message.causal_history:
            claim = (told.retrieval_hint, channel_id, told.message_id)
            about_it = [c for c in self.history_claims if c[1:] == claim[1:]]
            if (
                told.retrieval_hint
                and claim not in about_it
                and len(about_it) < self.limits.hint_claims_per_entry_max
            ):
                self.history_claims.append(claim)

    # ---- answers

    def bearing(self, message_id: str, channel_id: str | None) -> list[Kept]:
        """Entries under an ID, the served one first."""
        found = [
            kept
            for kept in self.kept.values()
            if kept.message_id == message_id and channel_id in (None, kept.channel_id)
        ]
        return sorted(found, key=lambda kept: kept.served_key)

    def channel(self, channel_id: str) -> list[Kept]:
        """Entries of a channel in arrival order."""
        return [kept for kept in self.kept.values() if kept.channel_id == channel_id]

    def channel_ids(self) -> list[str]:
        """Channels by name."""
        return sorted({kept.channel_id for kept in self.kept.values()}, key=str.encode)

    def hint(self, hint: bytes, channel_id: str | None) -> list[Kept]:
        """Candidates, ranked."""
        published = [
            (kept.hints[hint], kept.seq, kept) for kept in self.kept.values() if hint in kept.hints
        ]
        told = [
            (int(ClaimSource.HISTORY), position, kept)
            for position, (its_hint, channel, message_id) in sorted(
                enumerate(self.history_claims),
                key=lambda each: (self.channel_numbers[each[1][1]], each[0]),
            )
            if its_hint == hint
            for kept in sorted(self.bearing(message_id, channel), key=lambda kept: kept.seq)
            if hint not in kept.hints
        ]
        ranked = sorted(published, key=lambda each: each[:2]) + told
        return [kept for *_, kept in ranked if channel_id in (None, kept.channel_id)]

    def gaps(self, channel_id: str) -> dict[str, list[bytes]]:
        """Missing IDs with the hints that histories give."""
        entries = self.channel(channel_id)
        here = {kept.message_id for kept in entries}
        named = {
            told.message_id
            for kept in entries
            for told in kept.entry.message.causal_history
            if told.message_id not in here
        }
        return {
            message_id: [
                hint
                for hint, channel, its_id in self.history_claims
                if (channel, its_id) == (channel_id, message_id)
            ]
            for message_id in sorted(named, key=str.encode)
        }
