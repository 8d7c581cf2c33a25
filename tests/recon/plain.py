"""docs/recon-protocol.md once more: plain Python, one element at a time, nothing of the engine.

The vectors are checked against this and against the engine, so the document alone must suffice.
Section numbers are the document's. What it leaves to the implementation is done as it advises.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

from sdstore.wire.recon_pb2 import Answers, Fetch, Ranges
from tests.recon.plain_columns import (
    Bound,
    Reader,
    pack_bounds,
    pack_counts,
    pack_kinds,
    pack_varint,
)
from tests.recon.plain_set import END, START, WORD, Element, KeyedSet, Range, position

EQUAL, SPLIT, LIST, COUNT = range(4)
LIST_MAX = 4096


# Sections 4 and 5: bounds, requests.


def bound_between(below: Element, above: Element) -> Bound | None:
    """The roundest bound between two neighbours; None where there is none."""
    (a, head_a), (b, head_b) = position(below), position(above)
    if a != b:
        differing = (a ^ b).bit_length() - 1
        return b >> differing << differing, 0
    if head_a == head_b:
        return None
    cleared = ((head_a ^ head_b).bit_length() - 1) // 8 * 8
    return b, head_b >> cleared << cleared


def read_ranges(runs_raw: bytes, bounds_raw: bytes) -> list[Range]:
    """The ranges of a request or of a fetch."""
    runs = _read_runs(runs_raw)
    if not runs:
        assert not bounds_raw
        return []
    first, flags = runs[0] >> 2, runs[0] & 3
    lengths = [first, *runs[1:]]
    from_start, to_end = flags & 1, flags >> 1
    reader = Reader(bounds_raw)
    sent = reader.bounds(sum(lengths) + len(lengths) - from_start - to_end)
    reader.end()
    orders = accumulate(step for step, _ in sent)
    edges = [(order % WORD, head) for order, (_, head) in zip(orders, sent, strict=True)]
    edges = [START] * from_start + edges + [END] * to_end
    ranges, at = [], 0
    for length in lengths:
        ranges += pairwise(edges[at : at + length + 1])
        at += length + 1
    assert all(lower < upper for lower, upper in ranges)
    assert all(a[1] <= b[0] for a, b in pairwise(ranges))
    return ranges


def _read_runs(raw: bytes) -> list[int]:
    reader = Reader(raw)
    runs = [reader.varint() for _ in range(sum(byte < 0x80 for byte in raw))]
    reader.end()
    return runs


class Ask(NamedTuple):
    """One range of a request; `summary` None: list it."""

    span: Range
    summary: tuple[bytes, int] | None


def read_asks(message: Ranges) -> list[Ask]:
    """The contents of a request."""
    spans = read_ranges(message.runs, message.bounds)
    listed = [bool(message.asks and message.asks[n // 8] >> n % 8 & 1) for n in range(len(spans))]
    compared = listed.count(False)
    counts, hashes = Reader(message.counts), Reader(message.hashes)
    summaries = iter([(hashes.take(6), count) for count in counts.counts(compared)])
    counts.end()
    hashes.end()
    return [
        Ask(span, None if is_list else next(summaries))
        for span, is_list in zip(spans, listed, strict=True)
    ]


# Section 6: answers.


def respond(mine: KeyedSet, message: Ranges, answered: int, frame_bytes: int) -> Answers:
    """The answers to the first `answered` ranges. How many fit is the responder's own affair."""
    kinds, told, splits, short_ids = [], [], [], b""
    for span, theirs in read_asks(message)[:answered]:
        elements = mine.inside(span)
        kind = _kind(mine.summary(span), theirs, message.list_max, frame_bytes)
        cuts = _cuts(elements, message.parts, message.phase) if kind == SPLIT else []
        if kind == SPLIT and not any(cut for _, cut in cuts):
            kind = LIST
        kinds.append(kind)
        if kind != EQUAL:
            told.append(len(elements))
        if kind == LIST:
            short_ids += b"".join(map(mine.short_id, elements))
        if kind == SPLIT:
            splits.append((span, cuts))
    implied = all(cut for _, cuts in splits for _, cut in cuts)
    tiles = [_tile(span, [cut for _, cut in cuts if cut]) for span, cuts in splits]
    summaries = [mine.summary(part) for parts in tiles for part in parts]
    steps = [part[0][0] - before[0][0] for parts in tiles for before, part in pairwise(parts)]
    return Answers(
        answered=answered,
        kinds=pack_kinds(kinds) if any(kinds) else b"",
        counts=pack_counts(told),
        part_counts=b""
        if implied
        else b"".join(pack_varint(len(parts)) for parts in tiles)
        + pack_counts([count for _, count in summaries]),
        bounds=pack_bounds(steps, [part[0][1] for parts in tiles for part in parts[1:]]),
        hashes=b"".join(summary for summary, _ in summaries),
        short_ids=short_ids,
    )


def _kind(
    ours: tuple[bytes, int], theirs: tuple[bytes, int] | None, list_max: int, frame_bytes: int
) -> int:
    if theirs == ours:
        return EQUAL
    if theirs is not None and theirs[1] == 0:
        return COUNT
    longest = min(LIST_MAX, frame_bytes // 6)
    wanted = longest if theirs is None else min(list_max, longest)
    return LIST if ours[1] <= max(wanted, 3) else SPLIT


def _cuts(elements: list[Element], parts: int, phase: int) -> list[tuple[int, Bound | None]]:
    """(elements before it, bound) of each inner bound."""
    count = len(elements)
    size = min(parts, count // 2)
    places = (count * (256 * j + phase - 64) // (256 * size) for j in range(1, size))
    return [(place, bound_between(elements[place - 1], elements[place])) for place in places]


def _tile(span: Range, cuts: list[Bound]) -> list[Range]:
    return list(pairwise((span[0], *cuts, span[1])))


class Part(NamedTuple):
    """A part of a split, as the responder tells it."""

    span: Range
    summary: tuple[bytes, int]


class Answer(NamedTuple):
    """The answer to one range."""

    kind: int
    count: int
    parts: list[Part]
    short_ids: list[bytes]


def read_answers(message: Ranges, answers: Answers) -> list[tuple[Ask, Answer]]:
    """Each answered range with its answer, checked as an initiator must."""
    asks = read_asks(message)[: answers.answered]
    assert len(asks) == answers.answered > 0
    kinds = Reader(answers.kinds).kinds(len(asks)) if answers.kinds else [EQUAL] * len(asks)
    told = Reader(answers.counts)
    counts = iter(told.counts(sum(kind != EQUAL for kind in kinds)))
    told.end()
    rows = [(a, k, 0 if k == EQUAL else next(counts)) for a, k in zip(asks, kinds, strict=True)]
    parts = _read_parts(message, answers, [(a.span, count) for a, k, count in rows if k == SPLIT])
    names = Reader(answers.short_ids)
    out = []
    for ask, kind, count in rows:
        listed = [names.take(6) for _ in range(count)] if kind == LIST else []
        out.append((ask, Answer(kind, count, next(parts) if kind == SPLIT else [], listed)))
    names.end()
    return out


def _read_parts(
    message: Ranges, answers: Answers, splits: list[tuple[Range, int]]
) -> Iterator[list[Part]]:
    if answers.part_counts:
        told = Reader(answers.part_counts)
        sizes = [told.varint() for _ in splits]
        flat = iter(told.counts(sum(sizes)))
        told.end()
        counts = [[next(flat) for _ in range(size)] for size in sizes]
    else:
        counts = [implied_counts(count, message.parts, message.phase) for _, count in splits]
    column, hashes = Reader(answers.bounds), Reader(answers.hashes)
    bounds = iter(column.bounds(sum(len(each) - 1 for each in counts)))
    tiled = []
    for (span, count), sizes in zip(splits, counts, strict=True):
        assert 2 <= len(sizes) <= message.parts
        assert min(sizes) > 0
        assert sum(sizes) == count
        cuts, order = [], span[0][0]
        for _ in sizes[1:]:
            step, head = next(bounds)
            order = (order + step) % WORD
            cuts.append((order, head))
        spans = _tile(span, cuts)
        assert all(lower < upper for lower, upper in spans)
        summaries = [(hashes.take(6), size) for size in sizes]
        tiled.append([Part(*row) for row in zip(spans, summaries, strict=True)])
    column.end()
    hashes.end()
    return iter(tiled)


def implied_counts(count: int, parts: int, phase: int) -> list[int]:
    """Elements of each part of a split of `count` elements."""
    size = min(parts, count // 2)
    ends = [count * (256 * j + phase - 64) // (256 * size) for j in range(1, size)]
    return [after - before for before, after in pairwise((0, *ends, count))]


# Section 7: what the initiator learns.


class Learned(NamedTuple):
    """After one answer: elements to send; ranges to fetch, with short ids or (None) whole."""

    have: list[Element]
    need: list[tuple[Range, list[bytes] | None]]


def learn(mine: KeyedSet, message: Ranges, answers: Answers) -> Learned:
    """The table."""
    learned = Learned([], [])
    for (span, _), answer in read_answers(message, answers):
        if answer.kind == COUNT and answer.count:
            learned.need.append((span, None))
        elif answer.kind in (LIST, COUNT):
            names = set(answer.short_ids)
            ours = {mine.short_id(element): element for element in mine.inside(span)}
            learned.have.extend(ours[name] for name in ours.keys() - names)
            if names - ours.keys():
                learned.need.append((span, sorted(names - ours.keys())))
        learned.need.extend(
            (part.span, None) for part in answer.parts if not mine.inside(part.span)
        )
    return learned


# Section 8.2: fetches.


def serve(theirs: KeyedSet, fetch: Fetch) -> list[Element]:
    """The elements that a fetch asks for, ascending."""
    spans = read_ranges(fetch.runs, fetch.bounds)
    column, names = Reader(fetch.counts), Reader(fetch.short_ids)
    wanted = [{names.take(6) for _ in range(count)} for count in column.counts(len(spans))]
    column.end()
    names.end()
    return [
        element
        for span, some in zip(spans, wanted, strict=True)
        for element in theirs.inside(span)
        if not some or theirs.short_id(element) in some
    ]
