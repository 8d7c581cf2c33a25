"""What a session may cost, so that it ends whatever the peer does.

Bytes and seconds grow with what was really transferred, so an honest large sync is never cut, and
with the own set, because even an honest peer makes us name our own elements.
"""

from __future__ import annotations

from recon.errors import RemoteProtocolError
from recon.limits import Limits


class Budget:
    """Counts requests, bytes both ways and content; raises `RemoteProtocolError` when it is spent."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._credit_bytes = 0
        self.requests = 0
        self.bytes = 0

    def credit(self, content_bytes: int) -> None:
        """Content that really arrived, or was taken by the peer."""
        self._credit_bytes += content_bytes

    def check(self, own_count: int, elapsed_s: float) -> None:
        """Raise when any budget is overdrawn."""
        limits = self._limits
        bytes_max = limits.bytes_base + limits.bytes_per_element * own_count
        bytes_max += limits.bytes_per_credit * self._credit_bytes
        if self.bytes > bytes_max:
            raise RemoteProtocolError("budget_bytes", f"{self.bytes} of {bytes_max}")
        if self.requests > limits.requests_max:
            raise RemoteProtocolError("budget_requests", str(self.requests))
        seconds_max = limits.seconds_base
        seconds_max += limits.seconds_per_credit_mib * self._credit_bytes / (1 << 20)
        if elapsed_s > seconds_max:
            raise RemoteProtocolError("budget_seconds", f"{elapsed_s:.0f} of {seconds_max:.0f}")
