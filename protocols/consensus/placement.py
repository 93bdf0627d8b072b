"""Where a journal is kept: by the peers closest to its workflow, on machines and sites of their
own where there are such: what falls together should not keep the same journal.

A peer that accepts a workflow draws an id close to its own, so it is the closest keeper itself, and
no hop is spent on the way to one. (The id that follows from an idempotency key lies anywhere; there
too the accepting peer is the first home, and the others are the closest.)
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..overlay.overlays import far
from ..wire.messages import Member

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


class Where(NamedTuple):
    """A peer, and what it falls with."""

    id: bytes
    host: str
    site: str


def where(member: Member) -> Where:
    return Where(member.contact.id, member.contact.host, member.traits.site)


def spread(
    workflow: str, chosen: Iterable[Where], free: Iterable[Where], count: int, overlay: str
) -> list[bytes]:
    """So many more: each, if it can be, on another machine than all chosen so far, and at another
    site; of those the closest."""
    at, measure = place(workflow), far(overlay)
    there, left = list(chosen), list(free)
    found: list[bytes] = []
    while left and len(found) < count:
        hosts, sites = {w.host for w in there}, {w.site for w in there}
        best = min(left, key=lambda w: (w.host in hosts, w.site in sites, measure(w.id, at)))
        left.remove(best)
        there.append(best)
        found.append(best.id)
    return found


def crowding(keepers: Sequence[Where]) -> tuple[int, int]:
    """How many fall with another one: with its machine, which counts first, and with its site."""
    hosts, sites = {w.host for w in keepers}, {w.site for w in keepers}
    return len(keepers) - len(hosts), len(keepers) - len(sites)


def without_one(me: bytes, keepers: Sequence[Where]) -> list[Where]:
    """One less, but not `me`: those that are left fall together as little as they can."""
    ways = [[w for w in keepers if w != out] for out in reversed(keepers) if out.id != me]
    return min(ways, key=crowding, default=list(keepers))


def would_part(me: bytes, keepers: Sequence[Where], new: Where) -> bool:
    """With this one in the place of another, fewer fall together: so one change is never undone by
    the next."""
    hosts, sites = {w.host for w in keepers}, {w.site for w in keepers}
    shared = len(hosts) < len(keepers), len(sites) < len(keepers)
    if not (shared[0] and new.host not in hosts) and not (shared[1] and new.site not in sites):
        return False  # it is where others are: mostly so
    now = crowding(keepers)
    return any(now) and crowding(without_one(me, [*keepers, new])) < now


def risk(keepers: Sequence[Where]) -> str:
    """In words: what the loss of one machine, or of one site, would cost; empty: nothing."""
    enough = len(keepers) // 2 + 1
    for what, counts in (
        ("machine", Counter(w.host for w in keepers)),
        ("site", Counter(w.site for w in keepers)),
    ):
        [(name, count)] = counts.most_common(1) or [("", 0)]
        if count == len(keepers) > 0:
            many = f"all {count} keepers of its journal are" if count > 1 else "its only keeper is"
            return f"{many} at one {what} ({name}): lost with that, this workflow is lost"
        if count >= enough and what == "machine":
            return (
                f"{count} of its {len(keepers)} keepers are at one {what} ({name}): while that is "
                "away, this workflow stands still"
            )
    return ""


def closest(workflow: str, peers: Iterable[bytes], count: int, overlay: str) -> list[bytes]:
    """By that overlay's way of measuring."""
    at, measure = place(workflow), far(overlay)
    return heapq.nsmallest(count, peers, key=lambda peer: measure(peer, at))
