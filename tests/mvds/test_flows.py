"""The deliveries of the specification, epoch by epoch, and single rules of a node."""

import pytest

from sdstore.mvds import (
    Deliver,
    GaveUp,
    Ignored,
    LocalProtocolError,
    MemoryState,
    Message,
    MvdsOptions,
    Node,
    Payload,
    RemoteProtocolError,
    Send,
    StateFull,
    decode,
    encode,
)
from tests.mvds.world import GROUP, Kept, message, world_of


def test_interactive_delivery_takes_one_epoch_a_step() -> None:
    world = world_of(2)
    world.peers["p0"].publish(message("hello"), interactive=True)
    world.run(10)
    assert world.trace == [
        "1 p0 -> p1: OFFER 1",
        "2 p1 -> p0: REQUEST 1",
        "3 p0 -> p1: MESSAGE 1",
        "4 p1 -> p0: ACK 1",
    ]


def test_batch_delivery_takes_one_epoch_a_step() -> None:
    world = world_of(2)
    world.peers["p0"].publish(message("hello"), interactive=False)
    world.run(10)
    assert world.trace == ["1 p0 -> p1: MESSAGE 1", "2 p1 -> p0: ACK 1"]


def test_a_lost_offer_is_repeated_after_growing_pauses() -> None:
    world = world_of(2, MvdsOptions(retry_epochs_first=3, retry_epochs_max=20))
    world.peers["p0"].publish(message("hello"))
    sent = []
    for epoch in range(1, 60):
        sent += [epoch for each in world.peers["p0"].node.tick(epoch) if isinstance(each, Send)]
    assert sent == [1, 4, 10, 22, 42]  # 3, 6, 12, then 20 epochs apart


def node_of(options: MvdsOptions | None = None) -> tuple[Node, Kept, MemoryState]:
    kept, state = Kept(), MemoryState()
    node = Node(state, kept, options)
    node.join(GROUP, ["ada", "bob"])
    return node, kept, state


def payload_to(node: Node, peer: str, epoch: int) -> Payload:
    sent = [each for each in node.tick(epoch) if isinstance(each, Send) and each.peer == peer]
    return decode(sent[0].payload) if sent else Payload()


def test_every_repeated_message_is_acknowledged_also_one_that_was_refused() -> None:
    node, kept, _ = node_of()
    raw = encode(Payload(messages=(message("hello"),)))
    (delivered,) = node.receive("ada", raw)
    assert isinstance(delivered, Deliver)
    kept.refused.add(message("hello").message_id)
    node.processed(message("hello").message_id)
    assert payload_to(node, "ada", 1).acks == (message("hello").message_id,)
    for epoch in (2, 3):
        assert node.receive("ada", raw) == []
        assert payload_to(node, "ada", epoch).acks == (message("hello").message_id,)


def test_no_ack_leaves_before_the_application_has_dealt_with_the_message() -> None:
    node, kept, _ = node_of()
    raw = encode(Payload(messages=(message("hello"),)))
    node.receive("ada", raw)
    assert payload_to(node, "ada", 1).is_empty
    node.postponed(message("hello").message_id)
    assert [type(each) for each in node.receive("ada", raw)] == [Deliver]
    kept.kept[message("hello").message_id] = message("hello")
    node.processed(message("hello").message_id)
    assert payload_to(node, "ada", 2).acks == (message("hello").message_id,)


def test_a_message_that_two_peers_give_is_delivered_once_and_acknowledged_to_both() -> None:
    node, kept, _ = node_of()
    raw = encode(Payload(messages=(message("hello"),)))
    assert len(node.receive("ada", raw)) == 1
    assert node.receive("bob", raw) == []
    kept.kept[message("hello").message_id] = message("hello")
    node.processed(message("hello").message_id)
    sent = {each.peer: decode(each.payload).acks for each in node.tick(1) if isinstance(each, Send)}
    assert sent == dict.fromkeys(("ada", "bob"), (message("hello").message_id,))


def test_a_request_gives_only_what_was_offered_to_that_peer() -> None:
    node, kept, state = node_of()
    secret = message("secret")
    kept.kept[secret.message_id] = secret
    (ignored,) = node.receive("ada", encode(Payload(requests=(secret.message_id,))))
    assert ignored == Ignored("ada", "requests", 1)
    assert state.count("ada") == 0


def test_who_is_no_member_gives_and_offers_nothing() -> None:
    node, _, state = node_of()
    raw = encode(Payload(offers=(bytes(32),), messages=(message("hello"),)))
    effects = node.receive("eve", raw)
    assert effects == [Ignored("eve", "offers", 1), Ignored("eve", "messages", 1)]
    assert not state.peers()


def test_many_acks_never_keep_the_largest_message_out() -> None:
    options = MvdsOptions(payload_bytes_max=2_000, interactive=False)
    node, kept, _ = node_of(options)
    for number in range(500):
        node.receive("ada", encode(Payload(messages=(Message(GROUP, number, b""),))))
        node.processed(Message(GROUP, number, b"").message_id)
    big = Message(GROUP, 1, bytes(node.message_bytes_max - 32 - len(GROUP)))
    kept.kept[big.message_id] = big
    node.send(big)
    assert payload_to(node, "ada", 1).messages == (big,)
    with pytest.raises(LocalProtocolError, match="half a payload"):
        node.send(Message(GROUP, 1, big.body + b"x"))


def test_the_state_of_a_peer_is_bounded_both_ways() -> None:
    node, _, state = node_of(MvdsOptions(records_per_peer_max=3))
    ids = tuple(bytes([n]) * 32 for n in range(5))
    (ignored,) = node.receive("ada", encode(Payload(offers=ids)))
    assert ignored == Ignored("ada", "offers", 2)
    (full,) = node.send(message("hello"), but=["bob"])
    assert full == StateFull("ada", message("hello").message_id)
    assert state.count("ada") == 3


def test_a_peer_that_never_answers_is_given_up_where_that_is_wanted() -> None:
    node, kept, state = node_of(MvdsOptions(attempts_max=2, retry_epochs_first=1))
    kept.kept[message("hello").message_id] = message("hello")
    node.send(message("hello"), but=["bob"])
    ends = [each for epoch in range(1, 9) for each in node.tick(epoch)]
    assert [type(each) for each in ends] == [Send, Send, GaveUp]
    assert not state.count("ada")


@pytest.mark.parametrize("raw", [b"\xff", b"x" * 300_000], ids=["malformed", "too large"])
def test_bad_payloads_are_refused_whole(raw: bytes) -> None:
    node, _, _ = node_of()
    with pytest.raises(RemoteProtocolError):
        node.receive("ada", raw)
