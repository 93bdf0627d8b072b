"""A few units where they were submitted, if there is room: on the spot, no messages."""

from __future__ import annotations

from ..capacity.matching import slots, unmet
from ..wire.messages import Member, Offers, Reserve, ReturnLeases, Room
from ..wire.rpc import Rpc
from .base import Estimate, Placed, Placement
from .waiting import Waiting

GROUPS_MAX = 4


def place_here(
    name: str, waiting: Waiting, rpc: Rpc, me: Member, known: int, estimate: Estimate
) -> tuple[list[Placed], bool]:
    """What found room, and whether this peer had less of it than was asked for."""
    groups = list(waiting.groups.values())
    if not groups or len(groups) > GROUPS_MAX:
        return [], False
    for group in groups:
        if group.left > slots(me.capacity, group.needs.capacity):
            return [], False
        if unmet(me.capacity, me.traits, group.needs):
            return [], False
        if any(me.contact.id in u.avoid for h in group.heaps.values() for _, _, u in h):
            return [], False
    asks = tuple(Room(g.needs, g.left, estimate(g.top), owner=g.top.owner[:64]) for g in groups)
    answer = rpc.ask_self(Reserve.of(asks, False, 0), Offers)
    if answer is None:
        return [], True
    placed: list[Placed] = []
    short = False
    for group, ask, grant in zip(groups, asks, answer.grants, strict=False):
        asked = [(me.contact.id, len(grant.leases), grant.refusal)]
        why = "there was room where it was submitted"
        record = Placement(name, asked, known=known, why=why)
        unused = []
        for lease in grant.leases:
            unit = waiting.pop(group)
            if unit is None:
                unused.append(lease)
            else:
                placed.append(Placed(unit, me.contact, lease, record))
        if unused:
            rpc.tell(me.contact, ReturnLeases(leases=tuple(unused)))
        short |= len(grant.leases) < ask.count
        waiting.forget_if_empty(group)
    return placed, short
