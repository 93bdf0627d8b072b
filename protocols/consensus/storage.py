"""What keeping asks of a disk. `peer/` answers it with SQLite, `sim/` with a disk that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..wire.messages import Entry
from .replica import Replica


@dataclass(frozen=True, slots=True)
class Write:
    """To one journal's copy, all of it or nothing."""

    workflow: str
    promised: int
    cut_at: int | None = None
    entries: tuple[Entry, ...] = ()
    over: bool = False  # its end is on a majority
    forget: bool = False  # the copy goes; what was promised, and how far it was, stays
    position: tuple[int, int] = (0, 0)  # of a copy that goes: its last epoch, its entries
    #: of a copy that goes, as it is of a line that does not hold: the era of the one that does.
    #: What stays is what was promised, and how far the copy was, when it left that era.
    back_to: int | None = None
    voided: int = 0  # the birth of a copy that goes because its submission broke off


class ReplicaStorage(Protocol):
    @property
    def trouble(self) -> str:
        """Why nothing gets onto the disk, while that is so."""

    def write(self, writes: Sequence[Write], soon: bool = False) -> asyncio.Future[None]:
        """In the order of the calls; resolved when it is on disk, however long that takes.

        `soon`: nobody waits for it, it may share the sync of what follows."""

    def first(self, write: Write, patient: bool) -> asyncio.Future[None]:
        """Of a journal that is born here: a disk that refuses it says so, by an exception.

        `patient`: its user waits for more than this."""

    def entries(self, workflow: str, start: int, end: int, bytes_max: int) -> list[Entry]: ...

    def unfinished(self) -> list[Replica]:
        """All copies whose end is not known to be on a majority, as the disk has them."""

    def ended(self, after: str, limit: int) -> list[tuple[str, tuple[bytes, ...], int]]:
        """Copies whose end is on a majority, by their names: keepers, the last entry's epoch."""

    def replica(self, workflow: str) -> Replica | None: ...

    def is_void(self, workflow: str) -> bool:
        """Of its submission not everything was kept: nobody was told that it was accepted."""

    def remains(self, workflow: str) -> Replica:
        """An empty copy, with what is remembered of one that was here before."""
