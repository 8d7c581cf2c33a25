"""The memory of one peer between sessions.

A memory is a value: a session takes one and returns a new one. Each peer has its own, so a bad frame
from one peer never blocks a good one from another. Times are seconds since the Unix epoch by this
side's clock, which the caller reads; if that clock goes back, later times count as old.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from recon.elements import U8, U64
from recon.limits import ID_BYTES

INTERESTS_MAX = 4  # whose set-aside elements are remembered; for others a session finds them again
SET_ASIDE_MAX = 65_536  # elements a peer and interest: 25 MB; of more, only the number is kept
RETIRED_NAMED_MAX = 4_096  # of these retired by one side: of more, comparisons leave out all
CUTS_MAX = 8  # of a peer and interest: one for each long absence while the other retired much
RETRY_S_MIN = 900.0  # before the first retry: a mended store is noticed within the hour
RETRY_S_MAX = 86_400.0  # between the last retries: once a day
RETRY_FACTOR = 4.0
WHOLE_S_MAX = 86_400.0  # a false proof, by an accident of hashes, lasts for so long at most
LOST_ASKED_MAX = (
    4_096  # lost entries that this peer could not serve; the oldest are requested again
)

_ORDER_BYTES = 8

NO_ENTRY = "no_entry"  # a claim on an entry that the peer says it lacks
REFUSED = "refused"  # by the peer, which gives no reason
TOO_MANY_HINTS = "too_many_hints"  # of an entry: this side keeps no more of them
LOST = "lost"
RETIRED = "retired"
_UNSERVED = {LOST, RETIRED, NO_ENTRY}  # a mended peer, or an entry that arrives, can end these


def is_due_at(retry_at_s: float, now_s: float) -> bool:
    """Whether to try again. A time beyond the longest wait was set before the clock went back."""
    return not 0 < retry_at_s - now_s <= RETRY_S_MAX + 1


def wait_s(retries: int) -> float:
    return float(min(RETRY_S_MIN * RETRY_FACTOR ** min(retries, 10), RETRY_S_MAX))


# --- values ------------------------------------------------------------------------------------


class Element(NamedTuple):
    """Order value and 32-byte ID."""

    order: int
    element_id: bytes


def columns(elements: Iterable[tuple[int, bytes]]) -> tuple[U64, U8]:
    """orders u64[n] and ids u8[n, 32]."""
    rows = list(elements)
    ids = np.frombuffer(b"".join(each for _, each in rows), np.uint8).reshape(-1, ID_BYTES)
    return np.array([order for order, _ in rows], np.uint64), ids


class LackedBy(StrEnum):
    """The side that lacks a set-aside element."""

    HERE = "here"
    THERE = "there"


@dataclass(frozen=True, slots=True)
class AsideElement:
    """A set-aside element: which side lacks it, and why.

    `entry_id`: for a claim, its entry. `retries`: the number of retries.
    """

    lacked_by: LackedBy
    order: int
    element_id: bytes
    code: str
    entry_id: bytes = b""
    retries: int = 0
    retry_at_s: float = 0.0

    def document(self) -> dict[str, str]:
        """The element as JSON for a report."""
        kind = "claim" if self.entry_id else "entry"
        return {
            "id": self.element_id.hex(),
            "kind": kind,
            "lacked_by": self.lacked_by,
            "code": self.code,
        }


@dataclass(frozen=True, slots=True)
class Cuts:
    """What one side had retired before the other asked for it: comparisons leave it out, unnamed.

    Each pair (after, until) of moments of that side leaves out what arrived between them and was retired by
    `until`. `place`: the moment of the last proof; the other side has what arrived until then, or does not
    need it. Opaque; empty is the beginning.
    """

    place: bytes = b""
    pairs: tuple[tuple[bytes, bytes], ...] = ()

    def cut(self, until: bytes) -> Cuts:
        """Leave out also what is retired by a moment. If there are too many cuts, the last two become one.

        If a cut at `place` was not enough, the other side has lost what it had by then: all is left out.
        """
        if any(after == self.place for after, _ in self.pairs):
            return replace(self, pairs=((b"", until),))
        pairs = [*self.pairs, (self.place, until)]
        if len(pairs) > CUTS_MAX:
            pairs[-2:] = [(pairs[-2][0], until)]
        return replace(self, pairs=tuple(pairs))


NO_CUTS = Cuts()


@dataclass(frozen=True, slots=True)
class Aside:
    """The elements set aside for one mutual interest (its canonical bytes).

    `tried_again`: elements removed for a retry that are not settled yet. `beyond_count`: further
    elements, which are not remembered: the next session that compares everything finds them again. `theirs`,
    `ours`: what the peer and this side had retired.
    """

    interest: bytes
    elements: tuple[AsideElement, ...] = ()
    tried_again: tuple[AsideElement, ...] = ()
    beyond_count: int = 0
    theirs: Cuts = NO_CUTS
    ours: Cuts = NO_CUTS

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to remember."""
        has_cuts = self.theirs != NO_CUTS or self.ours != NO_CUTS
        return not (self.elements or self.tried_again or has_cuts)

    def without_refused_there(self) -> Aside:
        """Without refusals of the peer: its policy has changed, so it may accept those elements now."""
        gone = {e.element_id for e in self.elements if e.lacked_by is LackedBy.THERE}
        kept = tuple(e for e in self.elements if not gone & {e.element_id, e.entry_id})
        tried = tuple(e for e in self.tried_again if e.element_id not in gone)
        return replace(self, elements=kept, tried_again=tried)

    def without_refused_here(self) -> Aside:
        """Without this side's refusals: its policy has changed, so it may accept those elements now."""
        gone = {
            e.element_id
            for e in self.elements
            if e.lacked_by is LackedBy.HERE and e.code not in _UNSERVED
        }
        kept = tuple(e for e in self.elements if not gone & {e.element_id, e.entry_id})
        return replace(self, elements=kept, beyond_count=0)

    def unserved_due(self) -> Aside:
        """Make elements due now that the peer could not serve, and claims that waited for an entry."""
        elements = (replace(e, retry_at_s=0.0) if e.code in _UNSERVED else e for e in self.elements)
        return replace(self, elements=tuple(elements))


@dataclass(frozen=True, slots=True)
class Asked:
    """A lost entry that the peer could not serve, and when to request it again."""

    entry_id: bytes
    times: int
    again_at_s: float


@dataclass(frozen=True, slots=True)
class Baseline:
    """Where the last session with a peer ended: the next one compares only what arrived afterwards.

    `own` and `peer` are the marks of both sides (`recon.marks`): everything up to the one equals
    everything up to the other, except for the elements of the two next fields, packed by
    `pack_elements`. `counted_in`: the session sent them, so they arrived at the peer after its mark.
    `counted_out`: it brought them or set them aside, so the peer has them before its mark. `aside`: what
    was set aside, as `SetAside.name`. `whole_due_at_s`: when everything must be compared again.
    """

    interest: bytes
    own: bytes
    peer: bytes
    counted_in: bytes
    counted_out: bytes
    aside: bytes
    elements_count: int
    whole_due_at_s: float

    def is_due(self, now_s: float) -> bool:
        """Whether everything must be compared. A time beyond a day was set before the clock went back."""
        return not 0 < self.whole_due_at_s - now_s <= WHOLE_S_MAX + 1


ELEMENT_BYTES = _ORDER_BYTES + ID_BYTES


def pack_elements(elements: Mapping[bytes, int]) -> bytes:
    """Elements, orders by ID: 8 bytes of order, little-endian, and 32 of ID each."""
    return b"".join(
        order.to_bytes(_ORDER_BYTES, "little") + each for each, order in elements.items()
    )


def unpack_elements(raw: bytes) -> dict[bytes, int]:
    """The orders by ID of packed elements."""
    orders, ids = unpack_columns(raw)
    return dict(zip(map(bytes, ids), orders.tolist(), strict=True))


def unpack_columns(raw: bytes | bytearray) -> tuple[U64, U8]:
    """orders u64[n] and ids u8[n, 32] of packed elements."""
    rows = np.frombuffer(bytes(raw), np.uint8).reshape(-1, ELEMENT_BYTES)
    orders = np.ascontiguousarray(rows[:, :_ORDER_BYTES]).view("<u8")[:, 0].astype(np.uint64)
    return orders, np.ascontiguousarray(rows[:, _ORDER_BYTES:])


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Results of sessions with a peer that the next session uses.

    `responder_nonce`, `interest` and `policy` are the peer's; while it accepts them, a session needs no hello. `arrived_count` is this side's number of arrivals at the start of the last
    session, and `own_policy` the policy of this side. The search for lost entries to request from this
    peer resumes after `lost_after`. The newest of `asides` and of `baselines` is the last.
    """

    responder_nonce: bytes = b""
    interest: bytes | None = None
    policy: int | None = None
    arrived_count: int = 0
    lost_after: int = 0
    lost_asked: tuple[Asked, ...] = ()
    asides: tuple[Aside, ...] = ()
    baselines: tuple[Baseline, ...] = ()
    own_policy: int | None = None

    def baseline_over(self, interest: bytes) -> Baseline | None:
        """The baseline of one mutual interest, if there is one."""
        return next((each for each in self.baselines if each.interest == interest), None)

    def with_baseline(self, interest: bytes, baseline: Baseline | None) -> PeerMemory:
        """This memory with another baseline of an interest, or without one."""
        kept = [each for each in self.baselines if each.interest != interest]
        kept += [baseline] if baseline else []
        return replace(self, baselines=tuple(kept[-INTERESTS_MAX:]))

    def aside_over(self, interest: bytes) -> Aside:
        """The elements set aside for one mutual interest."""
        return next((each for each in self.asides if each.interest == interest), Aside(interest))

    def with_aside(self, aside: Aside) -> PeerMemory:
        """This memory with the elements that a session over one interest set aside."""
        if not self.asides and aside.is_empty:
            return self
        asides = [each for each in self.asides if each.interest != aside.interest]
        if not aside.is_empty:
            asides.append(aside)
        return replace(self, asides=tuple(asides[-INTERESTS_MAX:]))

    def unserved_due(self) -> PeerMemory:
        """Make elements due that the peer could not serve, because it may be able to now."""
        asides = tuple(each.unserved_due() for each in self.asides)
        return replace(self, lost_asked=(), asides=asides)

    def with_policy(self, policy: int) -> PeerMemory:
        """This memory with a new policy of the peer: elements that it refused are offered again."""
        if self.policy == policy:
            return self
        if self.policy is None:
            return replace(self, policy=policy)
        asides = tuple(each.without_refused_there() for each in self.asides)
        return replace(self, policy=policy, asides=asides, interest=None, baselines=())

    def with_own_policy(self, policy: int) -> PeerMemory:
        """This memory with this side's policy: if it is new, elements that it refused are requested again."""
        if self.own_policy == policy:
            return self
        if self.own_policy is None:
            return replace(self, own_policy=policy)
        asides = tuple(each.without_refused_here() for each in self.asides)
        return replace(self, own_policy=policy, asides=asides, baselines=())

    def lost_waiting(self, now_s: float) -> set[bytes]:
        """Entries with lost content that must not be requested from the peer yet."""
        return {each.entry_id for each in self.lost_asked if not is_due_at(each.again_at_s, now_s)}

    def asked_in_vain(self, lost_ids: Iterable[bytes], now_s: float) -> PeerMemory:
        """Record lost entries that the peer did not serve."""
        asked = {each.entry_id: each for each in self.lost_asked}
        for lost_id in lost_ids:
            times = asked.pop(lost_id).times if lost_id in asked else 0
            asked[lost_id] = Asked(lost_id, times + 1, now_s + wait_s(times))
        return replace(self, lost_asked=tuple(asked.values())[-LOST_ASKED_MAX:])

    def document(self) -> dict[str, Any]:
        """The memory as JSON: bytes in hex."""
        document: dict[str, Any] = _with_hex(asdict(self))
        return document

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> PeerMemory:
        """The memory of a `document`."""
        interest = document["interest"]
        return cls(
            **{
                **document,
                "responder_nonce": bytes.fromhex(document["responder_nonce"]),
                "interest": interest if interest is None else bytes.fromhex(interest),
                "lost_asked": tuple(
                    Asked(**_with_bytes(each, "entry_id")) for each in document["lost_asked"]
                ),
                "asides": tuple(
                    Aside(
                        bytes.fromhex(each["interest"]),
                        tuple(map(_aside_element, each["elements"])),
                        tuple(map(_aside_element, each["tried_again"])),
                        each["beyond_count"],
                        _cuts(each["theirs"]),
                        _cuts(each["ours"]),
                    )
                    for each in document["asides"]
                ),
                "baselines": tuple(
                    Baseline(**_with_bytes(each, *_BASELINE_BYTES))
                    for each in document["baselines"]
                ),
            }
        )


_BASELINE_BYTES = ("interest", "own", "peer", "counted_in", "counted_out", "aside")


def _with_hex(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_hex(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_with_hex(each) for each in value]
    return value.hex() if isinstance(value, bytes) else value


def _with_bytes(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {
        name: bytes.fromhex(value) if name in names and value is not None else value
        for name, value in row.items()
    }


def _cuts(row: Mapping[str, Any]) -> Cuts:
    pairs = tuple((bytes.fromhex(after), bytes.fromhex(until)) for after, until in row["pairs"])
    return Cuts(bytes.fromhex(row["place"]), pairs)


def _aside_element(row: Mapping[str, Any]) -> AsideElement:
    fields = _with_bytes(row, "element_id", "entry_id")
    return AsideElement(**fields | {"lacked_by": LackedBy(row["lacked_by"])})
