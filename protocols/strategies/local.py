"""Places a few units at the peer where they were submitted, at once and without a message."""

from __future__ import annotations

from ..capacity.matching import slots, unmet
from ..wire.messages import Member, Offers, Reserve, ReturnLeases, Room
from ..wire.rpc import Rpc
from .base import Estimate, Placed, Placement
from .waiting import Group, Waiting

GROUPS_MAX = 4


def place_here(
    name: str, waiting: Waiting, rpc: Rpc, me: Member, known: int, estimate: Estimate
) -> tuple[list[Placed], bool]:
    """The units that were placed, and whether this peer had less free capacity than was asked."""
    groups = list(waiting.groups.values())
    if not groups or len(groups) > GROUPS_MAX:
        return [], False
    if not all(_suits(me, group) for group in groups):
        return [], False
    asks = tuple(Room(g.needs, g.left, estimate(g.top), owner=g.top.owner[:64]) for g in groups)
    answer = rpc.ask_self(Reserve.of(asks, False, 0), Offers)
    if answer is None:
        return [], True
    placed: list[Placed] = []
    short = False
    for group, ask, grant in zip(groups, asks, answer.grants, strict=False):
        asked = [(me.contact.id, len(grant.leases), grant.refusal)]
        why = "the peer it was submitted to had free capacity"
        record = Placement(name, asked, known=known, why=why)
        used, unused = waiting.use(group, me.contact, grant.leases, record)
        placed += used
        if unused:
            rpc.tell(me.contact, ReturnLeases(leases=tuple(unused)))
        short |= len(grant.leases) < ask.count
        waiting.forget_if_empty(group)
    return placed, short


def _suits(me: Member, group: Group) -> bool:
    """The whole group fits here when this peer is idle, and no unit of it avoids this peer."""
    if group.left > slots(me.capacity, group.needs.capacity):
        return False
    if unmet(me.capacity, me.traits, group.needs):
        return False
    return not any(me.contact.id in u.avoid for heap in group.heaps.values() for _, _, u in heap)
