"""The service of `chemical` at a peer: its part of the layer, its questions, and its captures."""

from __future__ import annotations

from ..service import Context, Metric, Service, Work
from .chemical import Chemical
from .layer import Layer
from .questions import Questions


class ChemicalService(Service):
    def __init__(self, context: Context) -> None:
        rpc, members, rng, config = context.rpc, context.members, context.rng, context.config
        self.layer = Layer(rpc, members, context.liveness, rng, config, context.door.ticket)
        self.questions = Questions(rpc, members, self.layer, rng, config)
        self.captures = self.strategy = Chemical(
            rpc, members, self.layer, self.questions, rng, config, context.on_placed,
            context.estimate,
        )  # fmt: skip
        context.door.on_room.append(self.layer.changed)
        context.door.looked_at.append(self.layer.look)

    def works(self) -> list[tuple[str, Work]]:
        return [("layer", self.layer.run), ("captures", self.captures.run)]

    def metrics(self) -> list[Metric]:
        return [Metric("layer", "The chemical layer at this peer", lambda: self.layer.counts)]

    async def close(self) -> None:
        await self.captures.close()
        await self.questions.close()
        await self.layer.close()


make = ChemicalService
