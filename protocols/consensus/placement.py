"""The choice of a journal's keepers: the peers closest to the workflow's id, if possible on
different machines and sites, so that no single failure takes several keepers of one journal.

A peer that accepts a workflow draws an id close to its own, so it is the closest keeper itself, and
no hop is spent on the way to one. (The id made from an idempotency key lies anywhere; there too the
accepting peer is the first home, and the other keepers are the closest peers.)
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


#: the ids of workflows in a task queue begin with this
QUEUED = "q"


def is_queued(workflow: str) -> bool:
    return workflow.startswith(QUEUED)


def new_id(me: bytes, rng: random.Random, prefix: str = "w") -> str:
    return f"{prefix}{rng.getrandbits(48):012x}{me.hex()[:PLACE_DIGITS]}"


def place(workflow: str) -> bytes:
    """A workflow's place on the overlay's circle of ids."""
    digest = hashlib.blake2b(workflow.encode(), digest_size=20).digest()
    try:
        start = bytes.fromhex(workflow[-PLACE_DIGITS:])
    except ValueError:
        return digest
    return start + digest[len(start) :]


class Where(NamedTuple):
    """A peer, and the machine and site that it fails with."""

    id: bytes
    host: str
    site: str


def where(member: Member) -> Where:
    return Where(member.contact.id, member.contact.host, member.traits.site)


def spread(
    workflow: str, chosen: Iterable[Where], free: Iterable[Where], count: int, overlay: str
) -> list[bytes]:
    """`count` more keepers: each, if possible, on another machine than all those chosen so far, and
    at another site; among such peers the closest."""
    at, measure = place(workflow), far(overlay)
    taken, left = list(chosen), list(free)
    added: list[bytes] = []
    while left and len(added) < count:
        hosts, sites = {w.host for w in taken}, {w.site for w in taken}
        best = min(left, key=lambda w: (w.host in hosts, w.site in sites, measure(w.id, at)))
        left.remove(best)
        taken.append(best)
        added.append(best.id)
    return added


def crowding(keepers: Sequence[Where]) -> tuple[int, int]:
    """How many keepers share a machine with another one, and how many share a site: the machine
    matters first."""
    hosts, sites = {w.host for w in keepers}, {w.site for w in keepers}
    return len(keepers) - len(hosts), len(keepers) - len(sites)


def without_one(me: bytes, keepers: Sequence[Where]) -> list[Where]:
    """One keeper less, but never `me`: of the rest, as few as possible share a machine or site."""
    ways = [[w for w in keepers if w != out] for out in reversed(keepers) if out.id != me]
    return min(ways, key=crowding, default=list(keepers))


def would_part(me: bytes, keepers: Sequence[Where], new: Where) -> bool:
    """With this peer in the place of another keeper, fewer keepers share a machine or site. (Only
    then is it worth a change, so one change is never undone by the next.)"""
    hosts, sites = {w.host for w in keepers}, {w.site for w in keepers}
    shared = len(hosts) < len(keepers), len(sites) < len(keepers)
    if not (shared[0] and new.host not in hosts) and not (shared[1] and new.site not in sites):
        return False  # the usual case: other keepers are there already
    now = crowding(keepers)
    return any(now) and crowding(without_one(me, [*keepers, new])) < now


def risk(keepers: Sequence[Where]) -> str:
    """In words: the damage if one machine, or one site, is lost; empty: none."""
    enough = len(keepers) // 2 + 1
    for place, counts in (
        ("on one machine", Counter(w.host for w in keepers)),
        ("at one site", Counter(w.site for w in keepers)),
    ):
        [(name, count)] = counts.most_common(1) or [("", 0)]
        if count == len(keepers) > 0:
            copies = f"all {count} copies of its journal are" if count > 1 else "its only copy is"
            return f"{copies} {place} ({name}): if that is lost, so is this workflow"
        if count >= enough and place == "on one machine":
            return (
                f"{count} of the {len(keepers)} copies of its journal are {place} ({name}): while "
                "that is away, this workflow stands still"
            )
    return ""


def closest(workflow: str, peers: Iterable[bytes], count: int, overlay: str) -> list[bytes]:
    """The peers closest to a workflow, by the distance of that overlay."""
    at, measure = place(workflow), far(overlay)
    return heapq.nsmallest(count, peers, key=lambda peer: measure(peer, at))
