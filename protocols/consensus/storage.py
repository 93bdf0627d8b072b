"""The storage under replicated journals: SQLite in `peer/`, a disk that fails in `sim/`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..wire.messages import Entry
from .replica import Replica


@dataclass(frozen=True, slots=True)
class Write:
    """A change of one journal's copy: all of it gets onto the disk, or none."""

    workflow: str
    promised: int
    cut_at: int | None = None
    entries: tuple[Entry, ...] = ()
    over: bool = False  # its end is on a majority
    forget: bool = False  # remove the copy; its promise, and how far it was, stay
    position: tuple[int, int] = (0, 0)  # of a removed copy: its last epoch, its entries
    #: If the copy is removed because its line does not hold: the era of the line that does. What
    #: stays is the promise, and how far the copy was, when it left that era.
    back_to: int | None = None
    voided: int = 0  # the birth of a copy that is removed because its submission broke off


class ReplicaStorage(Protocol):
    @property
    def trouble(self) -> str:
        """Why writes do not get onto the disk, while they don't; else empty."""

    def write(self, writes: Sequence[Write], soon: bool = False) -> asyncio.Future[None]:
        """Writes in the order of the calls. The future resolves when these are on disk, however
        long that takes.

        `soon`: nobody waits for them, so they may share the sync of later writes."""

    def first(self, write: Write, patient: bool) -> asyncio.Future[None]:
        """The first write of a journal that is born here. If the disk refuses it, the future has
        an exception.

        `patient`: its user has to wait for more than this write."""

    def entries(self, workflow: str, start: int, end: int, bytes_max: int) -> list[Entry]: ...

    def unfinished(self) -> list[Replica]:
        """All copies on this disk whose end is not known to be on a majority."""

    def ended(self, after: str, limit: int) -> list[tuple[str, tuple[bytes, ...], int]]:
        """Copies whose end is on a majority, in the order of their names: each with its keepers and
        its last entry's epoch."""

    def replica(self, workflow: str) -> Replica | None: ...

    def is_void(self, workflow: str) -> bool:
        """A part of its submission was never kept, so nobody was told that it was accepted."""

    def remains(self, workflow: str) -> Replica:
        """An empty copy that knows what is remembered of an earlier copy on this peer."""
