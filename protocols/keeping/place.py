"""Where a workflow's journal is kept: by the peers closest to its id.

A peer that accepts a workflow draws an id close to its own, so it is the closest keeper itself, and
no hop is spent on the way to one. (The id that follows from an idempotency key lies anywhere; there
too the accepting peer is the first home, and the others are the closest.)
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Iterable

from ..overlay.overlays import far

PLACE_DIGITS = 4


#: so begin the ids of workflows that are in a task queue
QUEUED = "q"


def is_queued(workflow: str) -> bool:
    return workflow.startswith(QUEUED)


def new_id(me: bytes, rng: random.Random, prefix: str = "w") -> str:
    return f"{prefix}{rng.getrandbits(48):012x}{me.hex()[:PLACE_DIGITS]}"


def place(workflow: str) -> bytes:
    """On the overlay's circle of ids."""
    digest = hashlib.blake2b(workflow.encode(), digest_size=20).digest()
    try:
        start = bytes.fromhex(workflow[-PLACE_DIGITS:])
    except ValueError:
        return digest
    return start + digest[len(start) :]


def closest(workflow: str, peers: Iterable[bytes], count: int, overlay: str) -> list[bytes]:
    """By that overlay's way of measuring."""
    at, measure = place(workflow), far(overlay)
    return heapq.nsmallest(count, peers, key=lambda peer: measure(peer, at))
