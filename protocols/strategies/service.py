"""What a peer and a strategy are to each other: what it is given, and what it gives.

A strategy is a folder with a module `service`, whose `make` takes a `Context` and returns a
`Service`. It registers the messages it hears with `context.rpc`, and asks to be told of what it
wants to know. Its messages, limits and times, metrics and page of the docs are its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..capacity.door import Door
from ..config import Config
from ..membership.liveness import Liveness
from ..membership.members import Members
from ..wire.rpc import Rpc
from .base import Estimate, OnPlaced, Strategy

#: begins something that runs for as long as the peer does; should it fail, it is begun again
Work = Callable[[], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class FileEvents:
    """What becomes of files here: strategies that place by data want to know."""

    #: of those that are held: a part of their hashes, and bytes
    held: Callable[[], dict[bytes, int]]
    #: larger ones were made here, in so many seconds
    on_made: list[Callable[[float], None]] = field(default_factory=list)
    #: their home has heard of some
    on_told: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Context:
    """What a strategy is given."""

    rpc: Rpc
    members: Members
    liveness: Liveness
    clock: Callable[[], float]  # on the wall
    rng: random.Random
    config: Config
    door: Door  # to this peer's own capacity
    files: FileEvents
    on_placed: OnPlaced
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    help: str
    counts: Callable[[], Mapping[str, float]]


class Service:
    """What a strategy gives: who places units, and all that runs for it at every peer."""

    strategy: Strategy

    def works(self) -> list[tuple[str, Work]]:
        """Their names are those of parts of a peer, as logs and metrics show them."""
        return [(self.strategy.name, self.strategy.run)]

    def metrics(self) -> list[Metric]:
        return []

    def preloads(self) -> list[tuple[asyncio.Event, Callable[[], None]]]:
        """What takes long to load, and when it is wanted."""
        return []

    async def close(self) -> None:
        """Ends what the works do not end."""
