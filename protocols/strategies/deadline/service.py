"""The service of `deadline` at a peer: plans of its homes, and what it has promised itself."""

from __future__ import annotations

from collections.abc import Mapping

from ..service import Context, Metric, Service, Work
from .config import DeadlineConfig
from .deadline import Deadline
from .planner import DirectPlanner
from .provider import Provider


class DeadlineService(Service):
    def __init__(self, context: Context) -> None:
        rpc, members, config = context.rpc, context.members, context.config
        own = config.of(DeadlineConfig)
        self.strategy = Deadline(
            rpc, members, context.rng, config, context.on_placed, context.estimate
        )
        self.planner = self._planner = DirectPlanner(rpc, members, own)
        self.provider = Provider(
            rpc, context.door, members.me.boot, context.bookings, context.clock, own
        )
        self._bookings = context.door.admission.bookings

    def load(self) -> None:
        self.provider.load()

    def works(self) -> list[tuple[str, Work]]:
        return [*super().works(), ("bookings", self.provider.run)]

    def metrics(self) -> list[Metric]:
        return [Metric("bookings", "Promised tasks at this peer", self._counts)]

    def _counts(self) -> Mapping[str, float]:
        return {"here": len(self._bookings), "asked": self._planner.asked}


make = DeadlineService
