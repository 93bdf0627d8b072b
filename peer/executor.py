"""The executing side: admits work, runs attempts, and keeps each outcome until its home has it.

Rules:
- Only `Admission` says what may run; every path that ends an attempt releases it there.
- An outcome is on this peer's disk before it is reported, and stays until the home has said that
  it is on *its* disk. Reports are repeated for ever, in batches, with back-off.
- A key that is already here is never started again; after a restart nothing runs, so `Inquire`
  answers `unknown`, and the home places the attempt elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgpack

from protocols.admission import Admission
from protocols.codec import wire_fields
from protocols.members import Members
from protocols.messages import (
    Abort,
    AttemptKey,
    Commit,
    Committed,
    Contact,
    Describe,
    Described,
    Done,
    Inquire,
    Inquired,
    Offers,
    Outcome,
    Report,
    Reported,
    Reserve,
    ReturnLeases,
    Vacancy,
    Work,
)
from protocols.rpc import CallFailed, Rpc

from .attempt import Attempt, outcome, remove_tree
from .blobs import Blobs
from .database import Database, DatabaseError
from .processes import Processes
from .transfer import Transfer

log = logging.getLogger("valence.executor")

REPORT_OUTCOMES_MAX = 500
REPORT_BYTES_MAX = 1 << 20
ENCLOSED_BYTES_MAX = 16 * 1024
ENCLOSED_TOTAL_BYTES_MAX = 64 * 1024
REPORT_RETRY_S_MIN, REPORT_RETRY_S_MAX = 0.2, 5.0


@dataclass(slots=True)
class _Held:
    work: Work
    home: bytes
    queued_at: float
    state: str  # queued, running or reporting
    task: asyncio.Task[None] | None = None


class Executor:
    def __init__(
        self,
        *,
        rpc: Rpc,
        members: Members,
        admission: Admission,
        blobs: Blobs,
        transfer: Transfer,
        processes: Processes,
        database: Database,
        directory: Path,
        clock: Callable[[], float],
        log_bytes_max: int,
        lease_ttl_s: float,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.hurry = asyncio.Event()  # told a second time to leave: no more waiting for tasks
        self._rpc = rpc
        self._members = members
        self._admission = admission
        self._blobs = blobs
        self._transfer = transfer
        self._processes = processes
        self._database = database
        self._clock = clock
        self._log_bytes_max = log_bytes_max
        self._lease_ttl_s = lease_ttl_s
        self._directory = directory / "work"
        remove_tree(self._directory)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._held: dict[AttemptKey, _Held] = {}
        self._outbox: dict[bytes, dict[AttemptKey, bytes]] = {}
        self._reporters: dict[bytes, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        for kind, handler in (
            (Reserve, self._reserve),
            (ReturnLeases, self._return_leases),
            (Commit, self._commit),
            (Abort, self._abort),
            (Inquire, self._inquire),
            (Describe, self._describe),
        ):
            rpc.on(kind, handler)  # type: ignore[arg-type]

    def load(self) -> None:
        """Outcomes that an earlier run of this peer did not get rid of."""
        rows = self._database.read("select workflow, task, number, home, body from outcomes")
        for workflow, task, number, home, body in rows:
            key = AttemptKey(workflow=workflow, task=task, number=number)
            self._outbox.setdefault(home, {})[key] = body
        for home in self._outbox:
            self._wake_reporter(home)

    # ----------------------------------------------------------------- admission

    def _reserve(self, sender: Contact, message: Reserve) -> Offers:
        now = self._now()
        grants = tuple(self._admission.reserve(sender.id, room, now) for room in message.asks)
        self._set_timer()
        return Offers(grants=grants, free=self._admission.free, ttl_s=self._lease_ttl_s)

    def _return_leases(self, sender: Contact, message: ReturnLeases) -> None:
        self._admission.give_back(sender.id, message.leases)
        self._advance()

    def _commit(self, sender: Contact, message: Commit) -> Committed:
        now = self._now()
        refused = []
        for work in message.works:
            key = work.key
            if key in self._held or key in self._outbox.get(sender.id, ()):
                continue  # a repeat: it is being seen to
            verdict = self._admission.commit(sender.id, work.lease, key, now)
            if verdict not in ("run", "wait"):
                refused.append((key, verdict))
                continue
            self._held[key] = _Held(work, sender.id, self._clock(), "queued")
            if verdict == "run":
                self._start(key)
        self._advance()  # room may have come free between the lease and this
        return Committed(refused=tuple(refused))

    def _advance(self) -> None:
        """Capacity came free: begin what waits, and tell who was refused."""
        now = self._now()
        for unit in self._admission.starts(now):
            self._start(cast(AttemptKey, unit))
        for unit in self._admission.overdue(now):
            self._hand_back(unit, "it waited longer in this peer's queue than was promised")
        home = self._admission.take_wish(now)
        contact = self._members.contact(home) if home else None
        if contact is not None:
            self._rpc.tell(contact, Vacancy(free=self._admission.free))
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self._admission.next_event_at()
        if at is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(at, loop.time() + 0.01), self._advance)

    def _hand_back(self, unit: Hashable, reason: str) -> None:
        key = cast(AttemptKey, unit)
        held = self._held.get(key)
        if held is not None and held.state == "queued":
            self._admission.release(key)
            self.counts["handed_back"] += 1
            held.state = "reporting"
            self._spawn_finish(held, {"kind": "returned", "reason": reason}, 0.0)

    # ----------------------------------------------------------------- running

    def _start(self, key: AttemptKey) -> None:
        held = self._held[key]
        held.state = "running"
        held.task = asyncio.ensure_future(self._run(held))

    async def _run(self, held: _Held) -> None:
        key = held.work.key
        started_at = self._clock()
        attempt = Attempt(
            held.work,
            self._directory,
            self._processes,
            self._blobs,
            self._transfer,
            self._log_bytes_max,
        )
        try:
            found = await attempt.run()
        except asyncio.CancelledError:
            self._held.pop(key, None)
            self.counts["aborted"] += 1
            raise
        except Exception as error:
            log.exception("attempt %s", key)
            found = {"kind": "returned", "reason": f"an error in the peer: {error!r}"[:2000]}
        finally:
            self._admission.release(key)
            self._advance()
        held.state = "reporting"
        self.counts[f"attempts_{found['kind']}"] += 1
        await self._finish(held, found, started_at)

    def _spawn_finish(self, held: _Held, found: dict[str, object], started_at: float) -> None:
        held.task = asyncio.ensure_future(self._finish(held, found, started_at))

    async def _finish(self, held: _Held, found: dict[str, object], started_at: float) -> None:
        try:
            await self._keep(held, found, started_at)
        except Exception:  # without an outcome `Inquire` says unknown, and it is placed again
            log.exception("the outcome of %s", held.work.key)
        finally:
            self._held.pop(held.work.key, None)

    async def _keep(self, held: _Held, found: dict[str, object], started_at: float) -> None:
        """To disk, then to the outbox. Only what is on disk is reported."""
        key = held.work.key
        ended = outcome(held.work, found, (held.queued_at, started_at, self._clock()))
        ended = await self._enclose(ended, held.home)
        body = pack_outcome(ended)
        row = (key.workflow, key.task, key.number, held.home, self._clock(), body)
        delay_s = 0.1
        while True:
            try:
                await self._database.write(
                    [("insert or replace into outcomes values (?, ?, ?, ?, ?, ?)", row)]
                )
                break
            except DatabaseError as error:
                log.error("an outcome can't be written, trying again: %s", error)
                await asyncio.sleep(delay_s)
                delay_s = min(10.0, delay_s * 2)
        self._outbox.setdefault(held.home, {})[key] = body
        self._wake_reporter(held.home)

    async def _enclose(self, ended: Outcome, home: bytes) -> Outcome:
        """Small outputs go along, so that the home has a copy before they count."""
        if home == self._rpc.me.id:
            return ended
        enclosed = []
        left = ENCLOSED_TOTAL_BYTES_MAX
        for file in ended.outputs[:256]:
            if file.size <= min(ENCLOSED_BYTES_MAX, left) and file.hash in self._blobs:
                try:
                    data = await self._blobs.read(file.hash, 0, file.size or 1)
                except (OSError, KeyError) as error:
                    log.warning("%s does not travel along: %r", file.name, error)
                    continue
                enclosed.append((file.hash, data))
                left -= file.size
        return ended.model_copy(update={"enclosed": tuple(enclosed)}) if enclosed else ended

    # ----------------------------------------------------------------- reporting

    def _wake_reporter(self, home: bytes) -> None:
        if home not in self._reporters:
            self._reporters[home] = asyncio.ensure_future(self._report_to(home))

    async def _report_to(self, home: bytes) -> None:
        """Until this home has acknowledged all. What comes meanwhile shares the next message."""
        delay_s = REPORT_RETRY_S_MIN
        box = self._outbox[home]
        while box:
            batch, size = {}, 0
            for key, body in box.items():
                batch[key] = body
                size += len(body)
                if len(batch) >= REPORT_OUTCOMES_MAX or size >= REPORT_BYTES_MAX:
                    break
            contact = self._members.contact(home)
            try:
                if contact is None:
                    raise CallFailed("its home is not known")
                message = Report(
                    outcomes=tuple(unpack_outcome(body) for body in batch.values()),
                    free=self._admission.free,
                )
                answer = await self._rpc.call(contact, message, Reported, 15.0)
            except CallFailed as error:
                self.counts["reports_failed"] += 1
                log.debug("report to %s: %s", home.hex()[:8], error)
                await asyncio.sleep(delay_s)
                delay_s = min(REPORT_RETRY_S_MAX, delay_s * 2)
                continue
            settled = [k for k in (*answer.kept, *answer.unknown) if k in batch]
            if not settled:
                await asyncio.sleep(delay_s)
                delay_s = min(REPORT_RETRY_S_MAX, delay_s * 2)
                continue
            delay_s = REPORT_RETRY_S_MIN
            for key in settled:
                box.pop(key, None)
            self._news.set()
            try:
                await self._database.write(
                    [
                        (
                            "delete from outcomes where workflow = ? and task = ? and number = ?",
                            (k.workflow, k.task, k.number),
                        )
                        for k in settled
                    ]
                )
            except DatabaseError as error:  # it is reported once more after a restart: no harm
                log.error("outcomes can't be deleted: %s", error)
        # no await between the last look into the box and this: a newcomer starts a new reporter
        del self._outbox[home], self._reporters[home]

    # ----------------------------------------------------------------- answering

    def _abort(self, sender: Contact, message: Abort) -> Done:
        for key in message.keys:
            held = self._held.get(key)
            if held is None or held.home != sender.id:
                continue
            if held.state == "running" and held.task is not None:
                held.task.cancel()
            elif held.state == "queued":
                self._admission.release(key)
                del self._held[key]
        self._advance()
        return Done()

    def _inquire(self, sender: Contact, message: Inquire) -> Inquired:
        def state(key: AttemptKey) -> str:
            held = self._held.get(key)
            if held is not None:
                return held.state
            return "reporting" if key in self._outbox.get(sender.id, ()) else "unknown"

        return Inquired(states=tuple(map(state, message.keys)))

    def _describe(self, sender: Contact, message: Describe) -> Described:
        return Described(
            free=self._admission.free,
            running=self._admission.running,
            queued=self._admission.queued,
            pid=os.getpid(),
            state=self._admission.closed or "up",
        )

    # ----------------------------------------------------------------- leaving

    async def leave(self, grace_s: float) -> None:
        """Accept nothing, hand back what has not begun, let the rest finish, get outcomes home."""
        self._admission.closed = "leaving"
        deadline = self._now() + grace_s
        for unit in self._admission.queued_units():
            self._hand_back(unit, "the peer is leaving")
        hurry = asyncio.ensure_future(self.hurry.wait())
        while self._held and self._now() < deadline and not self.hurry.is_set():
            tasks: list[asyncio.Task[Any]] = [h.task for h in self._held.values() if h.task]
            await asyncio.wait(
                [*tasks, hurry],
                timeout=max(0.01, deadline - self._now()),
                return_when=asyncio.FIRST_COMPLETED,
            )
        hurry.cancel()
        running = [h for h in self._held.values() if h.state == "running" and h.task]
        for held in running:
            assert held.task is not None
            held.task.cancel()
        await asyncio.gather(*(h.task for h in running if h.task), return_exceptions=True)
        for held in running:
            held.state = "reporting"
            found: dict[str, object] = {"kind": "returned", "reason": "the peer is leaving"}
            await self._finish(held, found, 0.0)
        last = self._now() + 1.0 + grace_s / 10
        while self._outbox and self._now() < last:
            self._news.clear()
            try:
                async with asyncio.timeout_at(last):
                    await self._news.wait()
            except TimeoutError:
                break

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = [h.task for h in self._held.values() if h.task] + list(self._reporters.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        remove_tree(self._directory)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def pack_outcome(ended: Outcome) -> bytes:
    packed: bytes = msgpack.packb(ended, default=wire_fields)
    return packed


def unpack_outcome(body: bytes) -> Outcome:
    return Outcome.model_validate(msgpack.unpackb(body, use_list=False))
