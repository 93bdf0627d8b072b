"""Dice: a few peers that fit are drawn, and asked in turn. A strategy as small as one can be."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from valence.protocols.capacity.matching import explain, unmet
from valence.protocols.strategies.base import Placed, Placement, Unit
from valence.protocols.strategies.service import Context, Metric, Service, Work
from valence.protocols.strategies.waiting import Group, Waiting
from valence.protocols.wire.messages import (
    AttemptKey,
    Capacity,
    Member,
    Offers,
    Reserve,
    ReturnLeases,
    Room,
)
from valence.protocols.wire.rpc import CallFailed

DRAWN = 4
AGAIN_S = 0.2


class Dice:
    name = "dice"

    def __init__(self, context: Context) -> None:
        self.counts: Counter[str] = Counter()
        self._context = context
        self._waiting = Waiting(context.estimate, by_avoid=True)
        self._wake = asyncio.Event()

    def add(self, units: Iterable[Unit]) -> None:
        self._waiting.add(units, asyncio.get_running_loop().time())
        self._wake.set()

    def withdraw(self, keys: Iterable[AttemptKey]) -> None:
        self._waiting.withdraw(keys)

    def waiting_for(self, key: AttemptKey) -> str | None:
        return self._waiting.reason(key)

    def vacancy(self, peer: bytes, free: Capacity) -> None:
        self._wake.set()

    async def run(self) -> None:
        while True:
            if not self._waiting:
                await self._wake.wait()
            self._wake.clear()
            for group in sorted(self._waiting.groups.values(), key=lambda group: group.order):
                await self._roll(group)
            try:
                async with asyncio.timeout(AGAIN_S if self._waiting else None):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _roll(self, group: Group) -> None:
        here = self._context.members.here()
        fitting = [m for m in here if not unmet(m.capacity, m.traits, group.needs)]
        group.reason = explain(here, group.needs) or f"none of {len(fitting)} peers had room"
        fitting = [m for m in fitting if m.contact.id not in group.avoid] or fitting
        self._context.rng.shuffle(fitting)
        for member in fitting[:DRAWN]:
            if group.left:
                await self._ask(group, member)
        self._waiting.forget_if_empty(group)

    async def _ask(self, group: Group, member: Member) -> None:
        room = Room(group.needs, group.left, group.top.runtime_s, owner=group.top.owner)
        self.counts["asked"] += 1
        try:
            message = Reserve(asks=(room,))
            answer = await self._context.rpc.call(member.contact, message, Offers, 2.0)
        except CallFailed:
            return
        [grant] = answer.grants
        record = Placement(
            self.name,
            [(member.contact.id, len(grant.leases), grant.refusal)],
            why="the dice said so",
        )
        placed = []
        for lease in grant.leases:
            unit = self._waiting.pop(group)
            if unit is None:
                returned = ReturnLeases(leases=(lease,))
                self._context.rpc.tell(member.contact, returned)
            else:
                placed.append(Placed(unit, member.contact, lease, record))
        self.counts["placed"] += len(placed)
        if placed:
            self._context.on_placed(placed)


class DiceService(Service):
    def __init__(self, context: Context) -> None:
        self.dice = self.strategy = Dice(context)

    def works(self) -> list[tuple[str, Work]]:
        return [("dice", self.dice.run)]

    def metrics(self) -> list[Metric]:
        return [Metric("dice", "Peers asked, units placed, by dice", lambda: self.dice.counts)]


make = DiceService
