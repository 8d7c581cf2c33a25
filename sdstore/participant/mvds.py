"""A participant's MVDS session with a store node: one exchange is one epoch (docs/mvds.md).

    kept: dict[bytes, Message]                          # what the participant keeps; has `find`, `is_known`
    session = MvdsSession(client, "ada", ["channel"], messages)
    message = message_of(frame)                         # the application keeps it, so that `find` gives it
    session.node.send(message)
    for effect in session.exchange():
        if isinstance(effect, Deliver):                 # store effect.message, then:
            session.node.processed(effect.message.message_id)

An exchange that fails loses nothing: records stay in the state, and later exchanges send them again.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from sdstore.client.clients import AsyncStoreClient, StoreClient
from sdstore.client.exchange import MvdsMode
from sdstore.errors import malformed_reply
from sdstore.mvds import (
    Effect,
    MemoryState,
    Message,
    Messages,
    MvdsOptions,
    Node,
    RemoteProtocolError,
    Send,
    State,
)
from sdstore.sds.codec import decode

_Client = TypeVar("_Client")

STORE = "store"
"""The name of the store node in `Node` and in effects."""

PAYLOAD_BYTES_MAX = 4 * 1024 * 1024
"""As a node of ours has it (`mvds_payload_bytes_max`)."""


def message_of(frame: bytes) -> Message:
    """The MVDS message of an SDS frame: channel, Lamport timestamp, frame. Raises `MessageError`."""
    message, _ = decode(frame)
    return Message(message.channel_id.encode(), message.lamport_timestamp or 0, frame)


class _Session(Generic[_Client]):
    """The side of a session without I/O."""

    def __init__(
        self,
        client: _Client,
        peer_id: str,
        channel_ids: Sequence[str],
        messages: Messages,
        *,
        state: State | None = None,
        epoch: int = 0,
        mode: MvdsMode = "interactive",
        options: MvdsOptions | None = None,
    ) -> None:
        """`peer_id` names this participant; `channel_ids` are all its channels.

        `mode` is that of both directions. `epoch` is the last one of an earlier session over the same
        `state`; epochs never go back.
        """
        self.epoch = epoch
        self.node = Node(
            MemoryState() if state is None else state,
            messages,
            options
            or MvdsOptions(interactive=mode == "interactive", payload_bytes_max=PAYLOAD_BYTES_MAX),
        )
        for channel_id in channel_ids:
            self.node.join(channel_id.encode(), [STORE])
        self._client = client
        self._peer_id = peer_id
        self._channel_ids = tuple(channel_ids)
        self._mode: MvdsMode = mode
        self._effects: list[Effect] = []

    def _begin(self) -> bytes:
        self.epoch += 1
        payload = b""
        for effect in self.node.tick_peer(STORE, self.epoch):
            if isinstance(effect, Send):
                payload = effect.payload
            else:
                self._effects.append(effect)
        return payload

    def _end(self, reply: bytes) -> list[Effect]:
        try:
            self._effects += self.node.receive(STORE, reply)
        except RemoteProtocolError as error:
            raise malformed_reply(f"not an MVDS payload: {error}", 200) from error
        effects, self._effects = self._effects, []
        return effects


class MvdsSession(_Session[StoreClient]):
    """See the module."""

    def exchange(self) -> list[Effect]:
        """One epoch: send what is due and take the reply. Raises `StoreError`; call again later."""
        payload = self._begin()
        return self._end(
            self._client.mvds(self._peer_id, self._channel_ids, payload, mode=self._mode)
        )


class AsyncMvdsSession(_Session[AsyncStoreClient]):
    """`MvdsSession` for asyncio."""

    async def exchange(self) -> list[Effect]:
        """See `MvdsSession.exchange`."""
        payload = self._begin()
        return self._end(
            await self._client.mvds(self._peer_id, self._channel_ids, payload, mode=self._mode)
        )
