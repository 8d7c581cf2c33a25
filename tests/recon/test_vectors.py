"""The published vectors are what the engine speaks, and what the document says without it."""

from __future__ import annotations

import json
from typing import Any

import blake3
import pytest

from recon.agreement import decode_interest
from recon.codec import COUNT, EQUAL, LIST, SPLIT
from recon.elements import order_of_lamport
from recon.errors import RemoteProtocolError
from recon.events import Need
from recon.fetch import FetchQueue, pack_fetch, read_fetch, resolve
from recon.initiator import Initiator, Options
from recon.responder import respond
from recon.view import View
from sdstore.sds.codec import decode
from sdstore.sds.model import claim_id, entry_digest
from sdstore.wire.recon_pb2 import UNKNOWN_MARK, Interest, Item, ReconRequest, ReconResponse
from tests.recon import plain, vector_sets
from tests.recon.plain_columns import Reader, pack_bounds, pack_counts, pack_kinds, pack_varint
from tests.recon.plain_set import END, START, Element, KeyedSet, position, session_key
from tests.recon.vector_talks import FEW, initiator_of
from tests.recon.vectors import PATH, text
from tests.support.recon_talk import HEADER, view_of

VECTORS = json.loads(PATH.read_text(encoding="utf-8"))
KEY = bytes.fromhex(VECTORS["session"]["key"])
FRAME_BYTES = 8 << 20  # where a request leaves it to the responder
Exchange = tuple[ReconRequest, ReconResponse]


def named(rows: list[dict[str, Any]], name: str = "name") -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=[row[name] for row in rows])


def exchanges_of(row: dict[str, Any]) -> list[Exchange]:
    return [
        (
            ReconRequest.FromString(bytes.fromhex(each["request"])),
            ReconResponse.FromString(bytes.fromhex(each["response"])),
        )
        for each in row["exchanges"]
    ]


def universe(name: str) -> list[Element]:
    """As the file itself tells how to make it."""
    rule = VECTORS["universes"][name]
    if "elements" in rule:
        return [(int(order), bytes.fromhex(raw)) for order, raw in rule["elements"]]
    head = bytes(8) if "head" in rule else b""
    return [
        (
            int(rule["first_order"]) + n // rule["elements_per_order"] * rule["order_step"],
            (head + blake3.blake3(n.to_bytes(8, "little")).digest())[:32],
        )
        for n in range(rule["count"])
    ]


def side(spec: dict[str, Any]) -> KeyedSet:
    first = enumerate(universe(spec["universe"])[: spec["count"]])
    return KeyedSet((e for n, e in first if n not in spec["without"]), KEY)


def test_the_file_holds_what_the_engine_speaks() -> None:
    assert PATH.read_text(encoding="utf-8") == text()


# By the document alone.


def test_the_key_follows_the_document() -> None:
    session = {name: bytes.fromhex(raw) for name, raw in VECTORS["session"].items()}
    key = session_key(session["initiator_nonce"], session["responder_nonce"], session["interest"])
    assert key == session["key"]


def test_interests_have_the_bytes_and_the_names_of_the_document() -> None:
    for row in VECTORS["interests"]["canonical"]:
        fields = {name: row[name] for name in row.keys() - {"bytes", "name"}}
        raw = Interest(**fields).SerializeToString(deterministic=True)
        assert raw.hex() == row["bytes"]
        assert blake3.blake3(raw).digest(length=16).hex() == row["name"]


def test_a_mutual_interest_covers_what_both_cover() -> None:
    channels = ["", "a", "a/1", "ab", "b", "c", "é", "/x/", "/x/y", "/x/yz", "/x"]
    for row in VECTORS["interests"]["mutual"]:
        ours, theirs, mutual = (
            Interest.FromString(bytes.fromhex(row[name])) for name in ("ours", "theirs", "mutual")
        )
        for channel in channels:
            both = covers(ours, channel) and covers(theirs, channel)
            assert covers(mutual, channel) == both
        for lamport in (-(2**63), -6, -5, -1, 0, 99, 100, 2**63 - 1):
            assert inside(mutual, lamport) == (inside(ours, lamport) and inside(theirs, lamport))


def covers(interest: Interest, channel: str) -> bool:
    return (
        interest.all
        or channel in interest.channels
        or any(channel.startswith(prefix) for prefix in interest.prefixes)
    )


def inside(interest: Interest, lamport: int) -> bool:
    is_early = interest.HasField("lamport_from") and lamport < interest.lamport_from
    is_late = interest.HasField("lamport_to") and lamport >= interest.lamport_to
    return not (is_early or is_late)


def test_hashes_are_those_of_the_document() -> None:
    summary = VECTORS["summary"]
    elements = [(int(row["order"]), bytes.fromhex(row["id"])) for row in summary["elements"]]
    mine = KeyedSet(elements, KEY)
    for row, element in zip(summary["elements"], elements, strict=True):
        assert mine.lanes(element) == (int(row["low"]), int(row["high"]))
        assert mine.short_id(element).hex() == row["short_id"]
    whole = mine.summary((START, END))
    assert whole == (bytes.fromhex(summary["hash"]), summary["count"])


def test_columns_are_those_of_the_document() -> None:
    rows = VECTORS["columns"]
    raws = {name: bytes.fromhex(rows[name]["bytes"]) for name in rows.keys() - {"implied_counts"}}
    numbers = [int(number) for number in rows["varints"]["numbers"]]
    assert b"".join(map(pack_varint, numbers)) == raws["varints"]
    assert pack_counts(rows["counts"]["counts"]) == raws["counts"]
    assert Reader(raws["counts"]).counts(5) == rows["counts"]["counts"]
    assert pack_kinds(rows["kinds"]["kinds"]) == raws["kinds"]
    steps = [int(step) for step in rows["bounds"]["steps"]]
    heads = [int(head, 16) for head in rows["bounds"]["heads"]]
    assert pack_bounds(steps, heads) == raws["bounds"]
    assert Reader(raws["bounds"]).bounds(5) == list(zip(steps, heads, strict=True))
    assert pack_bounds([0] * 17, [0] * 16 + [1 << 63]) == raws["bounds_without_steps"]
    assert Reader(raws["bounds_without_steps"]).bounds(17)[16] == (0, 1 << 63)
    for row in rows["implied_counts"]:
        assert plain.implied_counts(row["count"], row["parts"], row["phase"]) == row["counts"]


@named(VECTORS["talks"])
def test_a_plain_responder_says_the_same_byte_for_byte(row: dict[str, Any]) -> None:
    ours, theirs = side(row["initiator"]), side(row["responder"])
    for request, response in exchanges_of(row):
        for ask in plain.read_asks(request.ranges):
            assert ask.summary in (None, ours.summary(ask.span))
        frame_bytes = request.response_bytes_max or FRAME_BYTES
        answered = response.answers.answered
        answers = plain.respond(theirs, request.ranges, answered, frame_bytes)
        if row["responder"]["universe"] == "alike":  # elements that agree may stand in any sequence
            for each in (answers, response.answers):
                names = each.short_ids
                each.short_ids = b"".join(sorted(names[n : n + 6] for n in range(0, len(names), 6)))
        assert answers == response.answers
        assert response.HasField("total") == request.total
        if request.total:
            assert theirs.total() == (response.total.count, response.total.sum)
        assert response.ByteSize() <= frame_bytes or row["responder"]["universe"] == "alike"


@named([row for row in VECTORS["talks"] if "have" in row])
def test_a_plain_initiator_learns_what_differs(row: dict[str, Any]) -> None:
    ours, theirs = side(row["initiator"]), side(row["responder"])
    have: set[Element] = set()
    need: set[Element] = set()
    for request, response in exchanges_of(row):
        learned = plain.learn(ours, request.ranges, response.answers)
        have.update(learned.have)
        for span, names in learned.need:
            need.update(
                e for e in theirs.inside(span) if names is None or theirs.short_id(e) in names
            )
    assert have == set(ours.elements) - set(theirs.elements)
    assert need == set(theirs.elements) - set(ours.elements)
    numbered = universe(row["initiator"]["universe"])
    assert [sorted(map(numbered.index, some)) for some in (have, need)] == [
        row["have"],
        row["need"],
    ]


def test_a_range_that_cannot_be_split_is_listed_at_any_length() -> None:
    (row,) = [each for each in VECTORS["talks"] if each["responder"]["universe"] == "alike"]
    ((request, response),) = exchanges_of(row)
    ((_, answer),) = plain.read_answers(request.ranges, response.answers)
    assert (answer.kind, len(answer.short_ids)) == (LIST, 800)
    assert response.ByteSize() > request.response_bytes_max == 4096


def test_every_kind_of_answer_and_every_column_is_in_the_vectors() -> None:
    said = [each for row in VECTORS["talks"] for each in exchanges_of(row)]
    read = [(request, each.answers) for request, each in said if each.HasField("answers")]
    answers = [each for pair in read for each in plain.read_answers(pair[0].ranges, pair[1])]
    assert {answer.kind for _, answer in answers} == {EQUAL, SPLIT, LIST, COUNT}
    assert {"part_counts", "bounds", "short_ids"} <= {
        field.name for _, each in read for field, _ in each.ListFields()
    }
    assert any(each.answered < len(plain.read_asks(request.ranges)) for request, each in read)
    assert any(ask.summary is None and answer.kind == SPLIT for ask, answer in answers)
    assert any(part.span[0][1] for _, answer in answers for part in answer.parts)


@named(VECTORS["fetches"])
def test_a_plain_responder_finds_what_a_fetch_asks_for(row: dict[str, Any]) -> None:
    fetch = ReconRequest.FromString(bytes.fromhex(row["request"])).fetch
    found = plain.serve(side(row["responder"]), fetch)
    assert found == [universe("many")[n] for n in row["found"]]


# Marks: the elements that arrived between two moments, by the document alone.


def between(request: ReconRequest, arrived: int) -> KeyedSet:
    """The elements that an answer is about, when so many had arrived."""
    news = VECTORS["news"]
    moments = {bytes.fromhex(each["mark"]): each["arrived"] for each in news["marks"]}
    after = moments[request.since] if request.since else 0
    up_to = moments[request.up_to] if request.up_to else arrived
    everything = universe(news["universe"])
    return KeyedSet([everything[n] for n in news["arrived"][after:up_to]], KEY)


@pytest.mark.parametrize("row", VECTORS["news"]["exchanges"], ids=lambda row: row["name"])
def test_a_plain_responder_answers_between_the_marks_of_a_request(row: dict[str, Any]) -> None:
    request = ReconRequest.FromString(bytes.fromhex(row["request"]))
    response = ReconResponse.FromString(bytes.fromhex(row["response"]))
    marks = {each["mark"] for each in VECTORS["news"]["marks"]}
    if {each.hex() for each in (request.since, request.up_to) if each} - marks:
        assert response == ReconResponse(version=3, status=UNKNOWN_MARK)
        return
    theirs = between(request, row["arrived"])
    given = [
        each["arrived"] for each in VECTORS["news"]["marks"] if each["mark"] == response.mark.hex()
    ]
    assert given == ([row["arrived"]] if request.mark else [])
    if request.total:
        assert theirs.total() == (response.total.count, response.total.sum)
    if request.HasField("fetch"):
        everything = universe(VECTORS["news"]["universe"])
        assert plain.serve(theirs, request.fetch) == [everything[n] for n in row["found"]]
    else:
        answered = response.answers.answered
        assert plain.respond(theirs, request.ranges, answered, FRAME_BYTES) == response.answers


def test_what_was_found_explains_the_difference_of_the_totals() -> None:
    news, everything = VECTORS["news"], universe(VECTORS["news"]["universe"])
    rows = news["arithmetic"]
    none = KeyedSet([], KEY)

    def lanes(numbers: list[int]) -> list[int]:
        return [
            sum(lane) for lane in zip(*(none.lanes(everything[n]) for n in numbers), strict=True)
        ]

    offered, needed = lanes(rows["offered"]), lanes(rows["needed"])
    own = bytes.fromhex(rows["own"]["sum"])
    halves = [int.from_bytes(own[at : at + 8], "little") for at in (0, 8)]
    found = [(a - b + c) % 2**64 for a, b, c in zip(halves, offered, needed, strict=True)]
    count = rows["own"]["count"] - len(rows["offered"]) + len(rows["needed"])
    stated = rows["stated"]
    assert b"".join(each.to_bytes(8, "little") for each in found).hex() == stated["sum"]
    assert count == stated["count"]
    assert KeyedSet([everything[n] for n in news["initiator"]["news"]], KEY).total() == (
        rows["own"]["count"],
        own,
    )


def test_the_elements_of_entries_and_claims_follow_from_frames_and_hints() -> None:
    for row in VECTORS["content"]["entries"]:
        hints = [bytes.fromhex(hint) for hint in row["hints"]]
        item = Item.Entry(frame=bytes.fromhex(row["frame"]), hints=hints)
        (order, digest), *claims = elements_of_entry(item)
        assert (str(order), digest.hex()) == (row["order"], row["digest"])
        assert [raw.hex() for _, raw in claims] == row["claims"]


def test_what_a_fetch_brings_is_what_it_asked_for_and_goes_on_at_the_bound() -> None:
    rows = VECTORS["content"]["entries"]
    held = [
        (int(row["order"]), bytes.fromhex(raw))
        for row in rows
        for raw in (row["digest"], *row["claims"])
    ]
    mine, orders = KeyedSet(held, KEY), {row["digest"]: int(row["order"]) for row in rows}
    fetched = [pair for pair in exchanges_of(VECTORS["content"]) if pair[0].HasField("fetch")]
    for request, response in fetched:
        brought = set()
        for item in response.items:
            if item.HasField("entry"):
                named, *claims = elements_of_entry(item.entry)
                assert named == (item.order, item.id)
                brought.update((named, *claims))
            elif item.HasField("claim"):
                assert item.order == orders[item.claim.digest.hex()]
                brought.add((item.order, claim_id(item.claim.digest, item.claim.hint)))
            else:
                assert item.id.hex() == VECTORS["content"]["lost"]
                hints = item.absent.hints
                brought.update((item.order, claim_id(item.id, hint)) for hint in hints)
                brought.add((item.order, item.id))
        halves = (response.resume[:8], response.resume[8:])
        end = tuple(int.from_bytes(half, "big") for half in halves)
        asked = plain.serve(mine, request.fetch)
        if response.truncated:
            asked = [each for each in asked if position(each) < end]
        assert brought == set(asked)
    assert [response.truncated for _, response in fetched] == [True, False, False]


def elements_of_entry(entry: Item.Entry) -> list[Element]:
    message, _ = decode(entry.frame)
    assert message.lamport_timestamp is not None
    order, digest = order_of_lamport(message.lamport_timestamp), entry_digest(message)
    return [(order, digest), *((order, claim_id(digest, hint)) for hint in entry.hints)]


# By the engine: what must be refused.


@named(VECTORS["interests"]["refused"], "why")
def test_an_interest_that_is_not_canonical_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError) as refusal:
        decode_interest(bytes.fromhex(row["bytes"]))
    assert refusal.value.code == row["code"]


@named(VECTORS["refused_requests"], "why")
def test_a_bad_request_is_refused_with_its_code(row: dict[str, Any]) -> None:
    request = ReconRequest.FromString(bytes.fromhex(row["bytes"]))
    theirs = vector_sets.view_of(FEW)
    with pytest.raises(RemoteProtocolError) as refusal:
        answer(theirs, request)
    assert refusal.value.code == row["code"]


def answer(theirs: View, request: ReconRequest) -> None:
    respond(theirs, request)
    resolve(theirs, read_fetch(request.fetch))


@named(VECTORS["refused_responses"]["responses"], "why")
def test_a_bad_response_is_refused_with_its_code(row: dict[str, Any]) -> None:
    talk = next(
        each for each in VECTORS["talks"] if each["name"] == VECTORS["refused_responses"]["to"]
    )
    initiator = initiator_of(talk["initiator"], 1 << 20)
    request = initiator.next_request()
    assert request is not None
    assert request.message == exchanges_of(talk)[0][0]
    response = ReconResponse.FromString(bytes.fromhex(row["bytes"]))
    (event,) = initiator.receive(request.request_id, response)
    assert event.error.code == row["code"]


def test_the_worked_example_of_the_document_is_what_is_said() -> None:
    everything = [(order, bytes([96 + order]) * 32) for order in range(1, 9)]
    initiator = Initiator(view_of(everything[:1]), HEADER, options=Options(parts=2, list_max=2))
    initiator._phase = lambda: 64  # type: ignore[method-assign]
    theirs, said = view_of(everything), []
    needs = FetchQueue(view_of(everything[:1]))
    while (request := initiator.next_request()) is not None:
        ranges, answers = request.message.ranges, respond(theirs, request.message).answers
        said.append(
            [ranges.runs.hex(), ranges.bounds.hex(), ranges.asks.hex(), ranges.counts.hex()]
        )
        said.append([answers.kinds.hex(), answers.counts.hex(), answers.bounds.hex()])
        response = respond(theirs, request.message)
        for event in initiator.receive(request.request_id, response):
            if isinstance(event, Need):
                needs.add(event)
    fetch = pack_fetch(needs.next_batch(100))
    said.append([fetch.runs.hex(), fetch.bounds.hex(), fetch.counts.hex()])
    assert len(fetch.short_ids) == 18
    assert len(resolve(theirs, read_fetch(fetch)).ids) == 7
    assert said == [
        ["07", "", "", "02"],
        ["01", "10", "000500"],
        ["05", "000500", "01", ""],
        ["02", "08", ""],
        ["0b", "000500", "0605"],
    ]
