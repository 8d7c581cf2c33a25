"""What a session asks its driver to do, one step at a time, and the results that it gets back.

The machine (`sdstore.sync.session.Sync`) does nothing itself: it returns steps, each a `Do` with a number,
and takes their results under these numbers in any order. All of them are plain values. An element is an
entry, or a claim on one; the machine knows only that a claim names its entry. Content is opaque `Item`s.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from recon.agreement import Interest, SessionKey
from recon.elements import U8, U64, Mask
from recon.marks import Arrived
from recon.view import View
from sdstore.sync.memory import Element, PeerMemory
from sdstore.sync.report import Progress, SyncReport
from sdstore.wire.recon_pb2 import Item, PushOutcome, ReconRequest

NOT_CONTENT = "not_content"
"""A refusal: a message without content, although it has the requested digest."""


# --- content -----------------------------------------------------------------------------------


# Not frozen: there is one for each message, and frozen ones take longer to make.
@dataclass(slots=True, kw_only=True)
class Prepared:
    """A received entry or claim, decoded once: its element, and whether it can be stored.

    `order` and `element_id` are computed from the content. An entry that cannot be decoded has
    neither; a claim has no order while its entry is not here. `entry_id`: for a claim, its entry.
    `claims`: for an entry, the IDs of the claims inside it that can be stored with it. `refusal`: why it will
    not be stored. `is_held`: the claim is here already. `channel_id`: of the message, or of the entry that a
    claim is about; None: not known, or the replica checks it. `content` belongs to the replica.
    """

    order: int | None = None
    element_id: bytes = b""
    entry_id: bytes = b""
    claims: tuple[bytes, ...] = ()
    refusal: str = ""
    is_held: bool = False
    channel_id: str | None = None
    content: Any = None


class Stored(NamedTuple):
    """The outcome of a prepared item, as a protocol status; `code`: why it was refused.

    `claims_dropped`: the IDs of the claims inside an entry that were not kept with it.
    """

    outcome: PushOutcome
    code: str = ""
    claims_dropped: Collection[bytes] = ()


# --- steps and their results -------------------------------------------------------------------


class Call(NamedTuple):
    """Send a request to the peer. Result: its `ReconResponse`, with any status."""

    request: ReconRequest


class Look(NamedTuple):
    """Take in what is committed by now, and read the set as of one moment. Result: `Looked`.

    `since`: an own mark, or empty; `orders` u64[n] and `ids` u8[n, 32]: elements to look up. `without`: pairs of
    own moments, as in `memory.Cuts`; what was retired then is not in the view.
    """

    key: SessionKey
    interest: Interest
    since: bytes
    orders: U64
    ids: U8
    without: Sequence[tuple[bytes, bytes]] = ()


class Looked(NamedTuple):
    """What is here as of one moment.

    `found`: the elements of the interest, or those that arrived after `since`; None if that mark is not valid.
    `mark`: this side's mark of the moment, empty if it keeps no order of arrival. `held`: bool[n], which of the
    elements are here, in any channel. `arrived_count`: how many elements have arrived here so far. `moment`: of
    `memory.Cuts`, empty as `mark`.
    """

    found: View | Arrived | None
    mark: bytes
    held: Mask
    arrived_count: int
    moment: bytes = b""


class Holds(NamedTuple):
    """Which of these elements are here by now, in any channel? Result: bool[n]."""

    orders: U64
    ids: U8


class Load(NamedTuple):
    """Read the content of as many elements as fit; at least one of any size.

    Result: an `Item` for each element of a prefix. An entry comes with all claims on it. An element whose
    content is gone has an `absent` item.
    """

    elements: Sequence[Element]
    bytes_max: int


class Read(NamedTuple):
    """Decode items, and store nothing. Result: `Decoded`."""

    items: Sequence[Item]


class Decoded(NamedTuple):
    """One `Prepared` for each item, in order.

    `stored_at_once`: how many items a `Store` should have now, if there are as many. The more it has, the
    longer it takes, and the less each item costs. 1: what came in one answer is stored as it comes.
    """

    prepared: Sequence[Prepared]
    stored_at_once: int


class Store(NamedTuple):
    """Commit prepared items, entries first. Result: a `Stored` for each, in order; then they are on disk."""

    prepared: Sequence[Prepared]


class FindLost(NamedTuple):
    """Look for entries of an interest that are here without their content. Result: `LostPage`.

    Begins after the place `after`, and examines about `limit` of them.
    """

    interest: Interest
    after: int
    limit: int


class LostPage(NamedTuple):
    """Some of these entries. `next`: the place after which to continue, 0 at the end; `total`: of all."""

    elements: list[Element]
    next: int
    total: int


class StillLost(NamedTuple):
    """Which of these entries are here without their content? Result: a set of IDs."""

    entry_ids: Sequence[bytes]


class Show(NamedTuple):
    """Announce the progress. It has no result."""

    progress: Progress


class Done(NamedTuple):
    """The attempt is over; whatever is still under way can be cancelled. It has no result.

    `again`: the memory contains what another attempt needs to come further, after `pause_s`.
    """

    report: SyncReport
    memory: PeerMemory
    again: bool
    pause_s: float = 0.0


Action = Call | Look | Holds | Load | Read | Store | FindLost | StillLost | Show | Done


class Failed(NamedTuple):
    """The result of a step that failed: the code and detail of a `SyncError`."""

    code: str
    detail: str


class Do(NamedTuple):
    """A step to carry out; give its result back with its number."""

    number: int
    action: Action
