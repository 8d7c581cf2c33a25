"""What this node wants of its peers."""

from __future__ import annotations

from app.settings import Settings
from recon.interest import Interest


def interest_of(settings: Settings) -> Interest:
    """The interest an operator configured: named channels and prefixes, or everything."""
    return Interest.make(
        everything=not (settings.channels or settings.channel_prefixes),
        channels=frozenset(settings.channels),
        prefixes=frozenset(settings.channel_prefixes),
    )
