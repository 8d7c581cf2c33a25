"""Both clients against a node on a real socket."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.access.operator import token_for
from sdstore.client import (
    AsyncStoreClient,
    ClientOptions,
    PublishItem,
    Retry,
    StoreClient,
    StoreError,
    WakuEnvelope,
)
from sdstore.client.exchange import Batcher
from sdstore.sds.codec import decode, encode
from sdstore.sds.model import Kind, Message, waku_message_hash
from tests.support.sds_vectors import valid_frames
from tests.support.server import RunningNode, running_node
from tests.support.store_clients import EitherClient

# The longest ID the node takes is 1 KiB, the longest channel 256 bytes.
ODD_IDS = ["/a/b", "..", ".", "%", "%2F", "a b+c&d=e?#", "x/ancestors", "идент→", "ü" * 512]
DOCS = Path(__file__).parents[2] / "docs"
ODD_CHANNELS = ["", "0", "/myapp/1/chat/proto", "..", "%", "a b+c&d=e?#", "ü" * 128]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node")) as running:
        yield running


@pytest.fixture(scope="module", params=[StoreClient, AsyncStoreClient])
def client(request: pytest.FixtureRequest, node: RunningNode) -> Iterator[EitherClient]:
    with EitherClient(request.param(node.url, token=token_for(node.url))) as either:
        yield either


@pytest.fixture
def channel_id(request: pytest.FixtureRequest) -> str:
    """A channel of this test's own."""
    return f"channel of {request.node.name}"[:256]


def message(message_id: str, channel_id: str, lamport: int = 7, **fields: Any) -> Message:
    return Message(message_id, channel_id, lamport_timestamp=lamport, content=b"x", **fields)


@pytest.mark.parametrize(
    ("message_id", "channel"),
    [*((odd, "0") for odd in ODD_IDS), *(("in an odd channel", odd) for odd in ODD_CHANNELS)],
)
def test_ids_and_channels_of_any_content_are_published_and_found(
    client: EitherClient, message_id: str, channel: str
) -> None:
    sent = message(message_id, channel)
    assert client.publish(encode(sent)).outcome in {"stored", "duplicate"}
    assert client.get(message_id, channel).message == sent
    assert client.channel(channel).channel_id == channel
    assert message_id in {found.message.message_id for found in client.messages(channel)}


def test_recorded_frames_of_all_dialects_come_back_byte_for_byte(client: EitherClient) -> None:
    outcomes = client.publish_stream(valid_frames(), Batcher(items_max=7))
    assert len(outcomes) == len(valid_frames())
    digests = {outcome.digest for outcome in outcomes if outcome.digest}
    frames = {client.get_entry(digest).frame for digest in digests}
    assert len(digests) > 20
    assert frames <= set(valid_frames())


def test_the_documented_frames_get_their_digest_or_their_refusal(client: EitherClient) -> None:
    vectors = json.loads((DOCS / "vectors" / "digest.json").read_text(encoding="utf-8"))
    named = vectors["entries"] + vectors["refusals"]
    frames = [bytes.fromhex(vector["frame_hex"]) for vector in named]
    for vector, frame, outcome in zip(named, frames, client.publish_batch(frames), strict=True):
        if "code" in vector:
            assert (outcome.outcome, outcome.error.code) == ("refused", vector["code"]), vector
        elif decode(frame)[0].kind is Kind.CONTENT:
            assert outcome.outcome in {"stored", "duplicate"}, vector
            assert outcome.digest.hex() == vector["digest"], vector
        else:
            assert outcome.outcome == "relayed", vector


def test_hints_of_the_publisher_and_of_the_envelope_lead_to_the_message(
    client: EitherClient, channel_id: str
) -> None:
    first, second = (encode(message(name, channel_id)) for name in ("first", "second"))
    hint = channel_id.encode()[-30:]
    client.publish(first, [hint, b"two"])
    envelope = WakuEnvelope("/waku/2/rs", "/app/1/chat/proto", 1_763_000_000_000_000_000, b"m")
    list(client.publish_batch([PublishItem(second, waku=envelope)]))
    [found] = client.hint(hint).messages
    assert found.message.message_id == "first"
    waku_hash = waku_message_hash(
        envelope.pubsub_topic, second, envelope.content_topic, b"m", envelope.timestamp_ns
    )
    [found] = client.hint(waku_hash).messages
    assert (found.frame, waku_hash in found.retrieval_hints) == (second, True)


def test_a_channel_is_read_whole_in_both_directions(client: EitherClient, channel_id: str) -> None:
    sent = [message(f"m{number}", channel_id, number) for number in range(-3, 20)]
    list(client.publish_batch(map(encode, reversed(sent))))
    log = client.messages(channel_id, page_size=5)
    assert [found.message for found in log] == sent
    newest_first = client.messages(channel_id, direction="desc", page_size=5)
    assert [found.message for found in newest_first] == sent[::-1]
    arrival = client.messages(channel_id, order="arrival", page_size=5)
    assert [found.message for found in arrival] == sent[::-1]
    window = client.messages(channel_id, from_lamport=-1, to_lamport=3)
    assert {-1, 0, 1, 2} <= {found.message.lamport_timestamp for found in window}
    about = client.channel(channel_id)
    assert (about.count, about.lamport_first, about.lamport_last) == (23, -3, 19)
    assert len(about.root or b"") == 32
    assert channel_id in {channel.channel_id for channel in client.channels()}


def test_what_is_not_there_is_not_found(client: EitherClient) -> None:
    for ask in (
        lambda: client.get("nowhere"),
        lambda: client.get_entry(bytes(32)),
        lambda: client.channel("no such channel"),
        lambda: client.sync("no such sync"),
        lambda: client.peer("no such peer"),
    ):
        with pytest.raises(StoreError) as refused:
            ask()
        assert (refused.value.code, refused.value.status) == ("not_found", 404)
        assert refused.value.problem["type"].endswith("not_found")


def test_the_node_says_who_it_is_and_whom_it_knows(client: EitherClient) -> None:
    about = client.info()
    assert about.node_id
    assert about.limits["frame_bytes_max"] == 1024 * 1024
    assert client.peers() == []
    assert client.syncs() == []


@pytest.mark.parametrize("kind", [StoreClient, AsyncStoreClient])
def test_a_node_that_is_not_there_is_unreachable(kind: type) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = ClientOptions(retry=Retry(attempts_max=2, backoff_s=0.001))
    url = f"http://127.0.0.1:{port}"
    with EitherClient(kind(url, options=options)) as client, pytest.raises(StoreError) as refused:
        client.info()
    assert (refused.value.code, refused.value.status) == ("unreachable", 0)
