"""The service of `pilots` at a peer: its pilot, its part as master, and the posts of its homes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..service import Context, Metric, Service, Work
from .assignment import preload
from .master import Master
from .pilot import Pilot
from .pilots import Pilots
from .site import SiteView


class PilotsService(Service):
    def __init__(self, context: Context) -> None:
        rpc, members, rng, config = context.rpc, context.members, context.rng, context.config
        door, files = context.door, context.files
        self.site = SiteView(members)
        self.pilot = Pilot(
            rpc, members, self.site, rng, config, door.reserve, door.ticket, files.held
        )
        self.master = Master(rpc, members, self.site, self.pilot, rng, config)
        self.pilots = self.strategy = Pilots(
            rpc, members, self.site, rng, config, context.on_placed, context.estimate
        )
        door.on_room.append(self.pilot.changed)
        files.on_made.append(self.pilot.made)
        files.on_told.append(self.pilot.heard)

    def works(self) -> list[tuple[str, Work]]:
        return [
            ("pilot", self.pilot.run),
            ("master pilot", self.master.run),
            ("pilots", self.pilots.run),
        ]

    def metrics(self) -> list[Metric]:
        return [
            Metric("pilot", "Rounds that this peer took part in", lambda: self.pilot.counts),
            Metric("master", "Rounds that this peer called", lambda: self.master.counts),
        ]

    def preloads(self) -> list[tuple[asyncio.Event, Callable[[], None]]]:
        return [(self.master.busy, preload)]  # before the first large round

    async def close(self) -> None:
        await self.pilot.close()


make = PilotsService
