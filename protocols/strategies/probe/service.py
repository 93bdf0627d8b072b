"""The service of `probe` at a peer."""

from __future__ import annotations

from ..service import Context, Service
from .probe import Probe


class ProbeService(Service):
    def __init__(self, context: Context) -> None:
        self.strategy = Probe(
            context.rpc, context.members, context.rng, context.config, context.on_placed,
            context.estimate,
        )  # fmt: skip


make = ProbeService
