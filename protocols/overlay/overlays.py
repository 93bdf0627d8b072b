"""The overlays by name (`config.OVERLAYS`): two ways to find the peers closest to a key."""

from __future__ import annotations

from collections.abc import Callable

from .chord import Ring
from .kademlia import Overlay

MADE_BY: dict[str, type[Overlay]] = {"kademlia": Overlay, "chord": Ring}


def far(overlay: str) -> Callable[[bytes, bytes], int]:
    """The overlay's measure of how far a peer is from a key."""
    return MADE_BY[overlay].far
