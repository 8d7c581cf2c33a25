"""Sessions that read as a conversation, and the seed's table row by row.

Elements are letters (their place in the alphabet is the order). A range is written from its first
possible letter to before its end: `[a c)`; `^` and `$` are the ends of the space.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from recon.codec import COUNT, EQUAL, LIST, SPLIT, unpack_asks, unpack_reply
from recon.elements import END, START, Bound, Range
from recon.events import Event, Have, Need, Stated
from recon.fetch import pack_fetch, read_fetch, resolve
from recon.initiator import Initiator, Options
from recon.limits import DEFAULT_LIMITS
from recon.responder import respond
from recon.worklist import RangeState
from tests.support.recon_talk import HEADER, converse, honest, summary_of, view_of

OPTIONS = Options(parts=2, list_max=2)


def letters(text: str) -> list[tuple[int, bytes]]:
    return [(ord(letter) - 96, letter.encode() * 32) for letter in text]


def word(ids: np.ndarray) -> str:
    return "".join(sorted(chr(row[0]) for row in ids)) or "nothing"


def name(bound: Bound) -> str:
    if bound in (START, END):
        return "^" if bound == START else "$"
    return chr(bound.order + 96)


def span(range_: Range) -> str:
    return f"[{name(range_.lower)} {name(range_.upper)})"


def told(event: Event, theirs: object) -> str:
    if isinstance(event, Have):
        return f"cat sends {word(event.ids)}"
    if isinstance(event, Need):
        return f"cat fetches {word(resolve(theirs, read_fetch(pack_fetch([event]))).ids)}"
    assert isinstance(event, Stated)
    return f"dog holds {event.count}, and they are {'' if event.agrees else 'not '}cat's"


def conversation(cat: str, dog: str) -> str:
    """The conversation, line by line."""
    mine, yours = view_of(letters(cat)), view_of(letters(dog))
    initiator = Initiator(mine, HEADER, options=OPTIONS, limits=DEFAULT_LIMITS)
    # Cuts in the middle, so that the words are the same whatever the seed.
    initiator._phase = lambda: 64  # type: ignore[method-assign]
    lines = [f"cat: {cat or 'nothing'}  dog: {dog or 'nothing'}"]
    while (request := initiator.next_request()) is not None:
        asks = unpack_asks(request.message.ranges, 100)
        request_id, response = request.request_id, respond(yours, request.message)
        ranges = request.message.ranges
        reply, _ = unpack_reply(response.answers, asks.ranges, ranges.parts, ranges.phase)
        said = iter(reply.parts.counts.tolist())
        sizes = iter(reply.parts.sizes.tolist())
        for place, kind in enumerate(reply.kinds.tolist()):
            ask = "list?" if asks.listed[place] else f"#{asks.counts[place]}"
            count = reply.counts[place]
            answer = {
                EQUAL: "equal",
                LIST: f"list of {count}",
                COUNT: f"#{count}",
                SPLIT: "split",
            }[kind]
            if kind == SPLIT:
                answer += "".join(f" #{next(said)}" for _ in range(next(sizes)))
            lines.append(f"  cat: {span(asks.ranges[place])} {ask}  dog: {answer}")
        events = initiator.receive(request.request_id, response)
        lines += [f"  {told(event, yours)}" for event in events]
    assert initiator.done
    lines.append(f"  done after {request_id}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "expected",
    [
        """\
cat: ab  dog: ab
  cat: [^ b) #1  dog: equal
  cat: [b $) #1  dog: equal
  dog holds 2, and they are cat's
  done after 1""",
        """\
cat: nothing  dog: abcd
  cat: [^ $) #0  dog: #4
  dog holds 4, and they are not cat's
  cat fetches abcd
  done after 1""",
        """\
cat: abc  dog: nothing
  cat: [^ b) #1  dog: list of 0
  cat: [b c) #1  dog: list of 0
  cat: [c $) #1  dog: list of 0
  dog holds 0, and they are not cat's
  cat sends abc
  done after 1""",
        """\
cat: ab  dog: bc
  cat: [^ b) #1  dog: list of 0
  cat: [b $) #1  dog: list of 2
  dog holds 2, and they are not cat's
  cat sends a
  cat fetches c
  done after 1""",
    ],
    ids=["equal", "we nothing", "they nothing", "both and different"],
)
def test_the_four_rows_of_the_seeds_table(expected: str) -> None:
    first = expected.splitlines()[0].split()
    cat, dog = (text.replace("nothing", "") for text in (first[1], first[3]))
    assert conversation(cat, dog) == expected


def test_a_long_range_is_split_and_only_the_differing_part_is_pursued() -> None:
    assert conversation("a", "abcdefgh") == (
        "cat: a  dog: abcdefgh\n"
        "  cat: [^ $) #1  dog: split #4 #4\n"
        "  dog holds 8, and they are not cat's\n"
        "  cat fetches efgh\n"
        "  cat: [^ e) list?  dog: list of 4\n"
        "  cat fetches bcd\n"
        "  done after 2"
    )


def test_split_the_range_and_push_the_parts_on_the_work_list() -> None:
    everything = [(order, order.to_bytes(2, "big") * 16) for order in range(1, 4001)]
    mine, yours = view_of(everything[:-700]), view_of(everything[5:])
    initiator = Initiator(mine, HEADER)
    request = initiator.next_request()
    assert request is not None
    assert initiator.progress.elements[RangeState.SYNCING] == len(mine)
    initiator.receive(request.request_id, respond(yours, request.message))
    states = initiator.progress.elements
    assert states[RangeState.IN_SYNC] > 0
    assert states[RangeState.SYNCING] > 0
    assert states[RangeState.DONT_HAVE] > 0
    shares = [segment.state for segment in initiator.progress.segments]
    assert shares[-1] is RangeState.DONT_HAVE
    assert all(a is not b for a, b in pairwise(shares))


def test_the_responder_answers_a_prefix_and_the_rest_stays_on_the_work_list() -> None:
    everything = [(order, order.to_bytes(2, "big") * 16) for order in range(1, 30_001)]
    mine, yours = view_of(everything[::2]), view_of(everything[1::2])
    initiator = Initiator(mine, HEADER)
    limits = replace(DEFAULT_LIMITS, response_bytes_max=4096)
    request = initiator.next_request()
    assert request is not None
    initiator.receive(request.request_id, respond(yours, request.message))
    request = initiator.next_request()
    assert request is not None
    asked = len(unpack_asks(request.message.ranges, 1 << 16).ranges)
    response = respond(yours, request.message, limits)
    assert 0 < response.answers.answered < asked
    assert response.ByteSize() <= 4096
    before = initiator.progress.elements[RangeState.SYNCING]
    initiator.receive(request.request_id, response)
    assert 0 < initiator.progress.elements[RangeState.SYNCING] <= before
    out = converse(initiator, honest(yours))
    told = [len(event.ids) for event in out.events if isinstance(event, Have)]
    assert sum(told) > 14_000


def test_count_decides_emptiness_never_the_hash() -> None:
    empty, full = view_of([]), view_of(letters("abc"))
    assert summary_of(empty)[1] == 0
    request = Initiator(empty, HEADER).next_request()
    assert request is not None
    request.message.ranges.hashes = summary_of(full)[0]
    assert list(respond(full, request.message).answers.kinds) == [COUNT]
