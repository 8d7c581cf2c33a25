"""Marks in the vectors: a session over the news, and one over everything that is bounded by a mark."""

from __future__ import annotations

from typing import Any

import blake3
import numpy as np

from recon.codec import Asks, pack_asks, pack_counts, pack_ranges
from recon.elements import END, START, Bound, Range, RangeColumns
from recon.fetch import read_fetch, resolve
from recon.limits import PHASE_NONE, PROTOCOL_VERSION
from recon.responder import respond
from recon.view import View
from sdstore.wire import recon_pb2 as wire
from tests.recon.vector_sets import HEADER, universe_of
from tests.support.recon_talk import columns_of, index_of

WHOLE = RangeColumns.of(Range(START, END))
ARRIVED = [*range(0, 40, 2), 50, 41, 52, 43, 54, 45, 56, 47, 58, 49]
"""The responder's elements of the universe `many`, in the order of their arrival."""

PROVED, NOW, LATER = 20, 26, 30
"""Moments of the responder: how many elements had arrived."""

BEFORE = ARRIVED[:PROVED]
OURS = [41, 53, 43, 55]
"""The initiator's news; it holds BEFORE too."""


def mark_of(count: int) -> bytes:
    """A mark of the vectors: opaque to an initiator."""
    return blake3.blake3(b"mark %d" % count).digest(length=24)


def news() -> dict[str, Any]:
    """Requests between marks and their answers, and the totals that show what was found."""
    first = _request(OURS, total=True, mark=True, since=mark_of(PROVED))
    named = _fetch(names=[50, 52, 54])
    return {
        "universe": "many",
        "arrived": ARRIVED,
        "marks": [{"arrived": n, "mark": mark_of(n).hex()} for n in (PROVED, NOW, LATER)],
        "initiator": {"before": BEFORE, "news": OURS},
        "exchanges": [
            # The first answer gives the mark; the later ones are as of it, although more has arrived.
            _said("news, and a mark", first, NOW, (PROVED, NOW), mark=NOW),
            _said(
                "news by their short ids",
                _about(named, since=PROVED, up_to=NOW),
                LATER,
                (PROVED, NOW),
            ),
            _said(
                "news of a whole range",
                _about(_fetch(), since=PROVED, up_to=NOW),
                LATER,
                (PROVED, NOW),
            ),
            _said(
                "empty news",
                _request([], total=True, mark=True, since=mark_of(LATER)),
                LATER,
                (LATER, LATER),
                mark=LATER,
            ),
            _said(
                "`since` newer than `up_to`: nothing",
                _request([], total=True, since=mark_of(LATER), up_to=mark_of(NOW)),
                LATER,
                (LATER, LATER),
            ),
            _said(
                "everything, and a mark",
                _request([*BEFORE, *OURS], total=True, mark=True),
                NOW,
                (0, NOW),
                mark=NOW,
            ),
            _said(
                "everything up to a mark",
                _request([*BEFORE, *OURS], up_to=mark_of(NOW)),
                LATER,
                (0, NOW),
            ),
            _exchange(
                "a mark that this responder did not give",
                _request(OURS, total=True, mark=True, since=mark_of(7)),
                wire.ReconResponse(version=PROTOCOL_VERSION, status=wire.UNKNOWN_MARK),
                LATER,
            ),
        ],
        "arithmetic": {
            "own": _total(OURS),
            "offered": [53, 55],
            "needed": [45, 50, 52, 54],
            "stated": _total(ARRIVED[PROVED:NOW]),
        },
    }


def _view(numbers: list[int]) -> View:
    universe = universe_of("many")
    return View(index_of([universe[n] for n in numbers]), HEADER.key())


def _total(numbers: list[int]) -> dict[str, Any]:
    total = _view(numbers).total()
    return {"count": total.count, "sum": total.sum.hex()}


def _request(mine: list[int], **fields: Any) -> wire.ReconRequest:
    """The whole space, compared."""
    view = _view(mine)
    hashes, counts = view.summaries(view.locate(WHOLE))
    return wire.ReconRequest(
        version=PROTOCOL_VERSION,
        session=HEADER.message(),
        ranges=pack_asks(Asks(WHOLE, np.array([False]), counts, hashes), 4, 8, PHASE_NONE),
        **fields,
    )


def _about(fetch: wire.Fetch, *, since: int, up_to: int | None = None) -> wire.ReconRequest:
    return wire.ReconRequest(
        version=PROTOCOL_VERSION,
        session=HEADER.message(),
        fetch=fetch,
        since=mark_of(since),
        up_to=b"" if up_to is None else mark_of(up_to),
    )


def _fetch(names: list[int] | None = None) -> wire.Fetch:
    """Of elements by name, or of everything in a range."""
    span = WHOLE if names else RangeColumns.of(Range(Bound((1 << 63) + 15_000), END))
    universe = universe_of("many")
    short_ids = b""
    if names:
        short_ids = _view([]).short_ids(*columns_of(universe[n] for n in names)).tobytes()
    runs, bounds = pack_ranges(span)
    counts = pack_counts(np.array([len(names or ())]))
    return wire.Fetch(runs=runs, bounds=bounds, counts=counts, short_ids=short_ids)


def _said(
    name: str,
    request: wire.ReconRequest,
    arrived: int,
    between: tuple[int, int],
    *,
    mark: int | None = None,
) -> dict[str, Any]:
    """An exchange when so many had arrived, about those between two moments; of a fetch the element numbers."""
    view = _view(ARRIVED[slice(*between)])
    response = respond(view, request)
    response.mark = b"" if mark is None else mark_of(mark)
    row = _exchange(name, request, response, arrived)
    if request.HasField("fetch"):
        universe = universe_of("many")
        found = resolve(view, read_fetch(request.fetch))
        elements = zip(found.orders.tolist(), map(bytes, found.ids), strict=True)
        row["found"] = [universe.index(each) for each in elements]
    return row


def _exchange(
    name: str, request: wire.ReconRequest, response: wire.ReconResponse, arrived: int
) -> dict[str, Any]:
    """`arrived`: how many elements had arrived at the responder when it answered."""
    return {
        "name": name,
        "arrived": arrived,
        "request": request.SerializeToString().hex(),
        "response": response.SerializeToString().hex(),
    }
