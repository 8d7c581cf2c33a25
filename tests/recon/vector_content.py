"""A node of the vectors: four entries with hints, and what it answers from the first contact on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from recon.agreement import Interest, SessionHeader, interest_hash
from recon.codec import pack_counts, pack_ranges
from recon.elements import (
    END,
    START,
    Bound,
    Range,
    RangeColumns,
    bound_bytes,
    order_of_lamport,
)
from recon.limits import PROTOCOL_VERSION
from recon.responder import respond
from recon.view import View
from sdstore.sds.codec import encode
from sdstore.sds.model import Message, claim_id, entry_digest
from sdstore.wire import recon_pb2 as wire
from tests.recon.vector_sets import HEADER, INTEREST
from tests.support.recon_talk import Element, columns_of, index_of


class Published(NamedTuple):
    """A message and the hints it was published with."""

    message: Message
    hints: tuple[bytes, ...] = ()

    @property
    def pushed(self) -> wire.Item:
        """The entry with its hints, without a name."""
        return wire.Item(entry=wire.Item.Entry(frame=encode(self.message), hints=self.hints))

    @property
    def served(self) -> wire.Item:
        """The same under the name of its element."""
        (order, digest), *_ = self.elements
        return wire.Item(entry=self.pushed.entry, order=order, id=digest)

    @property
    def absent(self) -> wire.Item:
        """Word that the entry is known and cannot be served."""
        (order, digest), *_ = self.elements
        absent = wire.Item.Absent(reason=wire.LOST, hints=self.hints)
        return wire.Item(absent=absent, order=order, id=digest)

    @property
    def elements(self) -> list[Element]:
        """The entry, then its claims."""
        assert self.message.lamport_timestamp is not None
        order, digest = order_of_lamport(self.message.lamport_timestamp), entry_digest(self.message)
        return [(order, digest), *((order, claim_id(digest, hint)) for hint in self.hints)]

    def claim(self, hint: bytes, *, is_served: bool = False) -> wire.Item:
        """A hint alone; served, it names its order."""
        (order, digest), *_ = self.elements
        claim = wire.Item.Claim(digest=digest, hint=hint)
        return wire.Item(claim=claim, order=order if is_served else 0)


def _published(number: int, size: int, *hints: bytes) -> Published:
    made = Message(f"m{number}", "b", "alice", lamport_timestamp=number, content=bytes(size))
    return Published(made, hints)


HELD = (
    _published(1, 10, b"\x01"),
    _published(2, 1900, b"\x02\x02"),
    _published(3, 2100),
    _published(4, 10, b"\x04", b"\x05"),
)
LOST = _published(5, 10, b"\x09")
NEW = _published(6, 10, b"\x06")
UNKNOWN = _published(7, 10)
SYNC = Message("s1", "b", "alice", lamport_timestamp=8)
POLICY = 0x01020304
LATER_HINT = b"\x07"


def content() -> dict[str, Any]:
    """The node's elements, and its answers in sequence: each request builds on those before."""
    return {
        "policy": POLICY,
        "entries": [_row(each) for each in (*HELD, LOST)],
        "lost": entry_digest(LOST.message).hex(),
        "exchanges": [
            {
                "name": name,
                "request": request.SerializeToString().hex(),
                "response": response.SerializeToString().hex(),
            }
            for name, request, response in (*_hand_shake(), *_fetches(), _push())
        ],
    }


def refused_items() -> dict[str, Any]:
    """Items that an initiator must refuse in the answer to a fetch, and items that it sets aside."""
    one, two, three, four = HELD
    resume = min(_bound(element) for element in three.elements)
    first = RangeColumns.of(Range(START, resume))
    names = _view().short_ids(*columns_of([one.elements[0], two.elements[0]])).tobytes()
    fetch = _fetch(first, names)
    undecodable = wire.Item(
        entry=wire.Item.Entry(frame=b"\xff"), order=two.served.order, id=two.served.id
    )
    swapped = [
        wire.Item(entry=b.entry, order=a.order, id=a.id)
        for a, b in ((one.served, two.served), (two.served, one.served))
    ]
    wrong_order = one.claim(b"\x01", is_served=True)
    wrong_order.order += 1
    cases = [
        ("an element outside of the range", [three.served]),
        ("an element whose short id was not asked for", [one.claim(b"\x01", is_served=True)]),
        ("absent, and not asked for", [four.absent]),
        ("content under the name of another element", swapped),
        ("an item without a name", [one.pushed]),
        ("an empty item", [wire.Item()]),
        ("an element twice", [one.served, one.served]),
        ("elements that descend", [two.served, one.served]),
        ("a claim under another order than its entry's", [one.served, wrong_order]),
    ]
    return {
        "fetch": fetch.SerializeToString().hex(),
        "refused": [
            {"why": why, "response": _response(items=items).SerializeToString().hex()}
            for why, items in cases
        ],
        "set_aside": [
            {
                "why": why,
                "response": _response(items=items).SerializeToString().hex(),
                "aside": aside,
            }
            for why, items, aside in (
                (
                    "a frame that cannot be decoded",
                    [one.served, undecodable],
                    [two.served.id.hex()],
                ),
                (
                    "content that is lost, and the claim on it",
                    [one.absent, two.served],
                    [one.served.id.hex(), one.elements[1][1].hex()],
                ),
            )
        ],
    }


def _row(each: Published) -> dict[str, Any]:
    (order, digest), *claims = each.elements
    return {
        "frame": each.pushed.entry.frame.hex(),
        "hints": [hint.hex() for hint in each.hints],
        "order": str(order),
        "digest": digest.hex(),
        "claims": [raw.hex() for _, raw in claims],
    }


Said = tuple[str, wire.ReconRequest, wire.ReconResponse]


def _hand_shake() -> list[Said]:
    nonce, interest = HEADER.initiator_nonce, INTEREST.encode()
    other = Interest.make(channels=frozenset({"never named before"})).encode()
    unknown = SessionHeader(nonce, HEADER.responder_nonce, other).message()
    assert unknown.interest_hash == interest_hash(other)
    expired = _response(
        status=wire.NONCE_EXPIRED, responder_nonce=HEADER.responder_nonce, policy=POLICY
    )
    hello = _response(interest=Interest.make(everything=True).encode())
    hello.MergeFrom(expired)
    unknown_interest = _response(status=wire.UNKNOWN_INTEREST, policy=POLICY)
    nameless = wire.Session(initiator_nonce=nonce, responder_nonce=HEADER.responder_nonce)
    return [
        (
            "another version",
            wire.ReconRequest(version=2),
            _response(status=wire.UNSUPPORTED_VERSION),
        ),
        ("a hello", wire.ReconRequest(version=PROTOCOL_VERSION), hello),
        (
            "a hello with valid nonces",
            wire.ReconRequest(version=PROTOCOL_VERSION, session=nameless),
            hello,
        ),
        (
            "an interest in full, with a nonce that is not valid",
            wire.ReconRequest(
                version=PROTOCOL_VERSION,
                session=wire.Session(
                    initiator_nonce=nonce, responder_nonce=bytes(16), interest_bytes=interest
                ),
            ),
            expired,
        ),
        (
            "the interest by name: the request before had it in full",
            _request(),
            _response(policy=POLICY),
        ),
        (
            "an interest by name that was never sent",
            wire.ReconRequest(version=PROTOCOL_VERSION, session=unknown),
            unknown_interest,
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
    rest = [three.served, four.served, LOST.absent]
    cut = _response(
        items=[one.served, two.served],
        truncated=True,
        resume=bound_bytes(resume),
        policy=POLICY,
    )
    return [
        ("everything, in a small frame", _request(_fetch(everything), in_full=True), cut),
        (
            "the rest: what is lost is named, with the claim on it",
            _request(_fetch(RangeColumns.of(Range(resume, END)))),
            _response(items=sorted(rest, key=_place), policy=POLICY),
        ),
        (
            "two claims by their short ids, without their entries",
            _request(_fetch(everything, short_ids)),
            _response(
                items=[
                    one.claim(b"\x01", is_served=True),
                    four.claim(b"\x05", is_served=True),
                ],
                policy=POLICY,
            ),
        ),
    ]


def _place(item: wire.Item) -> Element:
    return item.order, item.id or claim_id(item.claim.digest, item.claim.hint)


def _push() -> Said:
    one, two, _, four = HELD
    odd_name = wire.Item(entry=one.pushed.entry, order=7, id=bytes(32))
    request = _request(
        push=[
            one.claim(LATER_HINT),
            four.pushed,
            NEW.pushed,
            NEW.claim(b"\x0a"),
            UNKNOWN.claim(b"\x08"),
            wire.Item(entry=wire.Item.Entry(frame=encode(SYNC))),
            wire.Item(entry=wire.Item.Entry(frame=b"\xff")),
            odd_name,
            wire.Item(),
            two.absent,
            wire.Item(claim=wire.Item.Claim(digest=b"short", hint=b"\x08")),
        ]
    )
    after = _view(NEW, Published(one.message, (LATER_HINT,)))
    request.total = True
    response = respond(after, request)
    response.push_outcomes.extend(
        [
            wire.STORED,
            wire.DUPLICATE,
            wire.STORED,
            wire.NO_ENTRY,
            wire.NO_ENTRY,
            wire.PUSH_REFUSED,
            wire.PUSH_REFUSED,
            wire.DUPLICATE,
            wire.PUSH_REFUSED,
            wire.PUSH_REFUSED,
            wire.NO_ENTRY,
        ]
    )
    response.policy = POLICY
    return "every outcome, odd items, and a total with what was pushed", request, response


def _response(**fields: Any) -> wire.ReconResponse:
    return wire.ReconResponse(version=PROTOCOL_VERSION, **fields)


def _view(*more: Published) -> View:
    elements = {element for each in (*HELD, LOST, *more) for element in each.elements}
    return View(index_of(sorted(elements)), HEADER.key())


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
        version=PROTOCOL_VERSION,
        session=HEADER.message(in_full=in_full),
        fetch=fetch,
        push=push,
        response_bytes_max=4096,
    )
