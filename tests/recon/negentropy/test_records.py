"""Records: order, search, sums and the shortest bounds, against plain Python."""

from hashlib import sha256
from itertools import pairwise, takewhile

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.negentropy import Records
from recon.negentropy.records import BLOCK_RECORDS
from recon.negentropy.wire import END, INFINITY, Bound, encode_varint
from tests.support.negentropy import Record, records_of

# Few timestamps and few bytes, so that ties, shared prefixes and zero tails are the rule.
few_bytes = st.lists(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]), min_size=32, max_size=32).map(bytes)
short_ids = st.binary(max_size=3).map(lambda head: head.ljust(32, b"\0"))
identifiers = few_bytes | short_ids | st.binary(min_size=32, max_size=32)
timestamps = st.sampled_from([0, 1, 2, 2**31, 2**63, INFINITY - 1])
record_lists = st.lists(st.tuples(timestamps, identifiers), unique=True, max_size=60)
bounds = st.builds(Bound, timestamps, st.binary(max_size=4)) | st.just(END)


def test_negative_lamport_timestamps_count_as_zero() -> None:
    records = Records.from_lamports(
        np.array([-5, -7, 3]),
        np.frombuffer(b"b" * 32 + b"a" * 32 + b"c" * 32, np.uint8).reshape(3, 32),
    )
    assert records.ids(0, 3) == b"a" * 32 + b"b" * 32 + b"c" * 32
    assert records.bounds_between(np.array([1, 2])) == [Bound(0, b"b"), Bound(3, b"")]


@given(record_lists)
@settings(deadline=None)
def test_records_are_kept_in_the_protocol_s_order(drawn: list[Record]) -> None:
    assert records_of(drawn).ids(0, len(drawn)) == b"".join(found for _, found in sorted(drawn))


@given(record_lists)
@settings(deadline=None)
def test_the_bound_of_a_record_parts_it_from_the_one_before_and_no_shorter_one_does(
    drawn: list[Record],
) -> None:
    keys = sorted(drawn)
    found = records_of(drawn).bounds_between(np.arange(1, max(1, len(keys))))
    for bound, (before, record) in zip(found, pairwise(keys), strict=True):
        assert before < (bound.timestamp, bound.padded()) <= record
        shared = len(
            list(takewhile(lambda pair: pair[0] == pair[1], zip(before[1], record[1], strict=True)))
        )
        assert bound.prefix == (record[1][: shared + 1] if before[0] == record[0] else b"")


@given(st.integers(0, 5 * BLOCK_RECORDS), st.data())
@settings(deadline=None)
def test_fingerprints_are_those_of_sums_in_plain_integers(count: int, data: st.DataObject) -> None:
    ids = data.draw(st.lists(identifiers, min_size=count, max_size=count))
    records = records_of(list(enumerate(ids)))
    cuts = data.draw(st.lists(st.integers(0, count), min_size=2, max_size=6).map(sorted))
    expected = []
    for lower, upper in pairwise(cuts):
        total = sum(int.from_bytes(found, "little") for found in ids[lower:upper]) % 2**256
        raw = total.to_bytes(32, "little") + encode_varint(upper - lower)
        expected.append(sha256(raw).digest()[:16])
    assert records.fingerprints(np.array([cuts])) == expected
