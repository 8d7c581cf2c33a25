"""Whatever arrives, a participant raises nothing, keeps its bounds and its promises."""

from __future__ import annotations

import random
import time

import pytest

from sdstore.sds import (
    Broadcast,
    Deliver,
    HistoryEntry,
    LamportUnit,
    Message,
    OnLost,
    ParticipantOptions,
    encode,
)
from sdstore.sds.bloom import BloomFilter, Form
from sdstore.sds.repair import RepairOptions
from tests.support.participants import CHANNEL, NOON_MS, Device, of

SECONDS = 4.0


def tiny(world: random.Random) -> ParticipantOptions:
    """Bounds so small that every one of them is met."""
    return ParticipantOptions(
        bloom=world.choice([None, *Form]),
        bloom_capacity=20,
        heads_max=4,
        history_max=4,
        waiting_max=world.choice([1, 3, 6]),
        waiting_bytes_max=1_500,
        missing_max=world.choice([3, 8]),
        noted_max=3,
        lost_max=4,
        lost_after_ms=world.choice([20_000, 60_000]),
        lost_retry_ms=30_000,
        on_lost=world.choice(list(OnLost)),
        sync_ids_max=3,
        sent_max=5,
        attempts_max=3,
        resend_ms_max=40_000,
        sync_ms=world.choice([0, 5_000]),
        hints_max=5,
        hints_per_message=2,
        fetches_per_effect=2,
        reviewed_per_filter=2,
        deliveries_max=1_000,
        history_read_max=12,
        lamport_unit=world.choice([None, LamportUnit.SECONDS]),
        repair=world.choice([None, RepairOptions(t_min_ms=5_000, t_max_ms=20_000)]),
    )


def any_frame(world: random.Random, names: list[str]) -> bytes:
    """A message of any kind about few IDs, so that copies, circles and variants occur."""
    if world.random() < 0.05:
        return world.randbytes(world.randrange(60))
    entries = tuple(
        HistoryEntry(world.choice(names), world.choice([b"", b"h1", b"h2", b"h3"]), world.choice(["", "eve", "bob"]))
        for _ in range(world.choice([0, 1, 1, 2, 4, 13]))
    )  # fmt: skip
    bloom = b""
    if world.random() < 0.4:
        a_filter = BloomFilter(capacity=20)
        a_filter.rebuild(world.sample(names, 6))
        bloom = world.choice([a_filter.to_bytes(), b"\xff" * 40, b"\xff" * 48, b"\x0a\x02ab"])
    frame = encode(
        Message(
            world.choice(names),
            CHANNEL,
            world.choice(["", "eve", "dan", "fay", "bob"]),
            world.choice([None, 0, -5, 7, 7, NOON_MS, NOON_MS + 10**12, 2**63 - 1]),
            entries,
            bloom,
            entries[:3] if world.random() < 0.3 else (),
            world.choice([b"x", b"y", b"z" * 300, b"" if entries or bloom else b"x"]) or b"x",
        )
    )
    if world.random() < 0.3:
        frame = encode(Message(world.choice(names), CHANNEL, "gil", 5, entries, bloom))
    if world.random() < 0.1:
        at = world.randrange(len(frame))
        frame = frame[:at] + bytes((world.randrange(256),)) + frame[at + 1 :]
    return frame


def check_bounds(bob: Device, options: ParticipantOptions) -> None:
    status = bob.participant.status
    assert status.waiting <= options.waiting_max
    assert status.missing <= options.missing_max + options.noted_max
    assert status.lost <= options.lost_max
    assert status.unacknowledged <= options.sent_max
    for prefix, bound in (
        ("sent/", options.sent_max),
        ("waiting/", options.waiting_max),
        ("lost/", options.lost_max),
        ("sync/", options.sync_ids_max),
    ):
        assert len([key for key in bob.state if key.startswith(prefix)]) <= bound


def run_world(seed: int) -> None:
    world = random.Random(seed)
    options = tiny(world)
    bob = Device("bob", options)
    names = [f"m{number}" for number in range(world.choice([6, 14, 40]))]
    for _ in range(120):
        bob.now_ms += world.choice([0, 10, 1_000, 15_000, 10**7, -(10**6)])
        choice = world.random()
        if choice < 0.7:
            hint = world.choice([None, b"h4"])
            bob.carry_out(bob.participant.receive(any_frame(world, names), bob.now_ms, hint))
        elif choice < 0.8:
            names.append(of(Broadcast, bob.carry_out(
                bob.participant.send(b"content", bob.now_ms)
            ))[0].message_id)  # fmt: skip
        elif choice < 0.95:
            bob.carry_out(bob.participant.tick(bob.now_ms))
        else:
            bob.crash()
            bob.wait(0.001, 0.001)
        check_bounds(bob, options)
    bob.wait(1)
    assert bob.status == bob.participant.status
    ids = [each.message.message_id for each in bob.delivered]
    assert len(set(ids)) == len(ids)
    assert [each.number for each in of(Deliver, bob.effects)] == list(range(1, len(ids) + 1))
    # Causes precede, unless they are named as gaps; sync messages are no causes in version 1.
    place = {message_id: number for number, message_id in enumerate(ids)}
    for delivery in bob.delivered:
        message = delivery.message
        for entry in message.causal_history:
            cause = entry.message_id
            if cause in place and cause != message.message_id and message.sender_id:
                assert place[cause] < place[message.message_id] or cause in delivery.after_gap, (
                    cause,
                    message,
                )


def test_hostile_frames_break_no_bound_and_no_promise() -> None:
    end = time.monotonic() + SECONDS
    seed = 0
    while time.monotonic() < end or seed < 20:
        try:
            run_world(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
        seed += 1


@pytest.mark.parametrize("seed", [1, 112])
def test_seeds_that_failed_once(seed: int) -> None:
    run_world(seed)
