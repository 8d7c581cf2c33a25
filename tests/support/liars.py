"""Peers that lie: responders that are greedy, malformed or contradict themselves.

None of them knows how columns are written. They lie by answering from other sets than their own,
by answering another question, or by damaging bytes, and so outlive every change of the format.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from recon.agreement import SessionHeader
from recon.elements import Bound, bound_bytes
from recon.fetch import read_fetch
from recon.initiator import Initiator
from recon.limits import FRAME_BYTES_MIN, PARTS_MAX, PROTOCOL_VERSION, Limits
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import Answers, Ranges, ReconRequest, ReconResponse
from tests.support.recon_session import Element, HonestPeer, Reply, view_of

Message = Answers | Ranges | recon_pb2.Fetch
GARBAGE_BYTES_MAX = 4096
FORGED_SET_COUNT = 300
CROWD_COUNT = 1300  # on either side more than the smallest frame can list
_SPACE_BITS = 128  # order and head


def byte_columns(message: Message) -> list[str]:
    """Names of the columns that hold anything."""
    return [name.name for name, value in message.ListFields() if isinstance(value, bytes)]


def damage(message: Message, rng: random.Random) -> None:
    """Change one column in place: cut, extend, flip, fill, swap or invent its bytes."""
    names = [f.name for f in message.DESCRIPTOR.fields if f.type == f.TYPE_BYTES]
    name = rng.choice(byte_columns(message) or names)
    raw = getattr(message, name)
    other = getattr(message, rng.choice(names))
    half = len(raw) // 2
    setattr(
        message,
        name,
        rng.choice(
            [
                raw[: rng.randrange(len(raw) + 1)],
                raw + rng.randbytes(rng.randint(1, 64)),
                flipped(raw, rng),
                bytes(len(raw)),
                b"\xff" * len(raw),
                b"\x80" * len(raw),
                raw[half:] + raw[:half],
                raw[::-1],
                raw * 2,
                other,
                rng.randbytes(rng.randrange(GARBAGE_BYTES_MAX)),
            ]
        ),
    )


def flipped(raw: bytes, rng: random.Random) -> bytes:
    """One bit differs."""
    if not raw:
        return raw
    out = bytearray(raw)
    out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


@dataclass(slots=True)
class World:
    """The knowledge of a liar: everything."""

    header: SessionHeader
    ours: frozenset[Element]  # the initiator's
    theirs: frozenset[Element]  # its own, when it chooses to be honest
    limits: Limits
    rng: random.Random
    honest: HonestPeer = field(init=False)

    def __post_init__(self) -> None:
        self.honest = self.peer(self.theirs)

    def peer(self, elements: frozenset[Element] | set[Element]) -> HonestPeer:
        """An honest responder over any set."""
        return HonestPeer(view_of(elements, self.header), self.limits)

    def forged(self) -> set[Element]:
        """Elements that neither side has, beside the initiator's own."""
        orders = [order for order, _ in self.ours] or [0]
        near = (self.rng.choice(orders) + self.rng.randint(-2, 2) for _ in range(FORGED_SET_COUNT))
        return {(order % 2**64, self.rng.randbytes(32)) for order in near}


Strategy = Callable[["Liar", ReconRequest], Reply]


@dataclass(slots=True)
class Liar:
    """A peer that follows a strategy; `turn` counts requests, `kept` is its memory."""

    world: World
    strategy: Strategy
    turn: int = 0
    kept: Reply | None = None

    def answer(self, request: ReconRequest) -> Reply:
        """The lie."""
        self.turn += 1
        return self.strategy(self, request)

    @property
    def rng(self) -> random.Random:
        """Its coin."""
        return self.world.rng

    def honestly(self, request: ReconRequest) -> Reply:
        """The answer of an honest responder."""
        return self.world.honest.answer(request)

    def from_set(self, elements: set[Element], request: ReconRequest) -> Reply:
        """The answer of a responder with another set."""
        return self.world.peer(elements).answer(request)


# Splitting without end


def new_elements_every_time(liar: Liar, request: ReconRequest) -> Reply:
    """Nothing is ever equal, and lists are never what the split before announced."""
    return liar.from_set(liar.world.forged(), request)


def splits_too_finely(liar: Liar, request: ReconRequest) -> Reply:
    """More parts than were wanted."""
    request.ranges.list_max = 0
    if request.ranges.parts:
        request.ranges.parts = PARTS_MAX
    return liar.from_set(liar.world.forged(), request)


def peels(liar: Liar, request: ReconRequest) -> Reply:
    """Elements in ever smaller rings round one of the initiator's: a split takes one bit away.

    Too many for a list in its small frames, so that it may split whatever was asked.
    """
    order, raw = min(liar.world.ours)
    centre = order << 64 | int.from_bytes(raw[:8], "big")
    nearest = 1 << max(_SPACE_BITS - 2 - liar.turn, 10)
    crowd = set()
    for _ in range(CROWD_COUNT):
        distance = liar.rng.choice([-1, 1]) * (nearest + liar.rng.randrange(nearest))
        order, head = divmod((centre + distance) % (1 << _SPACE_BITS), 1 << 64)
        crowd.add((order, head.to_bytes(8, "big") + bytes(24)))
    frames = replace(liar.world.limits, response_bytes_max=FRAME_BYTES_MIN)
    return HonestPeer(view_of(crowd, liar.world.header), frames).answer(request)


def repeats_itself(liar: Liar, request: ReconRequest) -> Reply:
    """The first answer is the answer to everything: nothing is ever narrowed."""
    liar.kept = liar.kept or liar.honestly(request)
    return liar.kept


def answers_another_question(liar: Liar, request: ReconRequest) -> Reply:
    """Answers as to an initiator that holds nothing."""
    nobody = Initiator(view_of((), liar.world.header), liar.world.header, seed=liar.turn)
    asked = nobody.next_request()
    assert asked is not None
    asked.message.fetch.CopyFrom(request.fetch)
    return liar.honestly(asked.message)


# Wrong summaries


def denies_and_admits(liar: Liar, request: ReconRequest) -> Reply:
    """Holds nothing at every second request."""
    return liar.from_set(set(), request) if liar.turn % 2 else liar.honestly(request)


def counts_too_large(liar: Liar, request: ReconRequest) -> Reply:
    """Counts are as large as their bytes can say."""
    return _with_columns(
        liar.honestly(request), "count", lambda raw: b"\xff" * (len(raw) - 1) + b"\x7f"
    )


def counts_zero(liar: Liar, request: ReconRequest) -> Reply:
    """Counts of ranges that are not empty are zero."""
    return _with_columns(liar.honestly(request), "count", lambda raw: bytes(len(raw)))


def counts_a_little_off(liar: Liar, request: ReconRequest) -> Reply:
    """One bit of the counts differs."""
    return _with_columns(liar.honestly(request), "count", lambda raw: flipped(raw, liar.rng))


def wrong_hashes(liar: Liar, request: ReconRequest) -> Reply:
    """Hashes fit nothing."""
    return _with_columns(liar.honestly(request), "hash", lambda raw: liar.rng.randbytes(len(raw)))


def _with_columns(reply: Reply, word: str, change: Callable[[bytes], bytes]) -> Reply:
    answers = reply.response.answers
    for name in byte_columns(answers):
        if word in name:
            setattr(answers, name, change(getattr(answers, name)))
    return reply


# Malformed answers


def answers_nothing(liar: Liar, request: ReconRequest) -> Reply:
    """A prefix of no ranges at all, for ever."""
    return Reply(ReconResponse(version=request.version, answers=Answers()))


def answers_too_many(liar: Liar, request: ReconRequest) -> Reply:
    """Claims to have answered more than it did."""
    reply = liar.honestly(request)
    reply.response.answers.answered += liar.rng.choice([1, 7, 2**31])
    return reply


def duplicates(liar: Liar, request: ReconRequest) -> Reply:
    """Every column and every element twice."""
    reply = liar.honestly(request)
    for name in byte_columns(reply.response.answers):
        setattr(reply.response.answers, name, getattr(reply.response.answers, name) * 2)
    return Reply(reply.response, reply.elements * 2)


def cuts_columns(liar: Liar, request: ReconRequest) -> Reply:
    """The last bytes of a column are missing."""
    return _resized(liar, request, lambda raw: raw[: liar.rng.randrange(len(raw))])


def extends_columns(liar: Liar, request: ReconRequest) -> Reply:
    """A column has bytes to spare, whole rows of them or not."""
    surplus = liar.rng.choice([1, 2, 6, 8, 12, 16, 600])
    return _resized(liar, request, lambda raw: raw + bytes(surplus))


def _resized(liar: Liar, request: ReconRequest, change: Callable[[bytes], bytes]) -> Reply:
    reply = liar.honestly(request)
    answers = reply.response.answers
    name = liar.rng.choice(byte_columns(answers) or ["hashes"])
    setattr(answers, name, change(getattr(answers, name) or b"\0"))
    return reply


def random_bytes(liar: Liar, request: ReconRequest) -> Reply:
    """Every column is noise."""
    answers = Answers(answered=liar.rng.randint(1, 20))
    for name in (f.name for f in answers.DESCRIPTOR.fields if f.type == f.TYPE_BYTES):
        setattr(answers, name, liar.rng.randbytes(liar.rng.randrange(200)))
    return Reply(ReconResponse(version=request.version, answers=answers))


def damaged_bytes(liar: Liar, request: ReconRequest) -> Reply:
    """One column is damaged, in any way."""
    reply = liar.honestly(request)
    damage(reply.response.answers, liar.rng)
    return reply


def disordered_bounds(liar: Liar, request: ReconRequest) -> Reply:
    """Bounds are reversed or turned round: inverted, overlapping, outside."""
    half = liar.rng.random()
    change: Callable[[bytes], bytes] = liar.rng.choice(
        [
            lambda raw: raw[::-1],
            lambda raw: raw[int(half * len(raw)) :] + raw[: int(half * len(raw))],
            lambda raw: bytes(len(raw)),
        ]
    )
    return _with_columns(liar.honestly(request), "bounds", change)


# Content that was not asked for, or never comes


def offers_what_it_never_serves(liar: Liar, request: ReconRequest) -> Reply:
    """Lists short ids of elements that do not exist, and serves none."""
    reply = liar.from_set(liar.world.forged() | liar.world.theirs, request)
    reply.response.ClearField("truncated")
    reply.response.ClearField("resume")
    return Reply(reply.response)


def serves_what_was_not_asked(liar: Liar, request: ReconRequest) -> Reply:
    """Adds elements of its own choice to the requested ones."""
    reply = liar.honestly(request)
    return Reply(reply.response, reply.elements + tuple(liar.world.forged()))


def resumes_where_it_began(liar: Liar, request: ReconRequest) -> Reply:
    """Serves nothing and says that it was cut at once."""
    return _resuming(liar, request, step=0)


def resumes_crawling(liar: Liar, request: ReconRequest) -> Reply:
    """Serves nothing and moves the cursor by the smallest step there is."""
    return _resuming(liar, request, step=1)


def _resuming(liar: Liar, request: ReconRequest, *, step: int) -> Reply:
    reply = liar.honestly(request)
    wanted = read_fetch(request.fetch, liar.world.limits)
    if not len(wanted.ranges):
        return reply
    lower = wanted.ranges[0].lower
    order, head = divmod((lower.order << 64) + lower.head + step, 2**64)
    reply.response.truncated = True
    reply.response.resume = bound_bytes(Bound(order, head))
    return Reply(reply.response)


def resumes_anywhere(liar: Liar, request: ReconRequest) -> Reply:
    """A cursor of random bytes, of any length."""
    reply = liar.honestly(request)
    reply.response.truncated = True
    reply.response.resume = liar.rng.randbytes(liar.rng.choice([0, 8, 15, 16, 16, 16, 17]))
    return Reply(reply.response)


# Statuses


def nonce_always_expired(liar: Liar, request: ReconRequest) -> Reply:
    """No nonce is ever good."""
    nonce = liar.rng.randbytes(16)
    return Reply(ReconResponse(status=recon_pb2.NONCE_EXPIRED, responder_nonce=nonce))


def nonce_malformed(liar: Liar, request: ReconRequest) -> Reply:
    """The new nonce is missing, or equals the expired one."""
    nonces = [b"", b"x", bytes(17), request.session.responder_nonce]
    return Reply(
        ReconResponse(status=recon_pb2.NONCE_EXPIRED, responder_nonce=liar.rng.choice(nonces))
    )


def interest_always_unknown(liar: Liar, request: ReconRequest) -> Reply:
    """Asks for the interest again and again."""
    return Reply(ReconResponse(status=recon_pb2.UNKNOWN_INTEREST))


def status_from_the_future(liar: Liar, request: ReconRequest) -> Reply:
    """A status that this version does not know."""
    code = liar.rng.randint(6, 100)
    return Reply(ReconResponse.FromString(b"\x08" + bytes([code])))


def huge_columns(size: int, rng: random.Random) -> Iterator[ReconResponse]:
    """Responses of about `size` bytes, in one column or spread over all, that claim much or little."""
    names = [f.name for f in Answers.DESCRIPTOR.fields if f.type == f.TYPE_BYTES]
    for fill in (b"\0", b"\1", b"\x55", b"\x80", b"\xff", rng.randbytes(257)):
        whole = fill * (size // len(fill))
        shared = dict.fromkeys(names, whole[: size // len(names)])
        for columns in (*({name: whole} for name in names), shared):
            for answered in (1, 5, 1 << 16):
                yield ReconResponse(
                    version=PROTOCOL_VERSION, answers=Answers(answered=answered, **columns)
                )


def damaged_request(request: ReconRequest, rng: random.Random) -> ReconRequest:
    """The same with one thing wrong."""
    broken = ReconRequest()
    broken.CopyFrom(request)
    asks = broken.ranges
    name = rng.choice(["columns", "columns", "columns", "fetch", *_NUMBERS])
    if name in _NUMBERS:
        value = rng.choice([0, 1, 2, 63, 64, 65, 128, 129, 4095, 4096, 2**16, 2**32 - 1])
        setattr(broken if name == "response_bytes_max" else asks, name, value)
    else:
        damage(broken.fetch if name == "fetch" else asks, rng)
    return broken


_NUMBERS = ["response_bytes_max", "parts", "list_max", "phase"]
