"""Peers that exchange payloads over a network that loses, repeats, delays and reorders them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from sdstore.mvds import (
    Acknowledged,
    Deliver,
    Effect,
    MemoryState,
    Message,
    MvdsOptions,
    Node,
    Record,
    RecordType,
    Send,
    decode,
)

GROUP = b"group"


class Kept:
    """The messages of one peer, as an application keeps them."""

    def __init__(self) -> None:
        self.kept: dict[bytes, Message] = {}
        self.refused: set[bytes] = set()

    def find(self, message_id: bytes) -> Message | None:
        return self.kept.get(message_id)

    def is_known(self, message_id: bytes) -> bool:
        return message_id in self.kept or message_id in self.refused


@dataclass
class Peer:
    """A node with its application. `restart` loses what is in memory, never state or messages."""

    name: str
    options: MvdsOptions = field(default_factory=MvdsOptions)
    state: MemoryState = field(default_factory=MemoryState)
    messages: Kept = field(default_factory=Kept)
    delivered: list[bytes] = field(default_factory=list)
    acknowledged: list[tuple[str, bytes]] = field(default_factory=list)
    refuses: bool = False

    def __post_init__(self) -> None:
        self.members: list[str] = []
        self.restart()

    def restart(self) -> None:
        self.node = Node(self.state, self.messages, self.options)
        self.node.join(GROUP, self.members)

    def join(self, names: list[str]) -> None:
        self.members = [name for name in names if name != self.name]
        self.node.join(GROUP, self.members)

    def publish(self, message: Message, *, interactive: bool | None = None) -> None:
        self.messages.kept[message.message_id] = message
        self.node.send(message, interactive=interactive)

    def receive(self, sender: str, payload: bytes) -> list[Effect]:
        effects = self.node.receive(sender, payload)
        for effect in effects:
            if isinstance(effect, Deliver):
                self.deal_with(effect.message)
            elif isinstance(effect, Acknowledged):
                self.acknowledged.append((effect.peer, effect.message_id))
        return effects

    def deal_with(self, message: Message) -> None:
        assert not self.messages.is_known(message.message_id), "delivered twice"
        self.delivered.append(message.message_id)
        if self.refuses:
            self.messages.refused.add(message.message_id)
        else:
            self.messages.kept[message.message_id] = message
        self.node.processed(message.message_id)

    def records(self) -> dict[str, list[Record]]:
        everything = 1 << 62
        return {
            peer: self.state.due(peer, everything, 10**9)
            for peer in self.state.peers()
            if self.state.count(peer)
        }


@dataclass(frozen=True)
class Weather:
    """Odds of each payload: lost, sent twice; and the longest delay in epochs."""

    loss: float = 0.0
    repeat: float = 0.0
    delay_max: int = 0


@dataclass
class World:
    """Every peer is in `GROUP`, and connected to each other one."""

    peers: dict[str, Peer]
    random: Random = field(default_factory=lambda: Random(0))
    weather: Weather = field(default_factory=Weather)
    epoch: int = 0
    payloads: int = 0
    bytes: int = 0
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._flying: list[tuple[int, float, str, str, bytes]] = []
        for peer in self.peers.values():
            peer.join(list(self.peers))

    def step(self) -> None:
        """One epoch: what is due arrives in any order, then everybody sends."""
        self.epoch += 1
        arriving = sorted(each for each in self._flying if each[0] <= self.epoch)
        self._flying = [each for each in self._flying if each[0] > self.epoch]
        for _, _, sender, receiver, payload in arriving:
            self.peers[receiver].receive(sender, payload)
        for peer in self.peers.values():
            before = peer.records()
            sent_to: set[str] = set()
            for effect in peer.node.tick(self.epoch):
                if isinstance(effect, Send):
                    assert effect.peer not in sent_to, "two payloads to one peer in one epoch"
                    sent_to.add(effect.peer)
                    self._check_epochs(before.get(effect.peer, []), effect.payload)
                    self._send(peer.name, effect)

    def _check_epochs(self, before: list[Record], raw: bytes) -> None:
        """A record that goes out was there, and its epoch reached."""
        records = {record.message_id: record for record in before}
        payload = decode(raw)
        sent = [(each, RecordType.OFFER) for each in payload.offers]
        sent += [(each, RecordType.REQUEST) for each in payload.requests]
        sent += [(each.message_id, RecordType.MESSAGE) for each in payload.messages]
        for message_id, kind in sent:
            assert records[message_id].type is kind
            assert records[message_id].send_epoch <= self.epoch, "a record was sent too early"

    def _send(self, sender: str, effect: Send) -> None:
        self.payloads += 1
        self.bytes += len(effect.payload)
        self.trace.append(f"{self.epoch} {sender} -> {effect.peer}: {said(effect.payload)}")
        if self.random.random() < self.weather.loss:
            return
        copies = 2 if self.random.random() < self.weather.repeat else 1
        for _ in range(copies):
            at = self.epoch + 1 + self.random.randint(0, self.weather.delay_max)
            flying = (at, self.random.random(), sender, effect.peer, effect.payload)
            self._flying.append(flying)

    @property
    def is_quiet(self) -> bool:
        """Nothing flies, and no peer has a record."""
        return not self._flying and not any(peer.records() for peer in self.peers.values())

    def run(self, epochs_max: int) -> int:
        """Step until all is quiet; the number of epochs."""
        started = self.epoch
        self.step()
        while not self.is_quiet:
            assert self.epoch - started < epochs_max, "not quiet in time"
            self.step()
        return self.epoch - started


def said(raw: bytes) -> str:
    """A payload in words."""
    payload = decode(raw)
    parts = {
        "ACK": len(payload.acks),
        "OFFER": len(payload.offers),
        "REQUEST": len(payload.requests),
        "MESSAGE": len(payload.messages),
    }
    return ", ".join(f"{name} {count}" for name, count in parts.items() if count)


def message(text: str) -> Message:
    return Message(GROUP, 1_763_000_000, text.encode())


def world_of(
    count: int, options: MvdsOptions | None = None, *, seed: int = 0, weather: Weather | None = None
) -> World:
    names = [f"p{number}" for number in range(count)]
    made = options or MvdsOptions()
    return World(
        {name: Peer(name, replace(made)) for name in names},
        Random(seed),
        weather or Weather(),
    )
