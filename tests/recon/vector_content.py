"""A node of the vectors: four entries with hints, and what it answers from the first contact on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from recon.codec import pack_ranges
from recon.interest import Interest
from recon.proof import closing_request
from recon.ranges import ALL_ORDERS, END, START, Bound, Range, RangeColumns, bound_bytes
from recon.responder import respond
from recon.session import SessionHeader, interest_hash
from recon.varint import pack_counts
from recon.view import View
from sdstore.sds.codec import encode
from sdstore.sds.digest import claim_id, entry_digest, order_value
from sdstore.sds.model import Message
from sdstore.wire import recon_pb2 as wire
from tests.recon.vector_sets import HEADER, INTEREST
from tests.support.recon_talk import Element, columns_of, index_of


class Published(NamedTuple):
    """A message and the hints it was published with."""

    message: Message
    hints: tuple[bytes, ...] = ()

    @property
    def item(self) -> wire.Item:
        """The entry with its hints."""
        return wire.Item(entry=wire.Item.Entry(frame=encode(self.message), hints=self.hints))

    @property
    def elements(self) -> list[Element]:
        """The entry, then its claims."""
        assert self.message.lamport_timestamp is not None
        order, digest = order_value(self.message.lamport_timestamp), entry_digest(self.message)
        return [(order, digest), *((order, claim_id(digest, hint)) for hint in self.hints)]

    def claim(self, hint: bytes) -> wire.Item:
        """A hint alone."""
        return wire.Item(claim=wire.Item.Claim(digest=entry_digest(self.message), hint=hint))


def _published(number: int, size: int, *hints: bytes) -> Published:
    made = Message(f"m{number}", "b", "alice", lamport_timestamp=number, content=bytes(size))
    return Published(made, hints)


HELD = (
    _published(1, 10, b"\x01"),
    _published(2, 1900, b"\x02\x02"),
    _published(3, 2100),
    _published(4, 10, b"\x04", b"\x05"),
)
NEW = _published(5, 10, b"\x06")
ABSENT = _published(6, 10)
SYNC = Message("s1", "b", "alice", lamport_timestamp=7)
LATER_HINT = b"\x07"


def content() -> dict[str, Any]:
    """What the node holds, and its answers in sequence: each request builds on those before."""
    return {
        "entries": [_row(each) for each in HELD],
        "exchanges": [
            {
                "name": name,
                "request": request.SerializeToString().hex(),
                "response": response.SerializeToString().hex(),
            }
            for name, request, response in (*_hand_shake(), *_fetches(), _push())
        ],
    }


def _row(each: Published) -> dict[str, Any]:
    (order, digest), *claims = each.elements
    return {
        "frame": each.item.entry.frame.hex(),
        "hints": [hint.hex() for hint in each.hints],
        "order": str(order),
        "digest": digest.hex(),
        "claims": [raw.hex() for _, raw in claims],
    }


Said = tuple[str, wire.ReconRequest, wire.ReconResponse]


def _hand_shake() -> list[Said]:
    first = wire.Session(initiator_nonce=HEADER.initiator_nonce, interest_bytes=INTEREST.encode())
    other = Interest.make(channels=frozenset({"never named before"})).encode()
    unknown = SessionHeader(HEADER.initiator_nonce, HEADER.responder_nonce, other).message()
    assert unknown.interest_hash == interest_hash(other)
    return [
        (
            "another version",
            wire.ReconRequest(version=2),
            wire.ReconResponse(version=1, status=wire.UNSUPPORTED_VERSION),
        ),
        (
            "first contact",
            wire.ReconRequest(version=1, session=first),
            wire.ReconResponse(
                version=1, status=wire.NONCE_EXPIRED, responder_nonce=HEADER.responder_nonce
            ),
        ),
        (
            "an interest by name that was never sent",
            wire.ReconRequest(version=1, session=unknown),
            wire.ReconResponse(version=1, status=wire.UNKNOWN_INTEREST),
        ),
    ]


def _fetches() -> list[Said]:
    one, two, three, four = HELD
    resume = min(_bound(element) for element in three.elements)
    short_ids = b"".join(
        _view().short_ids(*columns_of([each])).tobytes()
        for each in (one.elements[1], four.elements[2])
    )
    everything = RangeColumns.of(Range(START, END))
    return [
        (
            "everything, in a small frame",
            _request(_fetch(everything), in_full=True),
            wire.ReconResponse(
                version=1, items=[one.item, two.item], truncated=True, resume=bound_bytes(resume)
            ),
        ),
        (
            "the rest",
            _request(_fetch(RangeColumns.of(Range(resume, END)))),
            wire.ReconResponse(version=1, items=[three.item, four.item]),
        ),
        (
            "two claims by their short ids",
            _request(_fetch(everything, short_ids)),
            wire.ReconResponse(version=1, items=[one.claim(b"\x01"), four.claim(b"\x05")]),
        ),
    ]


def _push() -> Said:
    one, _, _, four = HELD
    request = _request(
        push=[
            one.claim(LATER_HINT),
            four.item,
            NEW.item,
            ABSENT.claim(b"\x08"),
            wire.Item(entry=wire.Item.Entry(frame=encode(SYNC))),
        ]
    )
    after = _view(NEW, Published(one.message, (LATER_HINT,)))
    request.ranges.CopyFrom(closing_request(after).ranges)
    outcomes = [wire.STORED, wire.DUPLICATE, wire.STORED, wire.NOT_EXAMINED, wire.PUSH_REFUSED]
    response = respond(after, request)
    response.push_outcomes.extend(outcomes)
    return "every outcome, and a comparison that finds what was pushed", request, response


def _view(*more: Published) -> View:
    elements = {element for each in (*HELD, *more) for element in each.elements}
    return index_of(sorted(elements)).view(HEADER.key(), None, ALL_ORDERS)


def _bound(element: Element) -> Bound:
    return Bound(element[0], int.from_bytes(element[1][:8], "big"))


def _fetch(ranges: RangeColumns, short_ids: bytes = b"") -> wire.Fetch:
    runs, bounds = pack_ranges(ranges)
    counts = pack_counts(np.array([len(short_ids) // 6]))
    return wire.Fetch(runs=runs, bounds=bounds, counts=counts, short_ids=short_ids)


def _request(
    fetch: wire.Fetch | None = None, *, push: list[wire.Item] | None = None, in_full: bool = False
) -> wire.ReconRequest:
    return wire.ReconRequest(
        version=1,
        session=HEADER.message(in_full=in_full),
        fetch=fetch,
        push=push,
        response_bytes_max=4096,
    )
