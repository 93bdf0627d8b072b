"""Keeps each outcome until its home has it on *its* disk, and reports it until then.

Rules:
- An outcome is on this peer's disk before it is reported, and stays there until its home has said
  that it is committed. Reports are repeated for ever, in batches, with exponential backoff.
- An outcome for this very peer goes straight to the home in this process: its journal is on the
  same disk, and both are lost together.
- Outcomes that come while the disk is busy share the next write; those that come while a report is
  under way share the next report.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from ..capacity.door import Door
from ..membership.members import Members
from ..ports import Blobs, DatabaseError, OutboxRow, OutboxStorage
from ..tasks import Tasks
from ..wire.messages import AttemptKey, Outcome, Report, Reported
from ..wire.rpc import CallFailed, Rpc
from .fencing import Fencing

log = logging.getLogger("valence.executor")

REPORT_OUTCOMES_MAX = 500
REPORT_BYTES_MAX = 1 << 20
ENCLOSED_BYTES_MAX = 16 * 1024
ENCLOSED_TOTAL_BYTES_MAX = 64 * 1024
ENCLOSED_MAX = 256
REPORT_S_MAX = 15.0
REPORT_RETRY_S_MIN, REPORT_RETRY_S_MAX = 0.2, 5.0
WRITE_RETRY_S_MIN, WRITE_RETRY_S_MAX = 0.1, 10.0
GATHER_S = 0.01
GATHER_MAX = 100
DELETE_S = 1.0
#: an outcome is dropped when no peer has known of its workflow for this time
UNKNOWN_S_MAX = 600.0

FindHome = Callable[[str], Awaitable[bytes | None]]


async def _nobody(workflow: str) -> bytes | None:
    return None


@dataclass(slots=True)
class _Row:
    """Outcomes that were written together. The row is deleted when the last of them is settled."""

    id: int
    left: int


@dataclass(slots=True)
class _Unsaved:
    """An outcome that is not on disk yet."""

    home: bytes
    ended: Outcome


class Outbox:
    def __init__(
        self,
        *,
        rpc: Rpc,
        members: Members,
        door: Door,
        blobs: Blobs,
        storage: OutboxStorage,
        fencing: Fencing,
        counts: Counter[str],
    ) -> None:
        #: takes an outcome straight to the home in this process
        self.take_own: Callable[[Outcome], bool] = lambda ended: False
        self.on_let_go: Callable[[Outcome], None] = lambda ended: None  # its home has it now
        self.find_home: FindHome = _nobody  # of a workflow whose home does not answer
        self.news = asyncio.Event()  # an outcome came or was settled
        self._rpc = rpc
        self._members = members
        self._door = door
        self._blobs = blobs
        self._storage = storage
        self._fencing = fencing
        self._counts = counts
        self._boxes: dict[bytes, dict[AttemptKey, tuple[Outcome, _Row | None]]] = {}
        self._unsaved: dict[AttemptKey, _Unsaved] = {}  # all that are in no box yet
        self._to_write: list[_Unsaved] = []
        self._settled: list[int] = []  # rows to delete; it is not urgent
        self._next_row = 1
        self._looked_for: set[str] = set()
        self._sought: dict[str, float] = {}  # workflows whose home is not known, since when
        self._saver: asyncio.Task[None] | None = None
        self._reporters: dict[bytes, asyncio.Task[None]] = {}
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks()
        fencing.on_new_home.append(self._rehome)

    def load(self) -> None:
        """Loads the outcomes that an earlier process of this peer has left."""
        for kept in self._storage.rows():
            row = _Row(kept.id, len(kept.outcomes))
            self._next_row = max(self._next_row, kept.id + 1)
            for ended in kept.outcomes:
                self._boxes.setdefault(kept.home, {})[ended.key] = ended, row
        for home in self._boxes:
            self._wake_reporter(home)

    # ----------------------------------------------------------------- questions

    def __bool__(self) -> bool:
        return bool(self._boxes or self._unsaved)

    @property
    def unsaved(self) -> int:
        return len(self._unsaved)

    def epoch_of(self, key: AttemptKey, home: bytes) -> int | None:
        """The epoch of the home that gave the attempt; None if there is no outcome of it."""
        unsaved = self._unsaved.get(key)
        if unsaved is not None:
            return unsaved.ended.epoch
        kept = self._boxes.get(home, {}).get(key)
        return kept[0].epoch if kept is not None else None

    def keys(self) -> list[AttemptKey]:
        return [*self._unsaved, *(key for box in self._boxes.values() for key in box)]

    # ----------------------------------------------------------------- keeping

    def add(self, home: bytes, ended: Outcome) -> None:
        """Writes an outcome to disk, then reports it. Nothing is reported before it is on disk."""
        unsaved = self._unsaved[ended.key] = _Unsaved(home, ended)
        if ended.outputs and home != self._rpc.me.id:
            self._tasks.spawn(self._save_with_files(unsaved))
        else:
            self._save(unsaved)

    async def _save_with_files(self, unsaved: _Unsaved) -> None:
        try:
            unsaved.ended = await self._enclose(unsaved.ended)
        except Exception:
            log.exception("could not enclose the files of %s", unsaved.ended.key)
        self._save(unsaved)

    async def _enclose(self, ended: Outcome) -> Outcome:
        """Encloses small outputs, so that the home has a copy before they are committed."""
        enclosed = []
        left = ENCLOSED_TOTAL_BYTES_MAX
        for file in ended.outputs[:ENCLOSED_MAX]:
            if file.size <= min(ENCLOSED_BYTES_MAX, left) and file.hash in self._blobs:
                try:
                    data = await self._blobs.read(file.hash, 0, file.size or 1)
                except (OSError, KeyError) as error:
                    log.warning("could not enclose %s: %r", file.name, error)
                    continue
                enclosed.append((file.hash, data))
                left -= file.size
        return ended._replace(enclosed=tuple(enclosed))

    def _save(self, unsaved: _Unsaved) -> None:
        if unsaved.home == self._rpc.me.id and not self._door.admission.queued:
            # nothing else will come soon: straight to the home in this process, without a message
            self.news.set()
            if self.take_own(unsaved.ended):
                self._unsaved.pop(unsaved.ended.key, None)
                return
        self._write_soon(unsaved)

    def _write_soon(self, unsaved: _Unsaved) -> None:
        self._to_write.append(unsaved)
        if self._saver is None or self._saver.done():
            self._saver = asyncio.ensure_future(self._save_all())

    async def _save_all(self) -> None:
        """Outcomes that came while the disk was busy share the next write: a row for each home.

        While attempts are queued here, no other peer waits for news of free capacity: then outcomes
        that come in quick succession are gathered for a moment."""
        while self._to_write:
            if self._door.admission.queued and len(self._to_write) < GATHER_MAX:
                await asyncio.sleep(GATHER_S)
            batch, self._to_write = self._to_write, []
            by_home: dict[bytes, list[_Unsaved]] = {}
            for unsaved in batch:
                by_home.setdefault(unsaved.home, []).append(unsaved)
            for unsaved in by_home.pop(self._rpc.me.id, ()):
                self._post(unsaved, None)
            rows = [(_Row(self._new_id(), len(some)), some) for some in by_home.values()]
            if rows:
                await self._write(rows)
            for row, some in rows:
                for unsaved in some:
                    self._post(unsaved, row)

    def _new_id(self) -> int:
        self._next_row += 1
        return self._next_row - 1

    async def _write(self, rows: list[tuple[_Row, list[_Unsaved]]]) -> None:
        kept = [
            OutboxRow(row.id, some[0].home, tuple(one.ended for one in some)) for row, some in rows
        ]
        settled, self._settled = self._settled, []
        delay_s = WRITE_RETRY_S_MIN
        while True:
            try:
                return await self._storage.write(kept, settled)
            except DatabaseError as error:
                log.error("outcomes can't be written to disk, trying again: %s", error)
                await asyncio.sleep(delay_s)
                delay_s = min(WRITE_RETRY_S_MAX, delay_s * 2)

    def _post(self, unsaved: _Unsaved, row: _Row | None) -> None:
        """(Its home may have changed since it was written.)"""
        self._boxes.setdefault(unsaved.home, {})[unsaved.ended.key] = unsaved.ended, row
        self._unsaved.pop(unsaved.ended.key, None)
        self.news.set()
        self._wake_reporter(unsaved.home)

    def _sweep(self) -> None:
        self._sweep_timer = None
        if self._settled:  # else a write has deleted them already
            self._tasks.spawn(self._delete())

    async def _delete(self) -> None:
        """Deletes rows whose outcomes are all settled. It may be late: reporting an outcome once
        more does no harm."""
        settled, self._settled = self._settled, []
        try:
            await self._storage.write((), settled)
        except DatabaseError as error:
            log.error("outcomes can't be deleted from disk: %s", error)

    # ----------------------------------------------------------------- reporting

    def _wake_reporter(self, home: bytes) -> None:
        if home not in self._reporters:
            self._reporters[home] = asyncio.ensure_future(self._report_to(home))

    async def _report_to(self, home: bytes) -> None:
        """Reports until this home has acknowledged all of its outcomes."""
        delay_s = REPORT_RETRY_S_MIN
        box = self._boxes[home]
        while box:
            batch = self._batch(box.values())
            answer = await self._report(home, batch)
            settled = [] if answer is None else self._settled_by(answer, batch)
            if answer is not None:
                self._put_last(box, batch.keys() - set(settled))
            if not settled:
                await asyncio.sleep(delay_s)
                delay_s = min(REPORT_RETRY_S_MAX, delay_s * 2)
                continue
            delay_s = REPORT_RETRY_S_MIN
            for key in settled:
                if key in box:  # else it has gone to another home meanwhile
                    self._let_go(*box.pop(key))
            self.news.set()
        # no await between the last look into the box and this: a newcomer starts a new reporter
        del self._boxes[home], self._reporters[home]

    async def _report(self, home: bytes, batch: dict[AttemptKey, Outcome]) -> Reported | None:
        contact = self._members.contact(home)
        try:
            if contact is None or not self._members.is_here(home):
                self._tasks.spawn(self._look_for({key.workflow for key in batch}))
                raise CallFailed("the home is gone")
            message = Report.of(tuple(batch.values()), self._door.free)
            return await self._rpc.call(contact, message, Reported, REPORT_S_MAX)
        except CallFailed as error:
            self._counts["reports_failed"] += 1
            log.debug("report to %s failed: %s", home.hex()[:8], error)
            return None

    def _settled_by(self, answer: Reported, batch: dict[AttemptKey, Outcome]) -> list[AttemptKey]:
        return [k for k in answer.kept if k in batch] + self._seek(batch, answer)

    @staticmethod
    def _put_last(
        box: dict[AttemptKey, tuple[Outcome, _Row | None]], keys: set[AttemptKey]
    ) -> None:
        """Those that were not settled go behind those that were not reported yet."""
        for key in keys:
            if key in box:
                box[key] = box.pop(key)

    @staticmethod
    def _batch(box: Iterable[tuple[Outcome, _Row | None]]) -> dict[AttemptKey, Outcome]:
        batch: dict[AttemptKey, Outcome] = {}
        size = 0
        for ended, _ in box:
            batch[ended.key] = ended
            size += size_bytes(ended)
            if len(batch) >= REPORT_OUTCOMES_MAX or size >= REPORT_BYTES_MAX:
                break
        return batch

    def _let_go(self, ended: Outcome, row: _Row | None) -> None:
        self.on_let_go(ended)
        if row is not None:
            row.left -= 1
            if not row.left:
                self._settled.append(row.id)
                if self._sweep_timer is None:
                    loop = asyncio.get_running_loop()
                    self._sweep_timer = loop.call_later(DELETE_S, self._sweep)

    # ----------------------------------------------------------------- homes that moved

    def _rehome(self, workflow: str, home: bytes) -> None:
        self._sought.pop(workflow, None)
        for key, unsaved in self._unsaved.items():
            if key.workflow == workflow:
                unsaved.home = home
        for old, box in list(self._boxes.items()):
            if old != home:
                for key in [key for key in box if key.workflow == workflow]:
                    self._move(key, *box.pop(key), home)
        if self._boxes.get(home):
            self._wake_reporter(home)

    def _move(self, key: AttemptKey, ended: Outcome, row: _Row | None, home: bytes) -> None:
        if row is None and home != self._rpc.me.id:
            # it was for this very peer, and is not on disk yet
            unsaved = self._unsaved[key] = _Unsaved(home, ended)
            self._write_soon(unsaved)
        else:
            self._boxes.setdefault(home, {})[key] = ended, row

    def _seek(self, batch: dict[AttemptKey, Outcome], answer: Reported) -> list[AttemptKey]:
        """Follows homes that have moved, and looks for those that are not known. Returns the
        outcomes that no peer has known of for too long: they are dropped."""
        self._follow(answer)
        lost = {key.workflow for key in answer.unknown} | {
            w for w, home in answer.moved if not home
        }
        if lost:
            self._tasks.spawn(self._look_for(lost))
        limit = self._now() - UNKNOWN_S_MAX
        old = {w for w, since in self._sought.items() if since < limit}
        return [key for key in answer.unknown if key.workflow in old and key in batch]

    def _follow(self, answer: Reported) -> None:
        moved = {workflow: home for workflow, home in answer.moved if any(home)}
        for workflow, home in moved.items():
            if home != self._rpc.me.id or not self._fencing.has_heard_of(workflow):
                self._fencing.rehome(workflow, home)

    async def _look_for(self, workflows: set[str]) -> None:
        for workflow in workflows - self._looked_for:
            self._looked_for.add(workflow)
            self._sought.setdefault(workflow, self._now())
            try:
                home = await self.find_home(workflow)
            finally:
                self._looked_for.discard(workflow)
            if home:
                self._fencing.rehome(workflow, home)
            elif home is not None:  # it is not lost: its keepers are electing a home
                self._sought[workflow] = self._now()

    # ----------------------------------------------------------------- the end

    async def drain(self, until: float) -> None:
        """Waits until everything is settled, or it is too late."""
        while self and self._now() < until:
            self.news.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self.news.wait()
            except TimeoutError:
                break

    async def close(self) -> None:
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        tasks = [*self._reporters.values()]
        if self._saver is not None:
            tasks.append(self._saver)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._tasks.close()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def size_bytes(ended: Outcome) -> int:
    """About how many bytes the outcome takes in a message."""
    value = len(ended.value.data) if ended.value else 0
    files = sum(len(file.name) + 60 for file in ended.outputs)
    enclosed = sum(len(data) for _, data in ended.enclosed)
    return 200 + len(ended.log_tail) + len(ended.reason) + value + files + enclosed
