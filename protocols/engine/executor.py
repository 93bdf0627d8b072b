"""Runs the attempts that the door has admitted, and passes their outcomes to the outbox.

Rules:
- An attempt that is already here is never started again. After a restart nothing is running, so
  `Inquire` is answered `unknown`, and the home places the attempt elsewhere.
- An attempt is held here until it ends, and its outcome is in the outbox until its home has it.
  There is no gap between the two in which a repeated commit could be taken for a new one.
- `Fencing` decides which home is obeyed.
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
from .outcomes import LOOK_S, MADE_WAY_CAUSE, NURSERY_DIED, WORKER_DIED, outcome, too_long

log = logging.getLogger("valence.executor")

STILL_WANTED_MAX = 500
HELD_TOLD_MAX = 20_000


class _Ahead:
    """The fetching of an attempt's inputs while it is queued."""

    def __init__(self) -> None:
        self.over = asyncio.Event()  # set when the attempt has ended
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
    # a plain call has no asyncio task, but a worker that runs it and a timeout
    worker: Worker | None = None
    timer: asyncio.TimerHandle | None = None
    attempt: Attempt | None = None
    losses: int = 0  # how many nurseries had been lost when it began
    ahead: _Ahead | None = None
    making_way: str = ""  # it was told to end and is handed back: why


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
        #: called when an attempt has made files, with the seconds that it took
        self.on_made: Callable[[float], None] = lambda took_s: None
        self.hurry = asyncio.Event()  # set by a second request to leave: wait for no more tasks
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
        """The attempts that are running now."""
        return [held.work for held in self._held.values() if held.state == "running"]

    # ----------------------------------------------------------------- admission

    def refusal(self, home: bytes, work: Work) -> str | None:
        if not self._fencing.heed(home, work.key.workflow, work.epoch):
            return FENCED
        held = self._held.get(work.key)
        before = held.work.epoch if held else self._outbox.epoch_of(work.key, home)
        if before == work.epoch:
            return None
        return (
            ""
            if before is None
            else "it already has an attempt of that number, given by an earlier home"
        )

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

    def make_way(self, unit: Hashable, reason: str) -> None:
        held = self._held.get(cast(AttemptKey, unit))
        if held is None or held.state != "running":
            return
        self.counts["made_way"] += 1
        held.making_way = reason
        if held.task is not None:
            held.task.cancel()
            return
        worker = self._part_from_worker(held)
        if worker is not None:
            self._processes.discard(worker)
            self._ended(held, _made_way(reason))

    def _rehome(self, workflow: str, home: bytes) -> None:
        for held in self._held.values():
            if held.work.key.workflow == workflow:
                held.home = home

    async def watch_calls(self) -> None:
        """Checks now and then how much the calls that warm workers run use."""
        while True:
            await self._calling.wait()
            await asyncio.sleep(LOOK_S)
            since = self._clock() - LOOK_S
            calls = [h for h in self._held.values() if h.worker is not None]
            if not calls:
                self._calling.clear()
            for held in calls:
                worker, attempt = held.worker, held.attempt
                if worker is not None and attempt is not None and held.started_at <= since:
                    await self._check_call(held, worker, attempt)

    async def _check_call(self, held: _Held, worker: Worker, attempt: Attempt) -> None:
        """Stops a call that uses more than it may."""
        try:
            reason, cause = await attempt.too_much(worker.id)
        except NurseryGone:
            return  # its workers are gone with it, as their connections will tell
        if not reason:
            reason, cause = await asyncio.to_thread(attempt.too_much_on_disk)
        if reason and held.worker is worker:  # the call may have ended meanwhile
            self._stop_call(held, reason, cause)

    async def watch_gangs(self) -> None:
        """Asks whether attempts of gangs are still wanted. Whatever went wrong, the others may have
        been given up, and this one would wait for them for ever."""
        while True:
            await self._ganged.wait()
            await asyncio.sleep(self._gang_check_s)
            running = [h for h in self._held.values() if h.work.gang and h.state == "running"]
            if not running:
                self._ganged.clear()
            homes: dict[bytes, list[_Held]] = {}
            for held in running:
                homes.setdefault(held.home, []).append(held)
            for home, some in homes.items():
                await self._ask_wanted(home, some[:STILL_WANTED_MAX])

    async def _ask_wanted(self, home: bytes, some: list[_Held]) -> None:
        contact = self._members.contact(home)
        message = StillWanted(attempts=tuple((h.work.key, h.work.epoch) for h in some))
        try:
            if contact is None or not self._members.is_here(home):
                raise CallFailed("the home is gone")
            answer = await self._rpc.call(contact, message, Wanted)
        except CallFailed:
            answer = Wanted(unknown=tuple(h.work.key for h in some))
        for held in some:
            await self._heed_wanted(held, answer)

    async def _heed_wanted(self, held: _Held, answer: Wanted) -> None:
        key = held.work.key
        if self._held.get(key) is not held:
            return
        if key in answer.unwanted and held.state == "running":
            self.counts["orphans_ended"] += 1
            self._end(held)
        elif key in answer.unknown:
            held.home = await self._outbox.find_home(key.workflow) or held.home

    async def _prefetch(self, work: Work, ahead: _Ahead) -> None:
        """Fetches inputs while their task is queued, and keeps them until it ends. The attempt
        itself fetches those that can't be had now, for it can report why."""
        with self._blobs.pinned([file.hash for file in work.inputs]):
            try:
                ahead.moved = await self._workshop.fetch(work)
            except (BlobError, CallFailed) as error:
                log.debug("could not fetch the inputs of %s ahead of time: %s", work.key, error)
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
            return  # it was stopped, and whatever stopped it has done the rest
        if reply is None:
            self._processes.discard(worker)
            if held.losses != self._processes.losses:
                self._ended(held, {"kind": "returned", "reason": NURSERY_DIED})
            else:
                self._ended(held, {"kind": "failed", "reason": WORKER_DIED})
            return
        if reply.get("stale"):  # a module that this worker imported was edited: use another
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
        # not in the task itself: a task cancelled before its first step never runs its code
        held.task.add_done_callback(lambda task: self._aborted(held) if task.cancelled() else None)

    def _aborted(self, held: _Held) -> None:
        if self._held.get(held.work.key) is held and held.state == "running":
            if held.making_way:
                self._ended(held, _made_way(held.making_way))
                return
            del self._held[held.work.key]
            self._door.release(held.work.key)
            self.counts["aborted"] += 1
            self._door.advance()

    async def _run(self, held: _Held, work: Callable[[], Awaitable[dict[str, object]]]) -> None:
        try:
            left = await work()
        except Exception as error:
            log.exception("attempt %s", held.work.key)
            left = {"kind": "returned", "reason": f"internal error of the peer: {error!r}"[:2000]}
        self._ended(held, left)

    def _ended(self, held: _Held, left: dict[str, object]) -> None:
        """`left`: what the attempt left, as fields of its outcome."""
        made: Any = left.get("outputs") or ()
        if made and is_worth_reading(made):
            self.on_made(self._clock() - held.started_at)
        self._door.release(held.work.key)
        self.counts[f"attempts_{left['kind']}"] += 1
        self._keep(held, left)
        self._door.advance()

    def _keep(self, held: _Held, left: dict[str, object]) -> None:
        """Puts the outcome into the outbox, on its way home."""
        if held.ahead is not None:
            held.ahead.over.set()
            left = {**left, "moved": _moved(left.get("moved"), held.ahead.moved)}
        times = (held.queued_at, held.started_at, self._clock())
        speed = self._door.admission.traits.speed
        if speed not in (0.0, 1.0):
            left = {**left, "speed": speed}
        try:
            ended = outcome(held.work, left, times)
        except ValidationError as error:
            log.error("the outcome of %s is invalid: %s", held.work.key, error)
            reason = f"its outcome can't be reported: {error.errors()[0]['msg']}"[:2000]
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
        """Stops a running attempt. (If it is an asyncio task, that does the rest itself.)"""
        held.making_way = ""
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
            ended = self._outbox.epoch_of(key, sender.id) is not None
            return "reporting" if ended else "unknown"

        return Inquired(states=tuple(map(state, message.keys)))

    def _ask_held(self, sender: Contact, message: AskHeld) -> HeldHere:
        """Names the attempts of a task queue's workflows that are here, in any state."""
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
        """Accepts nothing more, hands back queued attempts, lets running ones finish, and waits
        until their homes have the outcomes."""
        admission = self._door.admission
        admission.closed = "leaving"
        deadline = self._now() + grace_s
        for unit in admission.queued_units():
            self.hand_back(unit, "the peer is leaving")
        await self._finish_until(deadline)
        await self._end_all()
        await self._outbox.drain(self._now() + 1.0 + grace_s / 10)

    async def _finish_until(self, deadline: float) -> None:
        """Waits for everything that runs, or may come still: leases that were granted a moment ago
        are honoured too."""
        admission, news = self._door.admission, self._outbox.news
        hurry = asyncio.ensure_future(self.hurry.wait())
        while self._held or self._outbox.unsaved or admission.leased:
            if self._now() >= deadline or self.hurry.is_set():
                break
            news.clear()
            told = asyncio.ensure_future(news.wait())
            until = min(deadline, admission.next_event_at(self._now()) or deadline)
            await asyncio.wait(
                [told, hurry],
                timeout=max(0.01, until - self._now()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            told.cancel()
            admission.expire(self._now())
        hurry.cancel()

    async def _end_all(self) -> None:
        """Stops the attempts that are still running, and hands them back."""
        running = [h for h in self._held.values() if h.state == "running"]
        for held in running:
            self._end(held)
        await asyncio.gather(*(h.task for h in running if h.task), return_exceptions=True)
        for held in running:
            if self._outbox.epoch_of(held.work.key, held.home) is None:  # it did not finish
                held.started_at = 0.0
                self._keep(held, {"kind": "returned", "reason": "the peer is leaving"})

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


def _made_way(reason: str) -> dict[str, object]:
    return {"kind": "returned", "reason": reason, "cause": MADE_WAY_CAUSE}


def _moved(by_attempt: object, ahead: Moved) -> Moved:
    """The attempt counts bytes that were fetched ahead of time as local: they are not."""
    own = by_attempt if isinstance(by_attempt, Moved) else Moved()
    early = ahead.peer + ahead.origin
    return Moved(max(0, own.local - early), own.peer + ahead.peer, own.origin + ahead.origin)
