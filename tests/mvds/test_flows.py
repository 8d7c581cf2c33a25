"""The deliveries of the specification, epoch by epoch, and single rules of a node."""

import pytest

from sdstore.mvds import (
    Deliver,
    GaveUp,
    Ignored,
    LocalProtocolError,
    MemoryState,
    Message,
    Node,
    Options,
    Payload,
    RecordType,
    RemoteProtocolError,
    Send,
    StateFull,
    decode,
    encode,
)
from sdstore.mvds.node import Record
from tests.mvds.world import GROUP, Kept, World, message, world_of


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


def test_both_modes_share_the_payloads_of_an_epoch() -> None:
    world = world_of(2)
    world.peers["p0"].publish(message("offered"), interactive=True)
    world.peers["p0"].publish(message("given"), interactive=False)
    world.run(10)
    assert world.trace == [
        "1 p0 -> p1: OFFER 1, MESSAGE 1",
        "2 p1 -> p0: ACK 1, REQUEST 1",
        "3 p0 -> p1: MESSAGE 1",
        "4 p1 -> p0: ACK 1",
    ]


def test_a_lost_offer_is_repeated_after_growing_pauses() -> None:
    world = world_of(2, Options(retry_epochs_first=3, retry_epochs_max=20))
    world.peers["p0"].publish(message("hello"))
    sent = []
    for epoch in range(1, 60):
        sent += [epoch for each in world.peers["p0"].node.tick(epoch) if isinstance(each, Send)]
    assert sent == [1, 4, 10, 22, 42]  # 3, 6, 12, then 20 epochs apart


def test_a_peer_that_answers_is_sent_a_lost_offer_again_without_growing_pauses() -> None:
    world = world_of(2, Options(retry_epochs_first=3))
    node = world.peers["p0"].node
    world.peers["p0"].publish(message("hello"))
    sent = []
    for epoch in range(1, 20):
        sent += [epoch for each in node.tick(epoch) if isinstance(each, Send)]
        node.receive("p1", encode(Payload(acks=(bytes(32),))))
    assert sent == [1, 4, 7, 10, 13, 16, 19]


def node_of(options: Options | None = None) -> tuple[Node, Kept, MemoryState]:
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


def test_an_offer_of_what_we_hold_is_acknowledged_and_ends_our_own_offer() -> None:
    node, kept, state = node_of()
    hello = message("hello")
    kept.kept[hello.message_id] = hello
    node.send(hello)
    node.receive("ada", encode(Payload(offers=(hello.message_id,))))
    assert state.count("ada") == 0
    assert state.count("bob") == 1
    assert payload_to(node, "ada", 1).acks == (hello.message_id,)


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


def test_a_full_payload_leaves_the_rest_for_the_next_epoch_in_order() -> None:
    node, kept, _ = node_of(Options(payload_bytes_max=1_000, interactive=False))
    sent = [Message(GROUP, number, bytes(300)) for number in range(7)]
    for each in sent:
        kept.kept[each.message_id] = each
        node.send(each, but=["bob"])
    found: list[Message] = []
    for epoch in range(1, 4):
        effects = node.tick(epoch)
        (only,) = [each for each in effects if isinstance(each, Send)]
        assert len(only.payload) <= 1_000
        found += decode(only.payload).messages
    assert found == sent[: len(found)]
    assert len(found) == 6


def test_many_acks_never_keep_the_largest_message_out() -> None:
    options = Options(payload_bytes_max=2_000, interactive=False)
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
    node, _, state = node_of(Options(records_per_peer_max=3))
    ids = tuple(bytes([n]) * 32 for n in range(5))
    (ignored,) = node.receive("ada", encode(Payload(offers=ids)))
    assert ignored == Ignored("ada", "offers", 2)
    (full,) = node.send(message("hello"), but=["bob"])
    assert full == StateFull("ada", message("hello").message_id)
    assert state.count("ada") == 3


def test_requests_of_a_second_payload_have_the_room_that_the_first_left() -> None:
    node, _, state = node_of(Options(records_per_peer_max=5))
    ids = tuple(bytes([n]) * 32 for n in range(8))
    assert node.receive("ada", encode(Payload(offers=ids[:3]))) == []
    (ignored,) = node.receive("ada", encode(Payload(offers=ids[3:])))
    assert ignored == Ignored("ada", "offers", 3)
    assert state.count("ada") == 5


def test_a_peer_that_never_answers_is_given_up_where_that_is_wanted() -> None:
    node, kept, state = node_of(Options(attempts_max=2, retry_epochs_first=1))
    kept.kept[message("hello").message_id] = message("hello")
    node.send(message("hello"), but=["bob"])
    ends = [each for epoch in range(1, 9) for each in node.tick(epoch)]
    assert [type(each) for each in ends] == [Send, Send, GaveUp]
    assert not state.count("ada")


def test_a_message_that_is_gone_takes_its_record_along() -> None:
    node, kept, state = node_of(Options(interactive=False))
    kept.kept[message("hello").message_id] = message("hello")
    node.send(message("hello"), but=["bob"])
    kept.kept.clear()
    assert node.tick(1) == []
    assert not state.count("ada")


def test_a_second_tick_of_an_epoch_sends_nothing() -> None:
    node, kept, _ = node_of(Options(retry_epochs_first=0))
    kept.kept[message("hello").message_id] = message("hello")
    node.send(message("hello"), but=["bob"])
    assert len(node.tick(1)) == 1
    assert node.tick(1) == []
    assert len(node.tick(2)) == 1


@pytest.mark.parametrize("raw", [b"\xff", b"x" * 300_000], ids=["malformed", "too large"])
def test_bad_payloads_are_refused_whole(raw: bytes) -> None:
    node, _, _ = node_of()
    with pytest.raises(RemoteProtocolError):
        node.receive("ada", raw)


def test_state_drains_between_a_keeper_and_a_refuser() -> None:
    world: World = world_of(2)
    world.peers["p1"].refuses = True
    world.peers["p0"].publish(message("hello"))
    world.run(10)
    assert world.peers["p1"].delivered == [message("hello").message_id]
    assert world.peers["p0"].acknowledged == [("p1", message("hello").message_id)]
    assert RecordType.MESSAGE not in {r.type for r in world.peers["p0"].records().get("p1", [])}


def test_due_records_are_as_many_as_there_is_room_for() -> None:
    state = MemoryState()
    state.put("p", [Record(RecordType.OFFER, bytes([n]) * 32) for n in range(9)])
    for limit in (0, 1, 2, 5, 9, 20):
        assert len(list(state.due("p", 0, limit))) == min(limit, 9)


def test_a_peer_that_is_full_keeps_nothing_from_the_others() -> None:
    node, _, state = node_of(Options(records_per_peer_max=1))
    node.receive("ada", encode(Payload(offers=(bytes(32),))))
    effects = node.send(message("hello"))
    assert effects == [StateFull("ada", message("hello").message_id)]
    assert state.get("bob", message("hello").message_id) is not None


def test_a_message_that_was_requested_of_two_is_still_requested_of_the_other() -> None:
    state = MemoryState()
    for peer in ("ada", "bob"):
        state.put(peer, [Record(RecordType.REQUEST, b"m")])
    state.remove("ada", [b"m"])
    assert state.requested_from(b"m") == ["bob"]
    state.put("ada", [Record(RecordType.REQUEST, b"m")])
    assert state.requested_from(b"m") == ["ada", "bob"]


def test_the_numbers_of_records_can_be_stored() -> None:
    assert [(each.name, each.value) for each in RecordType] == [
        ("OFFER", 1),
        ("REQUEST", 2),
        ("MESSAGE", 3),
    ]


def test_an_error_says_its_code_and_its_detail() -> None:
    assert str(RemoteProtocolError("odd", "the reason")) == "odd: the reason"
