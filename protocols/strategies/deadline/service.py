"""The service of `deadline` at a peer: plans of its homes, and what it has promised itself."""

from __future__ import annotations

from collections.abc import Mapping

from ..service import Context, Metric, Service, Work
from .config import DeadlineConfig
from .deadline import Deadline
from .planner import TreePlanner
from .provider import Provider
from .tree import Tree


class DeadlineService(Service):
    def __init__(self, context: Context) -> None:
        rpc, members, config = context.rpc, context.members, context.config
        own = config.of(DeadlineConfig)
        self.strategy = Deadline(
            rpc, members, context.rng, config, context.on_placed, context.estimate
        )
        self.provider = Provider(
            rpc, context.door, members.me.boot, context.bookings, context.clock, own
        )
        self.tree = Tree(rpc, members, context.door, self.provider, context.clock, own)
        self.planner = self._planner = TreePlanner(rpc, members, self.tree, own)
        self._bookings = context.door.admission.bookings

    def load(self) -> None:
        self.provider.load()

    def works(self) -> list[tuple[str, Work]]:
        return [*super().works(), ("bookings", self.provider.run), ("tree", self.tree.run)]

    def metrics(self) -> list[Metric]:
        return [
            Metric("bookings", "Promised tasks at this peer", self._counts),
            Metric("tree", "Its part of the tree of summaries", lambda: self.tree.counts),
        ]

    async def close(self) -> None:
        await self.tree.close()

    def _counts(self) -> Mapping[str, float]:
        return {"here": len(self._bookings), "asked": self._planner.asked}


make = DeadlineService
