"""Conversations between two of ours: what is learned, what it costs, how it ends."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.errors import LocalProtocolError, RemoteProtocolError
from recon.negentropy import Negentropy
from tests.support.negentropy import (
    Outcome,
    Record,
    assert_learned,
    records_of,
    talk,
    two_sets,
)

NANOSECONDS = 1_750_000_000_000_000_000


def talk_alone(
    client: list[Record], server: list[Record], client_bytes: int = 0, server_bytes: int = 0
) -> Outcome:
    near = Negentropy(records_of(client), client_bytes)
    far = Negentropy(records_of(server), server_bytes)
    return talk(near, far, client_bytes, server_bytes)


def uniform(random: Random, count: int) -> list[Record]:
    return [(NANOSECONDS + random.randrange(2**40), random.randbytes(32)) for _ in range(count)]


def test_equal_sets_cost_sixteen_fingerprints_and_one_byte() -> None:
    records = uniform(Random(1), 10_000)
    outcome = talk_alone(records, records)
    assert (outcome.rounds, outcome.bytes_down) == (1, 1)
    assert outcome.bytes_up < 16 * (16 + 12)


def test_an_empty_client_learns_everything_in_one_round() -> None:
    records = uniform(Random(2), 1000)
    outcome = talk_alone([], records)
    assert_learned(outcome, [], records)
    assert (outcome.rounds, outcome.bytes_up) == (1, 5)


@pytest.mark.parametrize(
    "limits_bytes", [(0, 0), (4096, 0), (0, 4096), (4096, 4096), (60_000,) * 2]
)
def test_the_client_learns_both_differences_whatever_the_frames(
    limits_bytes: tuple[int, int],
) -> None:
    for seed in range(60):
        client, server = two_sets(Random(seed), (0, 1, 31, 32, 33, 500, 3000))
        assert_learned(talk_alone(client, server, *limits_bytes), client, server)


# An ID is that of one record: the protocol learns IDs, and says nothing of two with one ID.
records_and_holders = st.dictionaries(
    st.binary(min_size=32, max_size=32),
    st.tuples(st.integers(0, 3), st.sampled_from(["client", "server", "both"])),
    max_size=250,
)


@given(records_and_holders)
@settings(deadline=None)
def test_any_two_sets_reconcile(records: dict[bytes, tuple[int, str]]) -> None:
    client, server = (
        [(stamp, each) for each, (stamp, holder) in records.items() if holder in {side, "both"}]
        for side in ("client", "server")
    )
    outcome = talk_alone(client, server)
    assert outcome.have_ids == {found for _, found in set(client) - set(server)}
    assert outcome.need_ids == {found for _, found in set(server) - set(client)}


def test_a_server_answers_a_later_version_with_its_own() -> None:
    far = Negentropy(records_of([]))
    assert far.respond(b"\x62anything") == b"\x61"


@pytest.mark.parametrize("message", [b"", b"\x00", b"\x5f", b"\x70", b"{}"])
def test_what_is_no_negentropy_message_is_the_remote_side_s_fault(message: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        Negentropy(records_of([])).respond(message)
    assert caught.value.code == "negentropy_malformed"


def test_a_server_that_never_agrees_meets_the_round_budget() -> None:
    near = Negentropy(records_of(uniform(Random(5), 100)), rounds_max=20)
    lie = b"\x61\0\0\1" + b"?" * 16
    for _ in range(20):
        assert near.reconcile(lie).message is not None
    with pytest.raises(RemoteProtocolError) as caught:
        near.reconcile(lie)
    assert caught.value.code == "negentropy_endless"


def test_a_message_above_the_bound_is_refused_unread() -> None:
    far = Negentropy(records_of([]), message_bytes_max=10)
    with pytest.raises(RemoteProtocolError) as caught:
        far.respond(b"\x61" + b"?" * 10)
    assert caught.value.code == "negentropy_too_large"


def test_a_frame_limit_too_small_for_one_split_is_the_caller_s_fault() -> None:
    with pytest.raises(LocalProtocolError):
        Negentropy(records_of([]), 4095)


def test_the_documented_example_is_what_is_said() -> None:
    one, other = b"\xaa" * 32, b"\xbb" * 32
    near, far = Negentropy(records_of([(1, one)])), Negentropy(records_of([(1, one), (2, other)]))
    question = near.initiate()
    assert question == bytes.fromhex("61 00 00 02 01") + one
    answer = far.respond(question)
    assert answer == bytes.fromhex("61 00 00 02 02") + one + other
    assert near.reconcile(answer) == (None, [], [other])
