"""What the engine is handed by the daemon, or by the simulator: a disk, files, a place to run
things.

Each interface names just what is used of it. `peer/` answers with SQLite, a directory and
processes, `sim/` with a disk that fails and work that takes virtual time.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .consensus.storage import ReplicaStorage as ReplicaStorage
from .data.cache import BlobError, Cache, Reservation
from .data.swarm import BlobStore
from .wire.messages import Moved, Outcome, Work

# --------------------------------------------------------------------------- the disk


class DatabaseError(Exception):
    """It could not be written: the disk is full or broken."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A workflow of which a copy is on this disk."""

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
        """Newest first. `before`: time and id of the last one of the page before, or nothing."""

    def keepers(self, workflow: str) -> tuple[bytes, ...]:
        """Of one that is over, and of which a copy is here."""

    def is_over(self, workflow: str) -> bool:
        """A copy is here, and its end counts."""

    async def forget(self, before: float, tombstones_before: float) -> int:
        """Workflows that ended before then, with all their entries; and how many those were."""


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """Outcomes for one home, written together."""

    id: int
    home: bytes
    outcomes: tuple[Outcome, ...]


class OutboxStorage(Protocol):
    def rows(self) -> list[OutboxRow]: ...

    async def write(self, rows: Sequence[OutboxRow], settled: Sequence[int]) -> None:
        """New rows, and those that may go; all of it or nothing, or `DatabaseError`."""


# --------------------------------------------------------------------------- files


class Blobs(BlobStore, Protocol):
    """Files by the hash of their content, within a quota."""

    cache: Cache
    on_gone: Callable[[bytes], None]
    #: asks whoever may know of something that is not wanted any more
    on_pressure: Callable[[], Awaitable[None]]

    @property
    def blob_bytes_max(self) -> int: ...

    def hold(self, hash: bytes, hold: str) -> bool: ...
    def release(self, hold: str, hashes: Iterable[bytes]) -> None: ...
    def touch(self, hash: bytes) -> None: ...
    def pinned(self, hashes: Iterable[bytes]) -> contextlib.AbstractContextManager[None]: ...
    def make_room(self, size: int) -> contextlib.AbstractAsyncContextManager[Reservation]: ...
    async def put(self, data: bytes, hold: str = ...) -> bytes: ...
    async def put_many(
        self, found: list[tuple[bytes, bytes]], room: Reservation | None = None
    ) -> None: ...
    async def read_many(self, hashes: list[bytes]) -> list[tuple[bytes, bytes]]: ...
    def chunks(self, hash: bytes, start: int, end: int) -> AsyncIterator[bytes]: ...

    async def make_up(self, name: str, size: int, hold: str) -> tuple[bytes, int]:
        """An input of a recorded workflow, whose content nobody knows: its hash and size."""


class StorageError(BlobError):
    """From outside the cluster: it can't be read, or can't be written."""

    status = 502

    def __init__(self, text: str, passing: bool = False) -> None:
        super().__init__(text)
        self.passing = passing  # another try may help


class StorageElements(Protocol):
    """Where files come from and go to outside the cluster."""

    async def bring(self, url: str, hold: str) -> tuple[bytes, int]: ...
    async def deliver(self, hash: bytes, url: str, owner: str) -> None: ...


# --------------------------------------------------------------------------- attempts


class NurseryGone(Exception):
    """The process that starts and watches all others has ended; another one is being started."""


#: None: the worker has ended without an answer
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
        """Of nurseries, so far."""

    def idle_worker(self, owner: str) -> Worker | None: ...
    def give_back(self, worker: Any) -> None: ...
    def discard(self, worker: Any) -> None: ...


class Attempt(Protocol):
    """One run of a task, from its inputs to its outputs. It returns the fields of an outcome."""

    @property
    def plain(self) -> bool:
        """A call that needs nothing but an idle worker."""

    async def run(self) -> dict[str, Any]: ...
    def request(self, place: str) -> dict[str, Any]: ...
    def short(self, answer: dict[str, Any]) -> dict[str, Any] | None: ...
    async def take(self, answer: dict[str, Any]) -> dict[str, Any]: ...
    async def too_much(self, id: int) -> tuple[str, str]: ...
    def too_much_on_disk(self) -> tuple[str, str]: ...


class Launcher(Protocol):
    """Where attempts run: real processes, or simulated ones."""

    @property
    def pid(self) -> int: ...
    @property
    def processes(self) -> Processes: ...
    def attempt(self, work: Work) -> Attempt: ...
    async def fetch(self, work: Work) -> Moved: ...
    def clear(self) -> None: ...
