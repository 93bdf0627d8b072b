"""Interfaces that the engine is handed: a disk, files, and processes that run attempts.

Each interface names only what the engine uses. `peer/` implements them with SQLite, a directory and
processes; `sim/` with a disk that fails and work that takes virtual time.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .capacity.bookings import BookingRow
from .consensus.storage import ReplicaStorage as ReplicaStorage
from .data.cache import BlobError, Cache, Reservation
from .data.swarm import BlobStore
from .wire.messages import Moved, Outcome, Work

# --------------------------------------------------------------------------- the disk


class DatabaseError(Exception):
    """A write failed: the disk is full or broken."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A workflow whose journal has a copy on this disk."""

    id: str
    name: str
    owner: str
    state: str
    submitted_at: float
    ended_at: float | None
    tasks: int


class JournalStorage(ReplicaStorage, Protocol):
    """Journals as keepers write them, and as users ask about them."""

    def listed(self, before: str, limit: int, state: str, owner: str) -> list[Listed]:
        """Newest first. `before`: time and id of the previous page's last workflow, or empty."""

    def keepers(self, workflow: str) -> tuple[bytes, ...]:
        """The keepers of a workflow that is over and has a copy here."""

    def is_over(self, workflow: str) -> bool:
        """Whether a copy is here, and its end is committed."""

    async def forget(self, before: float, tombstones_before: float) -> int:
        """Delete workflows that ended before then, with all their entries; returns how many.

        `tombstones_before`: the same for the memory of copies that were given up."""


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """Outcomes for one home, written together."""

    id: int
    home: bytes
    outcomes: tuple[Outcome, ...]


class OutboxStorage(Protocol):
    def rows(self) -> list[OutboxRow]: ...

    async def write(self, rows: Sequence[OutboxRow], settled: Sequence[int]) -> None:
        """Write new rows and delete the settled ones: all of it, or nothing and `DatabaseError`."""


class BookingStorage(Protocol):
    """What this peer has promised."""

    def rows(self) -> list[BookingRow]: ...

    async def write(self, rows: Sequence[BookingRow], gone: Sequence[int]) -> None:
        """Write bookings, new or changed, and delete others by their leases."""


# --------------------------------------------------------------------------- files


class Blobs(BlobStore, Protocol):
    """Files by the hash of their content, within a quota."""

    cache: Cache
    on_gone: Callable[[bytes], None]
    #: asks the homes of workflows for files that nobody wants any more
    on_pressure: Callable[[], Awaitable[None]]

    @property
    def blob_bytes_max(self) -> int: ...

    def hold(self, digest: bytes, hold: str) -> bool: ...
    def release(self, hold: str, hashes: Iterable[bytes]) -> None: ...
    def touch(self, digest: bytes) -> None: ...
    def pinned(self, hashes: Iterable[bytes]) -> contextlib.AbstractContextManager[None]: ...
    def make_room(self, size: int) -> contextlib.AbstractAsyncContextManager[Reservation]: ...
    async def put(self, data: bytes, hold: str = ...) -> bytes: ...
    async def put_many(
        self, blobs: list[tuple[bytes, bytes]], room: Reservation | None = None
    ) -> None: ...
    async def read_many(self, hashes: list[bytes]) -> list[tuple[bytes, bytes]]: ...
    def chunks(self, digest: bytes, start: int, end: int) -> AsyncIterator[bytes]: ...

    async def make_up(self, name: str, size: int, hold: str) -> tuple[bytes, int]:
        """Make up an input of a recorded workflow, whose content is unknown: its hash and size."""


class StorageError(BlobError):
    """A file outside the cluster could not be read or written."""

    status = 502

    def __init__(self, text: str, passing: bool = False) -> None:
        super().__init__(text)
        self.passing = passing  # a retry may help


class StorageElements(Protocol):
    """Storage outside the cluster, which files come from and go to."""

    async def bring(self, url: str, hold: str) -> tuple[bytes, int]: ...
    async def deliver(self, digest: bytes, url: str, owner: str) -> None: ...


# --------------------------------------------------------------------------- attempts


class NurseryGone(Exception):
    """The process that starts and watches all others has ended; it is being started again."""


#: a worker's answer; None if it ended without one
Reply = dict[str, Any] | None


class Worker(Protocol):
    """A warm process that runs calls, one at a time."""

    @property
    def id(self) -> int: ...
    @property
    def place(self) -> str: ...
    def send(self, request: Mapping[str, Any], on_reply: Callable[[Reply], None]) -> None: ...


class Processes(Protocol):
    @property
    def losses(self) -> int:
        """Nurseries lost so far."""

    def idle_worker(self, owner: str) -> Worker | None: ...
    def give_back(self, worker: Any) -> None: ...
    def discard(self, worker: Any) -> None: ...


class Attempt(Protocol):
    """One run of a task, from its inputs to its outputs; its result is the fields of an outcome."""

    @property
    def plain(self) -> bool:
        """Whether it is a call that needs nothing but an idle worker."""

    async def run(self) -> dict[str, Any]: ...
    def request(self, place: str) -> dict[str, Any]: ...
    def short(self, answer: dict[str, Any]) -> dict[str, Any] | None: ...
    async def take(self, answer: dict[str, Any]) -> dict[str, Any]: ...
    async def too_much(self, pid: int) -> tuple[str, str]: ...
    def too_much_on_disk(self) -> tuple[str, str]: ...


class Launcher(Protocol):
    """Starts attempts: real processes, or simulated ones."""

    @property
    def pid(self) -> int: ...
    @property
    def processes(self) -> Processes: ...
    def attempt(self, work: Work) -> Attempt: ...
    async def fetch(self, work: Work) -> Moved: ...
    def clear(self) -> None: ...
