"""The executing side: admits work, runs attempts, and keeps each outcome until its home has it.

Rules:
- Only `Admission` says what may run; every path that ends an attempt releases it there.
- An outcome is on this peer's disk before it is reported, and stays until the home has said that
  it is on *its* disk. Reports are repeated for ever, in batches, with back-off. (One for this very
  peer goes straight to its home part: the journal is the same disk, and falls with this process.)
- A key that is already here is never started again; after a restart nothing runs, so `Inquire`
  answers `unknown`, and the home places the attempt elsewhere.
- Of two homes of a workflow the one with the higher epoch holds: what a lower one says is refused,
  and all that is here for the workflow goes to the higher one as soon as it is heard of.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from ..capacity.admission import Admission
from ..consensus.placement import is_queued
from ..data.cache import BlobError
from ..membership.members import Members, State
from ..ports import (
    Attempt,
    Blobs,
    DatabaseError,
    NurseryGone,
    OutboxRow,
    OutboxStorage,
    Reply,
    Worker,
    Workshop,
)
from ..strategies.base import is_worth_reading
from ..wire.messages import (
    Abort,
    AskHeld,
    AttemptKey,
    Commit,
    Committed,
    Contact,
    Describe,
    Described,
    Done,
    Grant,
    HeldHere,
    Inquire,
    Inquired,
    Member,
    Moved,
    Needs,
    Offers,
    Outcome,
    Report,
    Reported,
    Reserve,
    ReturnLeases,
    Room,
    StillWanted,
    Ticket,
    Vacancy,
    Wanted,
    Work,
)
from ..wire.rpc import CallFailed, Rpc
from .explain import FENCED
from .outcomes import LOOK_S, NURSERY_DIED, WORKER_DIED, outcome, too_long

log = logging.getLogger("valence.executor")

REPORT_OUTCOMES_MAX = 500
REPORT_BYTES_MAX = 1 << 20
ENCLOSED_BYTES_MAX = 16 * 1024
ENCLOSED_TOTAL_BYTES_MAX = 64 * 1024
REPORT_RETRY_S_MIN, REPORT_RETRY_S_MAX = 0.2, 5.0
GATHER_S = 0.01
GATHER_MAX = 100
DELETE_S = 1.0
EPOCHS_MAX = 10_000
STILL_WANTED_MAX = 500
#: what nobody has known anything of for so long is not reported any more
UNKNOWN_S_MAX = 600.0


FindHome = Callable[[str], Awaitable[bytes | None]]


async def _nobody(workflow: str) -> bytes | None:
    return None


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
    state: str  # queued, running or reporting
    started_at: float = 0.0
    task: asyncio.Task[None] | None = None
    # a plain call has no task of its own: the worker that runs it, and its time-out
    worker: Worker | None = None
    timer: asyncio.TimerHandle | None = None
    attempt: Attempt | None = None
    losses: int = 0  # of nurseries, when it began
    ahead: _Ahead | None = None


@dataclass(slots=True)
class _Row:
    """Outcomes that were written together, and go when the last of them is settled."""

    id: int
    left: int


class Executor:
    def __init__(
        self,
        *,
        rpc: Rpc,
        members: Members,
        admission: Admission,
        blobs: Blobs,
        workshop: Workshop,
        outbox: OutboxStorage,
        clock: Callable[[], float],
        lease_ttl_s: float,
        gang_check_s: float,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.take_own: Callable[[Outcome], bool] = lambda ended: False  # the home part of this peer
        self.on_let_go: Callable[[Outcome], None] = lambda ended: None  # its home has it
        #: see the chemical layer
        self.on_consumed: Callable[[int, tuple[Room, ...]], None] = lambda version, asks: None
        #: files were made here, in so many seconds
        self.on_made: Callable[[float], None] = lambda took_s: None
        self.on_room: Callable[[], None] = lambda: None  # there may be more than before, or less
        self.find_home: FindHome = _nobody  # of a workflow whose home does not answer
        self.hurry = asyncio.Event()  # told a second time to leave: no more waiting for tasks
        self._rpc = rpc
        self._members = members
        self._admission = admission
        self._blobs = blobs
        self._workshop = workshop
        self._processes = workshop.processes
        self._storage = outbox
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._gang_check_s = gang_check_s
        self._ganged = asyncio.Event()
        self._calling = asyncio.Event()
        self._held: dict[AttemptKey, _Held] = {}
        self._outbox: dict[bytes, dict[AttemptKey, tuple[Outcome, _Row | None]]] = {}
        self._epochs: OrderedDict[str, int] = OrderedDict()  # of each workflow's home, as heard
        self._looked_for: set[str] = set()
        self._sought: dict[str, float] = {}  # workflows that nobody is known to be home of, since
        self._unsaved: list[tuple[_Held, Outcome]] = []
        self._settled: list[int] = []  # rows to delete: there is no hurry
        self._next_row = 1
        self._saver: asyncio.Task[None] | None = None
        self._reporters: dict[bytes, asyncio.Task[None]] = {}
        self._side: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()  # something ended, or was settled
        for kind, handler in (
            (Reserve, self._reserve),
            (ReturnLeases, self._return_leases),
            (Commit, self._commit),
            (Abort, self._abort),
            (Inquire, self._inquire),
            (Describe, self._describe),
            (AskHeld, self._ask_held),
        ):
            rpc.on(kind, handler)  # type: ignore[arg-type]
        members.listen(self._member_changed)

    def load(self) -> None:
        """Outcomes that an earlier run of this peer did not get rid of."""
        for kept in self._storage.rows():
            row = _Row(kept.id, len(kept.outcomes))
            self._next_row = max(self._next_row, kept.id + 1)
            for ended in kept.outcomes:
                self._outbox.setdefault(kept.home, {})[ended.key] = ended, row
        for home in self._outbox:
            self._wake_reporter(home)

    # ----------------------------------------------------------------- admission

    def reserve(self, home: bytes, room: Room) -> Grant:
        """As if that home had asked for it."""
        grant = self._admission.reserve(home, room, self._now())
        self._reserved()
        return grant

    def _reserved(self) -> None:
        if self._admission.passed_over:
            self._advance()
        else:
            self._set_timer()
            self.on_room()

    def ticket(self) -> Ticket:
        """What this peer has to offer."""
        return Ticket(*self._admission.on_offer(self._now()))

    def _reserve(self, sender: Contact, message: Reserve) -> Offers:
        now = self._now()
        grants = tuple(self._admission.reserve(sender.id, room, now) for room in message.asks)
        if message.consumed:
            self.on_consumed(message.molecule, message.asks)
        self._reserved()
        return Offers(grants=grants, free=self._admission.free, ttl_s=self._lease_ttl_s)

    def _return_leases(self, sender: Contact, message: ReturnLeases) -> None:
        self._admission.give_back(sender.id, message.leases, message.gangs)
        if not message.leases and not message.gangs:
            self.on_consumed(0, ())  # it was given away, and is not wanted after all
        self._news.set()
        self._advance()

    def _member_changed(self, old: Member | None, new: Member) -> None:
        ended = new.state >= State.DEAD or (old is not None and old.boot != new.boot)
        if ended and self._admission.forsake(new.contact.id):
            self._advance()

    def _commit(self, sender: Contact, message: Commit) -> Committed:
        now = self._now()
        refused = []
        for work in message.works:
            key = work.key
            if not self._heed(sender.id, key.workflow, work.epoch):
                refused.append((key, FENCED))
                continue
            before = self._epoch_of(key, sender.id)
            if before == work.epoch:
                continue  # a repeat: it is being seen to
            if before is not None:
                refused.append((key, "an earlier home has given out that number here"))
                continue
            verdict = self._admission.commit(sender.id, work.lease, key, now, work.owner)
            if verdict not in ("run", "wait"):
                refused.append((key, verdict))
                continue
            self._held[key] = _Held(work, sender.id, self._clock(), "queued")
            if work.gang:
                self._ganged.set()
            if verdict == "run":
                self._start(key)
            elif work.inputs:
                held = self._held[key]
                held.ahead = ahead = _Ahead()
                ahead.task = asyncio.ensure_future(self._prefetch(work, ahead))
        self.counts["works"] += len(message.works)
        self._advance()  # room may have come free between the lease and this
        return Committed(refused=tuple(refused))

    def _epoch_of(self, key: AttemptKey, home: bytes) -> int | None:
        """Of an attempt that is here, or whose outcome is; None: there is none."""
        held = self._held.get(key)
        if held is not None:
            return held.work.epoch
        kept = self._outbox.get(home, {}).get(key)
        return kept[0].epoch if kept is not None else None

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
                one.home = await self.find_home(one.work.key.workflow) or one.home

    def _heed(self, home: bytes, workflow: str, epoch: int) -> bool:
        """Is this its home? If it is a new one, all that is here of the workflow is for it."""
        known = self._epochs.get(workflow, 0)
        if epoch < known:
            self.counts["fenced"] += 1
            return False
        if epoch > known:
            self._epochs[workflow] = epoch
            self._epochs.move_to_end(workflow)
            if len(self._epochs) > EPOCHS_MAX:
                self._epochs.popitem(last=False)
            if known:
                self._rehome(workflow, home)
        return True

    def _rehome(self, workflow: str, home: bytes) -> None:
        self._sought.pop(workflow, None)
        for held in self._held.values():
            if held.work.key.workflow == workflow:
                held.home = home
        for old, box in list(self._outbox.items()):
            if old == home:
                continue
            for key in [key for key in box if key.workflow == workflow]:
                ended, row = box.pop(key)
                if row is None and home != self._rpc.me.id:
                    # it was for this very peer, and is on no disk yet
                    self._unsaved.append((_settled(ended, home), ended))
                    self._wake_saver()
                else:
                    self._outbox.setdefault(home, {})[key] = ended, row
        if self._outbox.get(home):
            self._wake_reporter(home)

    def _advance(self) -> None:
        """Capacity came free: begin what waits, and tell who was refused."""
        now = self._now()
        for unit in self._admission.starts(now):
            self._start(cast(AttemptKey, unit))
        for unit in self._admission.overdue(now):
            self._hand_back(unit, "it waited longer in this peer's queue than was promised")
        told = self._admission.meet_gangs(now)
        home = self._admission.take_wish(now)
        for peer in (*told, home) if home else told:
            contact = self._members.contact(peer)
            if contact is not None:
                self._rpc.tell(contact, Vacancy(free=self._admission.free))
        self._set_timer()
        self.on_room()

    def _set_timer(self) -> None:
        """For what changes by itself. One that is set for earlier stays: it looks again then."""
        at = self._admission.next_event_at()
        if at is None:
            return
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(at, loop.time() + 0.01), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._advance()

    def _hand_back(self, unit: Hashable, reason: str) -> None:
        key = cast(AttemptKey, unit)
        held = self._held.get(key)
        if held is not None and held.state == "queued":
            self._admission.release(key)
            self.counts["handed_back"] += 1
            self._keep(held, {"kind": "returned", "reason": reason})

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

    def _start(self, key: AttemptKey) -> None:
        held = self._held[key]
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
            self._admission.release(held.work.key)
            self.counts["aborted"] += 1
            self._news.set()
            self._advance()

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
        self._admission.release(held.work.key)
        self.counts[f"attempts_{found['kind']}"] += 1
        self._keep(held, found)
        self._advance()

    # ----------------------------------------------------------------- keeping

    def _keep(self, held: _Held, found: dict[str, object]) -> None:
        """To disk, then to the outbox. Only what is on disk is reported."""
        held.state = "reporting"
        if held.ahead is not None:
            held.ahead.over.set()
            found = {**found, "moved": _moved(found.get("moved"), held.ahead.moved)}
        times = (held.queued_at, held.started_at, self._clock())
        if self._admission.traits.speed not in (0.0, 1.0):
            found = {**found, "speed": self._admission.traits.speed}
        try:
            ended = outcome(held.work, found, times)
        except ValidationError as error:
            log.error("the outcome of %s: %s", held.work.key, error)
            reason = f"what it left can't be told: {error.errors()[0]['msg']}"[:2000]
            ended = outcome(held.work, {"kind": "failed", "reason": reason}, times)
        if ended.outputs and held.home != self._rpc.me.id:
            held.task = asyncio.ensure_future(self._save_with_files(held, ended))
        else:
            self._save(held, ended)

    def _post(self, held: _Held, ended: Outcome, row: _Row | None) -> None:
        self._outbox.setdefault(held.home, {})[ended.key] = ended, row
        self._held.pop(ended.key, None)
        self._news.set()
        self._wake_reporter(held.home)

    async def _save_with_files(self, held: _Held, ended: Outcome) -> None:
        try:
            ended = await self._enclose(ended)
        except Exception:
            log.exception("the files of %s do not travel along", held.work.key)
        self._save(held, ended)

    def _save(self, held: _Held, ended: Outcome) -> None:
        if held.home == self._rpc.me.id and not self._admission.queued:
            # nothing else is to come soon: straight to the home part, in no message
            self._news.set()
            if self.take_own(ended):
                self._held.pop(ended.key, None)
                return
        self._unsaved.append((held, ended))
        self._wake_saver()

    def _wake_saver(self) -> None:
        if self._saver is None or self._saver.done():
            self._saver = asyncio.ensure_future(self._save_all())

    async def _save_all(self) -> None:
        """What ended while the disk was busy shares the next write: a row for each home.

        While more waits to run here, nobody waits for the news that there is room: outcomes that
        come in quick succession are gathered for a moment."""
        delay_s = 0.1
        while self._unsaved:
            if self._admission.queued and len(self._unsaved) < GATHER_MAX:
                await asyncio.sleep(GATHER_S)
            batch, self._unsaved = self._unsaved, []
            by_home: dict[bytes, list[tuple[_Held, Outcome]]] = {}
            for held, ended in batch:
                by_home.setdefault(held.home, []).append((held, ended))
            for held, ended in by_home.pop(self._rpc.me.id, ()):
                self._post(held, ended, None)
            if not by_home:
                continue
            settled, self._settled = self._settled, []
            rows, kept = [], []
            for home, found in by_home.items():
                row = _Row(self._next_row, len(found))
                self._next_row += 1
                rows.append((row, found))
                kept.append(OutboxRow(row.id, home, tuple(ended for _, ended in found)))
            while True:
                try:
                    await self._storage.write(kept, settled)
                    break
                except DatabaseError as error:
                    log.error("outcomes can't be written, trying again: %s", error)
                    await asyncio.sleep(delay_s)
                    delay_s = min(10.0, delay_s * 2)
            delay_s = 0.1
            for row, found in rows:
                for held, ended in found:
                    self._post(held, ended, row)

    async def _delete(self) -> None:
        """Rows whose outcomes are all at home. Late is early enough: once more does no harm."""
        settled, self._settled = self._settled, []
        try:
            await self._storage.write((), settled)
        except DatabaseError as error:
            log.error("outcomes can't be deleted: %s", error)

    async def _enclose(self, ended: Outcome) -> Outcome:
        """Small outputs go along, so that the home has a copy before they count."""
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
        return ended._replace(enclosed=tuple(enclosed))

    # ----------------------------------------------------------------- reporting

    def _wake_reporter(self, home: bytes) -> None:
        if home not in self._reporters:
            self._reporters[home] = asyncio.ensure_future(self._report_to(home))

    async def _report_to(self, home: bytes) -> None:
        """Until this home has acknowledged all. What comes meanwhile shares the next message."""
        delay_s = REPORT_RETRY_S_MIN
        box = self._outbox[home]
        while box:
            batch: dict[AttemptKey, Outcome] = {}
            size = 0
            for key, (ended, _) in box.items():
                batch[key] = ended
                size += size_bytes(ended)
                if len(batch) >= REPORT_OUTCOMES_MAX or size >= REPORT_BYTES_MAX:
                    break
            contact = self._members.contact(home)
            try:
                if contact is None or not self._members.is_here(home):
                    self._spawn(self._look_for({key.workflow for key in batch}))
                    raise CallFailed("its home is not here")
                message = Report.of(tuple(batch.values()), self._admission.free)
                answer = await self._rpc.call(contact, message, Reported, 15.0)
            except CallFailed as error:
                self.counts["reports_failed"] += 1
                log.debug("report to %s: %s", home.hex()[:8], error)
                await asyncio.sleep(delay_s)
                delay_s = min(REPORT_RETRY_S_MAX, delay_s * 2)
                continue
            settled = [k for k in answer.kept if k in batch]
            settled += self._seek(batch, answer)
            for key in batch.keys() - set(settled):  # behind those that were not told yet
                if key in box:
                    box[key] = box.pop(key)
            if not settled:
                await asyncio.sleep(delay_s)
                delay_s = min(REPORT_RETRY_S_MAX, delay_s * 2)
                continue
            delay_s = REPORT_RETRY_S_MIN
            for key in settled:
                if key not in box:
                    continue  # it has gone to another home meanwhile
                ended, row = box.pop(key)
                self.on_let_go(ended)
                if row is not None:
                    row.left -= 1
                    if not row.left:
                        self._settled.append(row.id)
            self._news.set()
            if self._settled and self._sweep_timer is None:
                loop = asyncio.get_running_loop()
                self._sweep_timer = loop.call_later(DELETE_S, self._sweep)
        # no await between the last look into the box and this: a newcomer starts a new reporter
        del self._outbox[home], self._reporters[home]

    def _seek(self, batch: dict[AttemptKey, Outcome], answer: Reported) -> list[AttemptKey]:
        """Those whose home is elsewhere go there; those that nobody knows of for long are over."""
        moved = {workflow: home for workflow, home in answer.moved if any(home)}
        for workflow, home in moved.items():
            if home != self._rpc.me.id or not self._epochs.get(workflow):
                self._rehome(workflow, home)
        lost = {key.workflow for key in answer.unknown} | {
            w for w, home in answer.moved if not home
        }
        if lost:
            self._spawn(self._look_for(lost))
        limit = self._now() - UNKNOWN_S_MAX
        old = {w for w, since in self._sought.items() if since < limit}
        return [key for key in answer.unknown if key.workflow in old and key in batch]

    async def _look_for(self, workflows: set[str]) -> None:
        for workflow in workflows - self._looked_for:
            self._looked_for.add(workflow)
            self._sought.setdefault(workflow, self._now())
            try:
                home = await self.find_home(workflow)
            finally:
                self._looked_for.discard(workflow)
            if home:
                self._rehome(workflow, home)
            elif home is not None:  # it is not lost: its keepers look for a home
                self._sought[workflow] = self._now()

    def _sweep(self) -> None:
        self._sweep_timer = None
        if self._settled:  # else a write has taken them along
            self._spawn(self._delete())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._side.add(task)
        task.add_done_callback(self._side.discard)

    # ----------------------------------------------------------------- answering

    def _abort(self, sender: Contact, message: Abort) -> Done:
        epochs = dict(message.epochs)
        for key in message.keys:
            held = self._held.get(key)
            if held is None or not self._heed(sender.id, key.workflow, epochs.get(key.workflow, 0)):
                continue
            if held.state == "running":
                self._end(held)
            elif held.state == "queued":
                self._admission.release(key)
                del self._held[key]
                if held.ahead is not None and held.ahead.task is not None:
                    held.ahead.task.cancel()
        self._advance()
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
            self._heed(sender.id, workflow, epoch)

        def state(key: AttemptKey) -> str:
            held = self._held.get(key)
            if held is not None:
                return held.state
            return "reporting" if key in self._outbox.get(sender.id, ()) else "unknown"

        return Inquired(states=tuple(map(state, message.keys)))

    def _ask_held(self, sender: Contact, message: AskHeld) -> HeldHere:
        """Attempts of a task queue's workflows, in any state."""
        keys = [key for key in self._held if is_queued(key.workflow)]
        boxes = self._outbox.values()
        keys += [key for box in boxes for key in box if is_queued(key.workflow)]
        return HeldHere(keys=tuple(dict.fromkeys(keys))[:20_000])

    def _describe(self, sender: Contact, message: Describe) -> Described:
        return Described(
            free=self._admission.free,
            running=self._admission.running,
            queued=self._admission.queued,
            pid=self._workshop.pid,
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
        # what was promised a moment ago may be on its way here: promises are kept too
        while self._held or self._admission.leased:
            if self._now() >= deadline or self.hurry.is_set():
                break
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            until = min(deadline, self._admission.next_event_at() or deadline)
            await asyncio.wait(
                [news, hurry],
                timeout=max(0.01, until - self._now()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            news.cancel()
            self._admission.expire(self._now())
        hurry.cancel()
        running = [h for h in self._held.values() if h.state == "running"]
        for held in running:
            self._end(held)
        await asyncio.gather(*(h.task for h in running if h.task), return_exceptions=True)
        for held in running:
            held.started_at = 0.0
            self._held[held.work.key] = held
            self._keep(held, {"kind": "returned", "reason": "the peer is leaving"})
        last = self._now() + 1.0 + grace_s / 10
        while (self._outbox or self._unsaved) and self._now() < last:
            self._news.clear()
            try:
                async with asyncio.timeout_at(last):
                    await self._news.wait()
            except TimeoutError:
                break

    async def close(self) -> None:
        for timer in (self._timer, self._sweep_timer):
            if timer is not None:
                timer.cancel()
        for held in list(self._held.values()):
            self._part_from_worker(held)
        tasks = [h.task for h in self._held.values() if h.task]
        tasks += [h.ahead.task for h in self._held.values() if h.ahead and h.ahead.task]
        tasks += [*self._reporters.values(), *self._side]
        if self._saver is not None:
            tasks.append(self._saver)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._workshop.clear()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _settled(ended: Outcome, home: bytes) -> _Held:
    """An outcome on its way from one home to another."""
    needs = Needs()
    return _Held(Work(ended.key, 0, needs, epoch=ended.epoch), home, 0.0, "reporting")


def _moved(found: object, ahead: Moved) -> Moved:
    """What came ahead of time was here when the attempt looked, and is no local read for that."""
    own = found if isinstance(found, Moved) else Moved()
    early = ahead.peer + ahead.origin
    return Moved(max(0, own.local - early), own.peer + ahead.peer, own.origin + ahead.origin)


def size_bytes(ended: Outcome) -> int:
    """About how many bytes it takes in a message."""
    value = len(ended.value.data) if ended.value else 0
    files = sum(len(file.name) + 60 for file in ended.outputs)
    enclosed = sum(len(data) for _, data in ended.enclosed)
    return 200 + len(ended.log_tail) + len(ended.reason) + value + files + enclosed
