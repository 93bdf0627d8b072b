"""The service of `tickets` at a peer: claims of its homes, the cells it owns, and its ticket."""

from __future__ import annotations

from ..service import Context, Metric, Service, Work
from .claims import Tickets
from .owner import Owner
from .provider import TicketProvider
from .space import Space


class TicketsService(Service):
    def __init__(self, context: Context) -> None:
        rpc, members, rng, config = context.rpc, context.members, context.rng, context.config
        door, space = context.door, Space(members, config)
        self.owner = Owner(rpc, members, space, rng, config)
        self.claims = self.strategy = Tickets(
            rpc, members, space, rng, config, context.on_placed, context.estimate
        )
        self.provider = TicketProvider(rpc, members, space, rng, config, door.reserve, door.ticket)
        door.on_room.append(self.provider.changed)

    def works(self) -> list[tuple[str, Work]]:
        return [
            ("claims", self.claims.run),
            ("cells", self.owner.run),
            ("provider", self.provider.run),
        ]

    def metrics(self) -> list[Metric]:
        return [
            Metric("claims", "Claims of this peer's workflows", lambda: self.claims.counts),
            Metric("cells", "Claims and tickets in its cells", lambda: self.owner.counts),
            Metric("tickets", "Tickets of this peer", lambda: self.provider.counts),
        ]

    async def close(self) -> None:
        await self.owner.close()


make = TicketsService
