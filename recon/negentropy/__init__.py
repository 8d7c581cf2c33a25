"""Negentropy v1, the published protocol of other implementations: `Negentropy` over `Records`."""

from recon.negentropy.conversation import FRAME_BYTES_MIN, Negentropy, Step
from recon.negentropy.records import Records

__all__ = ["FRAME_BYTES_MIN", "Negentropy", "Records", "Step"]
