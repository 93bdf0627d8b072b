"""The overlays, by their names: two ways to find the peers that are closest to a key."""

from __future__ import annotations

from collections.abc import Callable

from .chord import Ring
from .kademlia import Overlay

OVERLAYS: dict[str, type[Overlay]] = {"kademlia": Overlay, "chord": Ring}


def far(overlay: str) -> Callable[[bytes, bytes], int]:
    """How far a peer is from a key."""
    return OVERLAYS[overlay].far
