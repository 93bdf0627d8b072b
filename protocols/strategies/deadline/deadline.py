"""The strategy `deadline`: a task goes to the peer that has booked it, at once.

Which tasks are booked, where and when, is planned for a whole workflow before it is accepted
(`planner`), and kept in its journal. A task without a booking is placed as `probe` places it: it
belongs to a workflow that was promised nothing, or whose promise was broken.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from ...config import Config
from ...membership.members import Members
from ...wire.messages import AttemptKey, Capacity
from ...wire.rpc import Rpc
from ..base import Estimate, OnPlaced, Placed, Placement, Unit
from ..probe.probe import Probe


class Deadline:
    name = "deadline"

    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        rng: random.Random,
        config: Config,
        on_placed: OnPlaced,
        estimate: Estimate,
    ) -> None:
        self._members = members
        self._on_placed = on_placed
        self._unbooked = Probe(rpc, members, rng, config, on_placed, estimate)
        self._unbooked.name = self.name

    def add(self, units: Iterable[Unit]) -> None:
        placed: list[Placed] = []
        unbooked: list[Unit] = []
        record = Placement(self.name, known=self._members.count)
        record.why = "it was booked there when its workflow was accepted, or booked again since"
        for unit in units:
            peer, lease = unit.booked or (b"", 0)
            contact = self._members.contact(peer) if peer else None
            if contact is None:
                unbooked.append(unit)
            else:
                placed.append(Placed(unit, contact, lease, record))
        if unbooked:
            self._unbooked.add(unbooked)
        if placed:
            self._on_placed(placed)

    def withdraw(self, keys: Iterable[AttemptKey]) -> None:
        self._unbooked.withdraw(keys)

    def waiting_for(self, key: AttemptKey) -> str | None:
        return self._unbooked.waiting_for(key)

    def vacancy(self, peer: bytes, free: Capacity) -> None:
        self._unbooked.vacancy(peer, free)

    async def run(self) -> None:
        await self._unbooked.run()
