"""The fields of any body are counted before it is parsed."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from app.errors import Code, Problem
from app.http.call import count_fields, read_protobuf
from sdstore.wire import store_pb2 as wire

MANY = 1 << 30
small_bytes = st.binary(max_size=200)
items = st.builds(
    wire.PublishItem, frame=small_bytes, retrieval_hints=st.lists(small_bytes, max_size=4)
)
batches = st.builds(wire.PublishBatch, items=st.lists(items, max_size=8))


def fields_of(message: Message) -> int:
    """The fields that are set, each element of a repeated one, and all below them."""
    count = 0
    for field, value in message.ListFields():
        for each in value if field.is_repeated else [value]:
            count += 1 + (fields_of(each) if isinstance(each, Message) else 0)
    return count


@given(batches)
def test_every_field_is_counted(batch: wire.PublishBatch) -> None:
    assert count_fields(wire.PublishBatch, batch.SerializeToString(), MANY) == fields_of(batch)


@given(st.binary(max_size=60))
def test_whatever_protobuf_reads_was_counted_in_full(body: bytes) -> None:
    counted = count_fields(wire.PublishBatch, body, MANY)
    try:
        batch = wire.PublishBatch.FromString(body)
    except DecodeError:
        return
    assert counted >= fields_of(batch)


def test_a_body_of_too_many_fields_is_refused_before_it_is_parsed() -> None:
    body = b"\x0a\0" * 101
    assert len(asyncio.run(read_protobuf(wire.PublishBatch, body[:200], 100)).items) == 100
    with pytest.raises(Problem) as caught:
        asyncio.run(read_protobuf(wire.PublishBatch, body, 100))
    assert caught.value.code is Code.TOO_MANY_ITEMS
