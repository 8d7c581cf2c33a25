"""What this node wants of its peers, and what they want of it."""

from __future__ import annotations

from collections import OrderedDict

from blake3 import blake3

from app.limits import Limits
from app.settings import Settings
from recon.session import Interest, decode_interest, interest_hash
from sdstore.sds.codec import DECODER_VERSION
from sdstore.wire.recon_pb2 import Session

_Key = tuple[bytes, frozenset[str] | None]
"""Hash of an interest, channels that the caller may read."""

_NAME_BYTES = 64  # of memory around a name
_INTEREST_BYTES = 512  # of memory around an interest


def interest_of(settings: Settings) -> Interest:
    """The interest an operator configured: named channels and prefixes, or everything."""
    return Interest.make(
        everything=not (settings.channels or settings.channel_prefixes),
        channels=frozenset(settings.channels),
        prefixes=frozenset(settings.channel_prefixes),
    )


def readable_part(interest: Interest, channels: frozenset[str] | None) -> Interest:
    """The part of an interest that a caller may read; `channels` None: every channel."""
    return interest if channels is None else interest.intersect(Interest.make(channels=channels))


def policy_of(limits: Limits, interest: Interest) -> int:
    """Changes when this node may take what it refused before: another decoder, bound or interest.

    A 32-bit number that means nothing else.
    """
    bounds = (
        limits.frame_bytes_max,
        limits.message_id_bytes_max,
        limits.channel_id_bytes_max,
        limits.sender_id_bytes_max,
        limits.history_entries_max,
        limits.bloom_filter_bytes_max,
        limits.hint_bytes_max,
        limits.hint_claims_per_entry_max,
    )
    text = ",".join(map(str, (DECODER_VERSION, *bounds))).encode()
    return int.from_bytes(blake3(text + interest.encode()).digest(length=4), "little")


class KnownInterests:
    """What callers asked about, as far as it is ours too and theirs to read; the oldest are forgotten.

    So an interest is decoded and matched once, not with every request.
    """

    def __init__(self, ours: Interest, bytes_max: int) -> None:
        self._ours = ours
        self._bytes_max = bytes_max
        self._bytes = 0
        self._known: OrderedDict[_Key, tuple[Interest, int]] = OrderedDict()

    def find(
        self, session: Session, channels: frozenset[str] | None
    ) -> tuple[bytes, Interest] | None:
        """Hash and mutual interest of a request; None where the caller has to send it in full.

        `channels`: those that the caller may read, None for all. Raises `RemoteProtocolError` for
        an interest that is not canonical.
        """
        name = session.interest_hash
        if session.WhichOneof("interest") == "interest_bytes":
            name = interest_hash(session.interest_bytes)
            if (name, channels) not in self._known:
                self._add((name, channels), session.interest_bytes)
        key = name, channels
        if key not in self._known:
            return None
        self._known.move_to_end(key)
        return name, self._known[key][0]

    def _add(self, key: _Key, raw: bytes) -> None:
        mutual = readable_part(decode_interest(raw).intersect(self._ours), key[1])
        names_count = len(mutual.channels) + len(mutual.prefixes)
        size = len(raw) + _NAME_BYTES * names_count + _INTEREST_BYTES
        self._known[key] = mutual, size
        self._bytes += size
        while self._bytes > self._bytes_max and len(self._known) > 1:
            self._bytes -= self._known.popitem(last=False)[1][1]
