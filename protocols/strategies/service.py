"""The plug-in interface of strategies: the context a peer gives them, and the service they return.

A strategy is a folder with a module `service`, whose `make` takes a `Context` and returns a
`Service`. It registers handlers for its messages with `context.rpc`, and subscribes to the events
it needs. It has its own messages, limits and times, metrics, and page of the docs.
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
from ..ports import BookingStorage
from ..wire.rpc import Rpc
from .base import Estimate, OnPlaced, Planner, Strategy

#: runs for as long as the peer does; started again if it fails
Work = Callable[[], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class FileEvents:
    """Events of files at this peer, for strategies that place tasks near their data."""

    #: the files that are held here: a prefix of each hash, and its bytes
    held: Callable[[], dict[bytes, int]]
    #: a task made larger files here, and ran for this many seconds
    on_made: list[Callable[[float], None]] = field(default_factory=list)
    #: the home of such a task knows of its files
    on_told: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of a peer that a strategy may use."""

    rpc: Rpc
    members: Members
    liveness: Liveness
    clock: Callable[[], float]  # the wall clock
    rng: random.Random
    config: Config
    door: Door  # this peer's own capacity
    files: FileEvents
    on_placed: OnPlaced
    estimate: Estimate
    bookings: BookingStorage | None = None  # what this peer has promised, on its disk


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    help: str
    counts: Callable[[], Mapping[str, float]]


class Service:
    """A strategy at one peer: the object that places units, and everything that runs for it."""

    strategy: Strategy
    planner: Planner | None = None  # it can promise that a workflow is done in time

    def load(self) -> None:
        """Loads what an earlier process left on disk. No message was handled yet."""

    def works(self) -> list[tuple[str, Work]]:
        """What runs in the background, by the name that logs and metrics show."""
        return [(self.strategy.name, self.strategy.run)]

    def metrics(self) -> list[Metric]:
        return []

    def preloads(self) -> list[tuple[asyncio.Event, Callable[[], None]]]:
        """Functions that load slow modules, each with the event that asks for it."""
        return []

    async def close(self) -> None:
        """Stop whatever does not stop with the works."""
