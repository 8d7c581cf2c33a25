"""What this node wants of its peers, and what they want of it."""

from __future__ import annotations

from collections import OrderedDict

from app.settings import Settings
from recon.interest import Interest, decode_interest
from recon.session import interest_hash
from sdstore.wire.recon_pb2 import Session

_NAME_BYTES = 64  # of memory around a name
_INTEREST_BYTES = 512  # of memory around an interest


def interest_of(settings: Settings) -> Interest:
    """The interest an operator configured: named channels and prefixes, or everything."""
    return Interest.make(
        everything=not (settings.channels or settings.channel_prefixes),
        channels=frozenset(settings.channels),
        prefixes=frozenset(settings.channel_prefixes),
    )


class KnownInterests:
    """What callers asked about, as far as it is ours too, by hash; the oldest are forgotten.

    So an interest is decoded and matched once, not with every request.
    """

    def __init__(self, ours: Interest, bytes_max: int) -> None:
        self._ours = ours
        self._bytes_max = bytes_max
        self._bytes = 0
        self._known: OrderedDict[bytes, tuple[Interest, int]] = OrderedDict()

    def find(self, session: Session) -> tuple[bytes, Interest] | None:
        """Hash and mutual interest of a request; None where the caller has to send it in full.

        Raises `RemoteProtocolError` for an interest that is not canonical.
        """
        name = session.interest_hash
        if session.WhichOneof("interest") == "interest_bytes":
            name = interest_hash(session.interest_bytes)
            if name not in self._known:
                self._add(name, session.interest_bytes)
        if name not in self._known:
            return None
        self._known.move_to_end(name)
        return name, self._known[name][0]

    def _add(self, name: bytes, raw: bytes) -> None:
        mutual = decode_interest(raw).intersect(self._ours)
        names_count = len(mutual.channels) + len(mutual.prefixes)
        size = len(raw) + _NAME_BYTES * names_count + _INTEREST_BYTES
        self._known[name] = mutual, size
        self._bytes += size
        while self._bytes > self._bytes_max and len(self._known) > 1:
            self._bytes -= self._known.popitem(last=False)[1][1]
