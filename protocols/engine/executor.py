"""The executing side: runs the attempts that the door has let in, and gives their outcomes away.

Rules:
- A key that is already here is never started again; after a restart nothing runs, so `Inquire`
  answers `unknown`, and the home places the attempt elsewhere.
- An attempt is here until it ends, and its outcome in the outbox until its home has it: between the
  two there is no gap in which a repeat would be taken for something new.
- Whose word holds says `Fencing`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from ..capacity.door import Door
from ..consensus.placement import is_queued
from ..data.cache import BlobError
from ..membership.members import Members
from ..ports import Attempt, Blobs, Launcher, NurseryGone, Reply, Worker
from ..strategies.base import is_worth_reading
from ..wire.messages import (
    Abort,
    AskHeld,
    AttemptKey,
    Contact,
    Describe,
    Described,
    Done,
    HeldHere,
    Inquire,
    Inquired,
    Moved,
    StillWanted,
    Wanted,
    Work,
)
from ..wire.rpc import CallFailed, Rpc
from .explain import FENCED
from .fencing import Fencing
from .outbox import Outbox
from .outcomes import LOOK_S, NURSERY_DIED, WORKER_DIED, outcome, too_long

log = logging.getLogger("valence.executor")

STILL_WANTED_MAX = 500
HELD_TOLD_MAX = 20_000


class _Ahead:
    """Its inputs, which come while it waits for its turn."""

    def __init__(self) -> None:
        self.over = asyncio.Event()  # it has begun, or never will
        self.task: asyncio.Task[None] | None = None
        self.moved = Moved()


@dataclass(slots=True)
class _Held:
    work: Work
    home: bytes
    queued_at: float
    state: str  # queued or running
    started_at: float = 0.0
    task: asyncio.Task[None] | None = None
    # a plain call has no task of its own: the worker that runs it, and its time-out
    worker: Worker | None = None
    timer: asyncio.TimerHandle | None = None
    attempt: Attempt | None = None
    losses: int = 0  # of nurseries, when it began
    ahead: _Ahead | None = None


class Executor:
    def __init__(
        self,
        *,
        rpc: Rpc,
        members: Members,
        door: Door,
        outbox: Outbox,
        fencing: Fencing,
        blobs: Blobs,
        workshop: Launcher,
        clock: Callable[[], float],
        gang_check_s: float,
        counts: Counter[str],
    ) -> None:
        self.counts = counts
        #: files were made here, in so many seconds
        self.on_made: Callable[[float], None] = lambda took_s: None
        self.hurry = asyncio.Event()  # told a second time to leave: no more waiting for tasks
        self._rpc = rpc
        self._members = members
        self._door = door
        self._outbox = outbox
        self._fencing = fencing
        self._blobs = blobs
        self._workshop = workshop
        self._processes = workshop.processes
        self._clock = clock
        self._gang_check_s = gang_check_s
        self._ganged = asyncio.Event()
        self._calling = asyncio.Event()
        self._held: dict[AttemptKey, _Held] = {}
        door.open(self)
        door.on_room.append(outbox.news.set)
        fencing.on_new_home.append(self._rehome)
        rpc.on(Abort, self._abort)
        rpc.on(Inquire, self._inquire)
        rpc.on(Describe, self._describe)
        rpc.on(AskHeld, self._ask_held)

    def running(self) -> list[Work]:
        """What runs at this moment."""
        return [held.work for held in self._held.values() if held.state == "running"]

    # ----------------------------------------------------------------- being let in

    def refusal(self, home: bytes, work: Work) -> str | None:
        if not self._fencing.heed(home, work.key.workflow, work.epoch):
            return FENCED
        held = self._held.get(work.key)
        before = held.work.epoch if held else self._outbox.epoch_of(work.key, home)
        if before == work.epoch:
            return None
        return "" if before is None else "an earlier home has given out that number here"

    def let_in(self, home: bytes, work: Work) -> None:
        self.counts["works"] += 1
        self._held[work.key] = _Held(work, home, self._clock(), "queued")
        if work.gang:
            self._ganged.set()

    def wait(self, unit: Hashable) -> None:
        held = self._held[cast(AttemptKey, unit)]
        if held.work.inputs:
            held.ahead = ahead = _Ahead()
            ahead.task = asyncio.ensure_future(self._prefetch(held.work, ahead))

    def hand_back(self, unit: Hashable, reason: str) -> None:
        held = self._held.get(cast(AttemptKey, unit))
        if held is not None and held.state == "queued":
            self._door.release(unit)
            self.counts["handed_back"] += 1
            self._keep(held, {"kind": "returned", "reason": reason})

    def _rehome(self, workflow: str, home: bytes) -> None:
        for held in self._held.values():
            if held.work.key.workflow == workflow:
                held.home = home

    async def watch_calls(self) -> None:
        """Those that warm workers run: what they use is looked at now and then."""
        while True:
            await self._calling.wait()
            await asyncio.sleep(LOOK_S)
            since = self._clock() - LOOK_S
            calls = [h for h in self._held.values() if h.worker is not None]
            if not calls:
                self._calling.clear()
            for held in calls:
                worker, attempt = held.worker, held.attempt
                if worker is None or attempt is None or held.started_at > since:
                    continue
                try:
                    reason, cause = await attempt.too_much(worker.id)
                except NurseryGone:
                    continue  # its workers are gone with it, which their connections tell
                if not reason:
                    reason, cause = await asyncio.to_thread(attempt.too_much_on_disk)
                if reason and held.worker is worker:  # it may have ended meanwhile
                    self._stop_call(held, reason, cause)

    async def watch_gangs(self) -> None:
        """Ask whether attempts of gangs are still wanted: whatever went wrong, the others may have
        been given up, and this one would wait for them for ever."""
        while True:
            await self._ganged.wait()
            await asyncio.sleep(self._gang_check_s)
            held = [h for h in self._held.values() if h.work.gang and h.state == "running"]
            if not held:
                self._ganged.clear()
            homes: dict[bytes, list[_Held]] = {}
            for one in held:
                homes.setdefault(one.home, []).append(one)
            for home, some in homes.items():
                await self._ask_wanted(home, some[:STILL_WANTED_MAX])

    async def _ask_wanted(self, home: bytes, some: list[_Held]) -> None:
        contact = self._members.contact(home)
        message = StillWanted(attempts=tuple((h.work.key, h.work.epoch) for h in some))
        try:
            if contact is None or not self._members.is_here(home):
                raise CallFailed("it is gone")
            answer = await self._rpc.call(contact, message, Wanted)
        except CallFailed:
            answer = Wanted(unknown=tuple(h.work.key for h in some))
        for one in some:
            if self._held.get(one.work.key) is not one:
                continue
            if one.work.key in answer.unwanted and one.state == "running":
                self.counts["orphans_ended"] += 1
                self._end(one)
            elif one.work.key in answer.unknown:
                one.home = await self._outbox.find_home(one.work.key.workflow) or one.home

    async def _prefetch(self, work: Work, ahead: _Ahead) -> None:
        """Inputs come while their task waits for its turn, and stay until it ends. What does not
        come now is fetched by the attempt, which knows what to say of it."""
        with self._blobs.pinned([file.hash for file in work.inputs]):
            try:
                ahead.moved = await self._workshop.fetch(work)
            except (BlobError, CallFailed) as error:
                log.debug("inputs of %s ahead of time: %s", work.key, error)
                return
            self.counts["prefetched"] += 1
            await ahead.over.wait()

    # ----------------------------------------------------------------- running

    def start(self, unit: Hashable) -> None:
        held = self._held[cast(AttemptKey, unit)]
        held.state = "running"
        held.started_at = self._clock()
        attempt = self._workshop.attempt(held.work)
        worker = self._processes.idle_worker(held.work.owner) if attempt.plain else None
        held.attempt = attempt
        held.losses = self._processes.losses
        if worker is None:
            self._run_task(held, attempt.run)
            return
        held.worker = worker
        limit_s = held.work.timeout_s
        if limit_s is not None:
            loop = asyncio.get_running_loop()
            held.timer = loop.call_later(limit_s, self._out_of_time, held)
        self._calling.set()
        worker.send(
            attempt.request(worker.place), lambda reply: self._replied(held, attempt, reply)
        )

    def _replied(self, held: _Held, attempt: Attempt, reply: Reply) -> None:
        worker = self._part_from_worker(held)
        if worker is None:
            return  # it was ended, by who saw to the rest too
        if reply is None:
            self._processes.discard(worker)
            if held.losses != self._processes.losses:
                self._ended(held, {"kind": "returned", "reason": NURSERY_DIED})
            else:
                self._ended(held, {"kind": "failed", "reason": WORKER_DIED})
            return
        if reply.get("stale"):  # what it has imported was edited since: by another one, then
            self._processes.discard(worker)
            self._run_task(held, attempt.run)
            return
        if reply.get("lie"):
            self._processes.discard(worker)
        else:
            self._processes.give_back(worker)
        short = attempt.short(reply)
        if short is None:
            self._run_task(held, functools.partial(attempt.take, reply))
        else:
            self._ended(held, short)

    def _part_from_worker(self, held: _Held) -> Worker | None:
        worker, held.worker = held.worker, None
        if held.timer is not None:
            held.timer.cancel()
        return worker

    def _out_of_time(self, held: _Held) -> None:
        self._stop_call(held, too_long(held.work), "timeout")

    def _stop_call(self, held: _Held, reason: str, cause: str) -> None:
        worker = self._part_from_worker(held)
        if worker is not None:
            self._processes.discard(worker)
            self._ended(held, {"kind": "failed", "reason": reason, "cause": cause})

    def _run_task(self, held: _Held, work: Callable[[], Awaitable[dict[str, object]]]) -> None:
        held.task = asyncio.ensure_future(self._run(held, work))
        # not in the task itself: one that is cancelled before its first step never gets there
        held.task.add_done_callback(lambda task: self._aborted(held) if task.cancelled() else None)

    def _aborted(self, held: _Held) -> None:
        if self._held.get(held.work.key) is held and held.state == "running":
            del self._held[held.work.key]
            self._door.release(held.work.key)
            self.counts["aborted"] += 1
            self._door.advance()

    async def _run(self, held: _Held, work: Callable[[], Awaitable[dict[str, object]]]) -> None:
        try:
            found = await work()
        except Exception as error:
            log.exception("attempt %s", held.work.key)
            found = {"kind": "returned", "reason": f"an error in the peer: {error!r}"[:2000]}
        self._ended(held, found)

    def _ended(self, held: _Held, found: dict[str, object]) -> None:
        made: Any = found.get("outputs") or ()
        if is_worth_reading(made):
            self.on_made(self._clock() - held.started_at)
        self._door.release(held.work.key)
        self.counts[f"attempts_{found['kind']}"] += 1
        self._keep(held, found)
        self._door.advance()

    def _keep(self, held: _Held, found: dict[str, object]) -> None:
        """Its outcome goes home."""
        if held.ahead is not None:
            held.ahead.over.set()
            found = {**found, "moved": _moved(found.get("moved"), held.ahead.moved)}
        times = (held.queued_at, held.started_at, self._clock())
        speed = self._door.admission.traits.speed
        if speed not in (0.0, 1.0):
            found = {**found, "speed": speed}
        try:
            ended = outcome(held.work, found, times)
        except ValidationError as error:
            log.error("the outcome of %s: %s", held.work.key, error)
            reason = f"what it left can't be told: {error.errors()[0]['msg']}"[:2000]
            ended = outcome(held.work, {"kind": "failed", "reason": reason}, times)
        self._held.pop(held.work.key, None)
        self._outbox.add(held.home, ended)

    # ----------------------------------------------------------------- answering

    def _abort(self, sender: Contact, message: Abort) -> Done:
        epochs = dict(message.epochs)
        for key in message.keys:
            held = self._held.get(key)
            epoch = epochs.get(key.workflow, 0)
            if held is None or not self._fencing.heed(sender.id, key.workflow, epoch):
                continue
            if held.state == "running":
                self._end(held)
            else:
                self._door.release(key)
                del self._held[key]
                if held.ahead is not None and held.ahead.task is not None:
                    held.ahead.task.cancel()
        self._door.advance()
        return Done()

    def _end(self, held: _Held) -> None:
        """Whatever runs for it; a task sees to the rest itself."""
        if held.task is not None:
            held.task.cancel()
            return
        worker = self._part_from_worker(held)
        if worker is not None:
            self._processes.discard(worker)
            self._aborted(held)

    def _inquire(self, sender: Contact, message: Inquire) -> Inquired:
        for workflow, epoch in message.epochs:
            self._fencing.heed(sender.id, workflow, epoch)

        def state(key: AttemptKey) -> str:
            held = self._held.get(key)
            if held is not None:
                return held.state
            there = self._outbox.epoch_of(key, sender.id) is not None
            return "reporting" if there else "unknown"

        return Inquired(states=tuple(map(state, message.keys)))

    def _ask_held(self, sender: Contact, message: AskHeld) -> HeldHere:
        """Attempts of a task queue's workflows, in any state."""
        keys = [k for k in (*self._held, *self._outbox.keys()) if is_queued(k.workflow)]
        return HeldHere(keys=tuple(dict.fromkeys(keys))[:HELD_TOLD_MAX])

    def _describe(self, sender: Contact, message: Describe) -> Described:
        admission = self._door.admission
        return Described(
            free=admission.free,
            running=admission.running,
            queued=admission.queued,
            pid=self._workshop.pid,
            state=admission.closed or "up",
        )

    # ----------------------------------------------------------------- leaving

    async def leave(self, grace_s: float) -> None:
        """Accept nothing, hand back what has not begun, let the rest finish, get outcomes home."""
        admission, news = self._door.admission, self._outbox.news
        admission.closed = "leaving"
        deadline = self._now() + grace_s
        for unit in admission.queued_units():
            self.hand_back(unit, "the peer is leaving")
        hurry = asyncio.ensure_future(self.hurry.wait())
        # what was promised a moment ago may be on its way here: promises are kept too
        while self._held or self._outbox.unsaved or admission.leased:
            if self._now() >= deadline or self.hurry.is_set():
                break
            news.clear()
            told = asyncio.ensure_future(news.wait())
            until = min(deadline, admission.next_event_at() or deadline)
            await asyncio.wait(
                [told, hurry],
                timeout=max(0.01, until - self._now()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            told.cancel()
            admission.expire(self._now())
        hurry.cancel()
        running = [h for h in self._held.values() if h.state == "running"]
        for held in running:
            self._end(held)
        await asyncio.gather(*(h.task for h in running if h.task), return_exceptions=True)
        for held in running:
            if self._outbox.epoch_of(held.work.key, held.home) is None:  # it did not make it
                held.started_at = 0.0
                self._keep(held, {"kind": "returned", "reason": "the peer is leaving"})
        await self._outbox.drain(self._now() + 1.0 + grace_s / 10)

    async def close(self) -> None:
        self._door.close()
        for held in list(self._held.values()):
            self._part_from_worker(held)
        tasks = [h.task for h in self._held.values() if h.task]
        tasks += [h.ahead.task for h in self._held.values() if h.ahead and h.ahead.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._outbox.close()
        self._workshop.clear()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _moved(found: object, ahead: Moved) -> Moved:
    """What came ahead of time was here when the attempt looked, and is no local read for that."""
    own = found if isinstance(found, Moved) else Moved()
    early = ahead.peer + ahead.origin
    return Moved(max(0, own.local - early), own.peer + ahead.peer, own.origin + ahead.origin)
