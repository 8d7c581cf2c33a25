"""The protocol negentropy (docs/negentropy.md)."""

from recon.negentropy import Negentropy, Records

__all__ = ["Negentropy", "Records"]
