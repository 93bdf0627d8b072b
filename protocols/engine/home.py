"""The home: enacts the workflows it accepted, from their journals.

What follows from what has happened is decided in `decisions`, from the run's state; here it is
performed: entries are appended, room is looked for, peers are told.

Rules:
- Decide, apply in memory, append to the journal; act outside (answer, commit, acknowledge) only
  when the entry is on disk. A home killed between any two lines goes on from what it wrote.
- Every attempt has a number, journaled with its peer before another peer is told to run it. (What
  this very peer runs falls with it and leaves nothing behind: its work does not wait for the disk.)
- What was given away is asked about until its end is known (`outstanding`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from functools import partial
from typing import Any

from valence.workflow.model import Workflow

from ..consensus.keeping import Deposed
from ..consensus.placement import risk
from ..consensus.replica import shown
from ..data.transfer import Transfer
from ..membership.members import Members, State
from ..ports import Blobs, DatabaseError, StorageElements
from ..records import Records, key_of
from ..strategies.base import Placed, Strategy, Unit
from ..strategies.gangs import Gangs
from ..wire.entries import (
    VOID,
    CopiedFile,
    Ended,
    FilesCopied,
    FilesDelivered,
    InputsStaged,
)
from ..wire.messages import (
    CHECKED_WORK,
    AttemptKey,
    Capacity,
    Contact,
    File,
    Member,
    Outcome,
    ReturnLeases,
    Work,
)
from ..wire.rpc import Refused, Rpc
from . import effects
from .decisions import Decision
from .delivery import Delivery
from .dispatch import Dispatch
from .duplicate_submissions import DuplicateSubmissions
from .effects import CancelCounts, InputsCount, ResultsCount, WhenCommitted
from .experience import Experience
from .explain import waiting_for
from .gangs import Company
from .journal import About, Journal
from .outstanding import Given
from .reception import Reception
from .replication import Copies
from .run import FINAL, NeverWritten, Run, TaskState, WaitAgain
from .runs import Material, Runs, is_large, made, rebuilt
from .stage import Stage
from .stragglers import Slow
from .targets import Peers, Targets
from .work import deadline_at, is_much, make_work, wire_needs

log = logging.getLogger("valence.home")

ACTIVE_MAX = 1000
OWNER_ACTIVE_MAX, OWNER_TASKS_MAX = 500, 500_000
PUBLISH_S = 0.3
RUNTIME_S_MAX = 1e8
YOUNG_S = 60.0
CREATE_S_MAX = 10.0
UNACKNOWLEDGED = "its submission could not be acknowledged"
KEEPERS_SILENT = "a majority of the peers that were to keep it did not answer"


class AlreadyHere(Exception):
    """A workflow of that name, which follows from its Idempotency-Key."""


class Home:
    def __init__(
        self,
        *,
        rpc: Rpc,
        members: Members,
        records: Records,
        blobs: Blobs,
        transfer: Transfer,
        journal: Journal,
        clock: Callable[[], float],
        rng: random.Random,
        storage: StorageElements | None = None,
        targets: Callable[[Home], Targets] | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.journal = journal
        self.closed = False  # this peer is leaving
        self.runs = Runs(journal)
        self.given = Given(rpc, members, journal.keeping.epoch, self.lost)
        self.duplicates = DuplicateSubmissions(journal.keeping, self.runs.is_active, self._cancel)
        self.slow = Slow(self.active, clock, self._speed_of, self._begin_beside)
        self._experience = Experience()
        self._company = Company(rpc, members)
        self.dispatch = Dispatch(rpc, self.given, journal.kept, self.make_work, self._wanted)
        self.dispatch.on_refused = partial(self.lost, begun=False)
        self.dispatch.on_too_large = self._fail
        self.dispatch.on_fenced = self._fenced
        self._delivery = Delivery(storage, blobs, transfer, rng, self._delivered)
        self.copies = Copies(rpc, members, transfer, rng, self.keepers, self._copied)
        self._storage = storage
        self._rpc = rpc
        self.members = members
        self._records = records
        self.blobs = blobs
        self.transfer = transfer
        self._clock = clock
        self._rng = rng
        self._strategies: dict[str, Strategy] = {}
        self._active = self.runs.active
        self._stages: dict[str, tuple[Stage, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: dict[str, asyncio.Event] = {}
        self._creating: dict[str, asyncio.Future[None]] = {}  # not acknowledged yet
        self._unpublished: set[str] = set()
        self._published_at = 0.0
        self.reception = Reception(
            home=self, runs=self.runs, journal=journal, blobs=blobs, given=self.given,
            company=self._company, copies=self.copies, counts=self.counts,
        )  # fmt: skip
        self.reception.serve(rpc)
        self.targets: Targets = (targets or Peers)(self)
        members.listen(self._member_changed, at_stake=self._active)

    def use(self, strategy: Strategy) -> None:
        self._strategies[strategy.name] = strategy

    def estimate(self, unit: Unit) -> float | None:
        """How long a unit will take, from what has been seen so far."""
        run = self._active.get(unit.key.workflow)
        found = None if run is None else run.observed_s(unit.key.task)
        if found is None and unit.runtime_s is not None:
            found = self._experience.corrected(unit.owner, unit.runtime_s)
        return None if found is None else min(RUNTIME_S_MAX, found)

    @property
    def near_bytes_min(self) -> int:
        return self.targets.near_bytes_min

    def strategy(self, run: Run) -> Strategy:
        own = self.targets.strategy(run)
        if own is not None:
            return own
        name = run.workflow.strategy
        return self._strategies["probe" if name == "auto" else name]

    def _withdraw(self, run: Run, keys: Collection[AttemptKey]) -> None:
        self.strategy(run).withdraw(keys)
        self._strategies[Gangs.name].withdraw(keys)

    # ----------------------------------------------------------------- beginning

    async def submit(
        self,
        text: bytes,
        workflow: Workflow,
        id: str,
        options: dict[str, object],
        owner: str,
        patient: bool = False,
    ) -> Run:
        """On disk when this returns; `patient`: its user waits for its end anyway."""
        refusal = self.targets.refusal(workflow)
        if refusal:
            raise Refused("targets", refusal)
        for needs in {task.needs for task in workflow.tasks.values()}:
            wire_needs(needs)  # what can't be asked for is refused before it is on disk
        self._check_may(id, workflow, owner, "idempotency" in options)
        about = About(workflow.name, owner, len(workflow.tasks), json.dumps(options))
        # all that can go wrong with it goes wrong before it is written
        make = partial(Run, id, workflow, self._clock(), self._rpc.me.id, owner)
        run = await made(make, is_much(text))
        named = "idempotency" in options  # else the id was drawn a moment ago
        self._check_may(id, workflow, owner, named)  # others may have come meanwhile
        first, at, written = self.journal.create(id, about, text, patient, named)
        run.apply(first, at, self.journal.keeping.epoch(id))
        # While it is being written, peers are found for it. None but this one is told before it
        # counts: should that fail, nobody else has heard of it, and what began here is ended.
        self.runs.begin(run)
        self._creating[id] = created = asyncio.get_running_loop().create_future()
        try:
            self._begin(run)
            await asyncio.shield(written)
            async with asyncio.timeout(CREATE_S_MAX):
                await self.journal.kept(id)
        except DatabaseError:
            self._undo(run)
            raise
        except (TimeoutError, Deposed) as error:
            # some keeper may have it: should it ever count, it is over at once
            if isinstance(error, TimeoutError) and self._active.get(id) is run:
                self._cancel(run, UNACKNOWLEDGED)
            raise Refused("keepers", f"{KEEPERS_SILENT}; submit it again") from None
        finally:
            self._creating.pop(id, None)
            created.set_result(None)
        self.counts["submitted"] += 1
        return run

    def _check_may(self, id: str, workflow: Workflow, owner: str, named: bool) -> None:
        """What can be refused is refused before it is written."""
        if self.closed:
            raise Refused("leaving", "this peer is leaving; submit to another one")
        if len(self._active) >= ACTIVE_MAX:
            raise Refused("overload", f"{ACTIVE_MAX} workflows are running from here already")
        mine = [run for run in self._active.values() if run.owner == owner]
        tasks = sum(len(run.tasks) for run in mine) + len(workflow.tasks)
        if len(mine) >= OWNER_ACTIVE_MAX or (mine and tasks > OWNER_TASKS_MAX):
            raise Refused(
                "overload",
                f"you have {len(mine)} workflows with {tasks - len(workflow.tasks):,} tasks "
                "running from here already; wait for some, or submit to another peer",
            )
        tasks = sum(len(run.tasks) for run in self._active.values()) + len(workflow.tasks)
        if self._active and tasks > self.journal.keeping.config.tasks_max:
            raise Refused("overload", f"{tasks:,} tasks would wait here; submit to another peer")
        kept = self.journal.keeping.follows(id) is not None
        if named and (kept or self.knows(id) or self.journal.is_void(id)):
            raise AlreadyHere(f"workflow {id} is here already")
        if self.journal.keeping.is_closing(id):
            left = "what is left of an earlier submission with this key is being put away"
            raise Refused("busy", f"{left}; submit it again in a moment")

    def _undo(self, run: Run) -> None:
        """It could not be written, and never was."""
        run.note(NeverWritten())
        self._forget(run)
        mine = [key for key in self.given.to(self._rpc.me.id) if key.workflow == run.id]
        if mine:
            self.targets.abort(run, self._rpc.me.id, mine)
        self.journal.keeping.abandon(run.id)

    def _forget(self, run: Run) -> None:
        """This peer does nothing more for it."""
        self.runs.forget(run.id)
        _, staging = self._stages.pop(run.id, (None, None))
        if staging is not None and staging is not asyncio.current_task():
            staging.cancel()
        self._withdraw(run, [_key(run, t.id, t.number + 1) for t in run.tasks.values()])

    def deposed(self, id: str) -> None:
        """Another peer is its home now, or will be: what was not agreed on here never was."""
        run = self.remembered(id)
        if run is None:
            return
        self.counts["homes_lost"] += 1
        self._forget(run)
        self.given.forget(id)
        ended = self._waiters.pop(id, None)
        if ended is not None:
            ended.set()

    def dropped(self, id: str) -> None:
        """The copy here is given up: others answer for it, also if it ended here."""
        ended = self.runs.ended(id)
        if ended is not None:
            self._forget(ended)

    def take_up(self, id: str) -> None:
        """This peer is its home now: go on as the journal says."""
        if self.closed:
            return  # it leaves, perhaps with all others: who is here then goes on
        material = self.runs.material(id)
        if material is not None and is_large(material):
            self._spawn(self._take_up_large(id, material))
        else:
            self._take_up(id, material)

    async def _take_up_large(self, id: str, material: Material) -> None:
        epoch = self.journal.keeping.epoch(id)
        run = await asyncio.to_thread(rebuilt, material)
        if epoch and self.journal.keeping.epoch(id) == epoch:
            self._take_up(id, material, run)

    def _take_up(self, id: str, material: Material | None, run: Run | None = None) -> None:
        if material is None:
            # The home before fell with a part of the submission on its way, and told nobody that
            # it has it: what is here can never run, and its name is free for another try.
            if self.journal.keeping.replicas[id].ended_at_count:
                return  # it was found out before
            self.counts["submissions_broken_off"] += 1
            reason = "its submission broke off before it was accepted"
            self.journal.append(id, Ended(state=VOID, reason=reason))
            return
        run = run or rebuilt(material)
        if run is None:
            return
        if run.over:
            self.runs.end(run)
            return
        self.counts["homes_taken"] += 1
        self.runs.begin(run)
        run.note(WaitAgain(tuple(t.id for t in run.tasks.values() if t.state == "retrying")))
        self.targets.resume(run)
        with self.deciding(run) as decide:
            decide.mend_those(run.tasks)
            decide.stage_again(list(run.staged))
        self._begin(run)

    def settle(self) -> None:
        """The others are known, or nobody answered for a while."""
        self.given.settled = True
        self.targets.settle()
        for run in self.active():
            self._begin(run)

    def _begin(self, run: Run) -> None:
        self._unpublished.add(run.id)
        if len(self._unpublished) == 1:
            now = asyncio.get_running_loop().time()
            self._spawn(self._publish(max(0.0, self._published_at + PUBLISH_S - now)))
        self.slow.begun(run)
        self._bring_inputs(run)
        with self.deciding(run) as decide:
            decide.place_ready()
        self._delivery.begin(run)
        self._conclude(run)

    def _conclude(self, run: Run) -> None:
        if self.runs.is_active(run):
            with self.deciding(run) as decide:
                decide.conclude()

    def _delivered(self, run: Run, said: FilesDelivered) -> None:
        if self.runs.is_active(run):
            with self.deciding(run) as decide:
                decide.write(said)
                decide.conclude()

    async def _publish(self, wait_s: float) -> None:
        """Where workflows have their home: at once, or with those that follow closely."""
        await asyncio.sleep(wait_s)
        self._published_at = asyncio.get_running_loop().time()
        ids, self._unpublished = self._unpublished, set()
        by_epoch: dict[int, dict[bytes, bytes]] = defaultdict(dict)
        for id in ids:
            epoch = shown(self.journal.keeping.epoch(id))
            if epoch:
                by_epoch[epoch][key_of("home", id)] = self._rpc.me.id
        for epoch, records in by_epoch.items():
            await self._records.publish(records, epoch)

    async def get(self, id: str) -> Run | None:
        """A workflow whose home is here, or that has ended and of which a copy is here."""
        return await self.runs.get(id)

    def remembered(self, id: str) -> Run | None:
        """One whose home is here, or that ended here not long ago."""
        return self.runs.remembered(id)

    async def created(self, id: str) -> None:
        """When it is on disk, if it is on its way there."""
        written = self._creating.get(id)
        if written is not None:
            await asyncio.wait([written])

    def knows(self, id: str) -> bool:
        return self.runs.knows(id)

    def keepers(self, run: Run) -> tuple[bytes, ...]:
        replica = self.journal.keeping.replicas.get(run.id)
        if replica is not None:
            return replica.keepers
        # (it may be over, and was not read from its journal)
        return run.keepers or self.journal.keepers(run.id)

    def risk(self, run: Run) -> str:
        """What one failure would cost, in words."""
        return risk(self.journal.keeping.places(self.keepers(run)))

    def active(self) -> list[Run]:
        return list(self._active.values())

    # ----------------------------------------------------------------- inputs

    def _bring_inputs(self, run: Run) -> None:
        _, staging = self._stages.get(run.id, (None, None))
        if run.unstaged and (staging is None or staging.done()):
            stage = Stage(run, self.blobs, self.transfer, self._storage, self._rng)
            self._stages[run.id] = (stage, self._spawn(self._stage(run, stage)))

    async def _stage(self, run: Run, stage: Stage) -> None:
        """Bring the workflow's inputs into this peer's blobs, as they come."""
        async for files, failed in stage.bring():
            if run.over:
                break
            rows = await self.copies.staged(run, files)
            if not self.runs.is_active(run):
                break
            with self.deciding(run) as decide:
                decide.staged(InputsStaged(files=tuple(rows), failed=tuple(failed)))

    def blob_arrived(self, hash: bytes) -> None:
        for stage, _ in self._stages.values():
            stage.arrived.set()

    # ----------------------------------------------------------------- what a decision asks

    def now(self) -> float:
        """On the wall clock."""
        return self._clock()

    def may_place(self) -> bool:
        return not self.closed and self.given.settled

    def holds(self, hash: bytes) -> bool:
        return hash in self.blobs

    def boot(self, peer: bytes) -> int:
        member = self.members.get(peer)
        return member.boot if member is not None else 0

    def is_me(self, peer: bytes) -> bool:
        return peer == self._rpc.me.id

    def could_run(self, run: Run, task: TaskState) -> set[bytes]:
        return self.targets.could_run(run, task)

    def is_held(self, file: File | None) -> bool:
        return self.targets.is_held(file)

    def deadline_at(self, run: Run) -> float | None:
        at = deadline_at(run)
        if at is None:
            return None
        return asyncio.get_running_loop().time() + (at - self._clock())

    # ----------------------------------------------------------------- what a decision leaves

    @contextlib.contextmanager
    def deciding(self, run: Run) -> Iterator[Decision]:
        """What is decided in here is performed at its end; also if that is an error, as the run
        has been changed by then."""
        if not self.runs.is_active(run):
            raise Deposed(run.id)
        decide = self._decision(run)
        try:
            yield decide
        finally:
            self._perform(run, decide.effects)

    def _decision(self, run: Run) -> Decision:
        return Decision(run, self, self.journal.keeping.epoch(run.id))

    def _perform(self, run: Run, wanted: list[effects.Effect]) -> None:
        """Entries first: the rest may lead to decisions, whose entries come after these."""
        for effect in wanted:
            if isinstance(effect, effects.Append):
                then = None if effect.then is None else partial(self._committed, run, effect.then)
                self.journal.append(run.id, effect.said, effect.soon, then, effect.at)
        for effect in wanted:
            match effect:
                case effects.Append():
                    pass
                case effects.Place(units, gangs):
                    if units:
                        self.strategy(run).add(units)
                    if gangs:
                        self._strategies[Gangs.name].add(gangs)
                case effects.PlaceRest(tasks):
                    asyncio.get_running_loop().call_soon(self._place_rest, run, tasks)
                case effects.Start(placed):
                    self._start(run, placed)
                case effects.Withdraw(keys):
                    self._withdraw(run, keys)
                case effects.AbortAttempts(peer, keys):
                    self.targets.abort(run, peer, list(keys))
                case effects.Retry(task, wait_s):
                    wait_s *= 0.75 + self._rng.random() / 2
                    asyncio.get_running_loop().call_later(wait_s, self._place_again, run, task)
                case effects.BringInputs():
                    self._bring_inputs(run)
                case effects.Deliver():
                    self._delivery.begin(run)
                case effects.KeepTwice(tasks):
                    self.targets.keep_twice(run, [run.tasks[name] for name in tasks])
                case effects.Observe(said_s, took_s):
                    self._experience.observe(run.owner, said_s, took_s)
                case effects.Count(name, by):
                    self.counts[name] += by
                case effects.Conclude(state):
                    self._concluded(run, state)

    def _committed(self, run: Run, event: WhenCommitted) -> None:
        """A majority has the entry that this hangs on; the run may have come to its end since."""
        decide = self._decision(run)
        match event:
            case ResultsCount():
                decide.results_count(event, self.runs.is_active(run))
            case InputsCount():
                decide.inputs_count(event, self.runs.is_active(run))
            case CancelCounts():
                decide.cancel_counts(event)
        self._perform(run, decide.effects)

    def _place_rest(self, run: Run, tasks: tuple[str, ...]) -> None:
        if self.runs.is_active(run):
            with self.deciding(run) as decide:
                rest = [run.tasks[name] for name in tasks]
                decide.place_ready([task for task in rest if task.state == "waiting"])

    def _place_again(self, run: Run, task: str) -> None:
        if self.runs.is_active(run):
            with self.deciding(run) as decide:
                decide.place_again(task)

    def _concluded(self, run: Run, state: str) -> None:
        self.runs.end(run)
        _, staging = self._stages.pop(run.id, (None, None))
        if staging is not None and staging is not asyncio.current_task():
            staging.cancel()
        self.counts[f"workflows_{state}"] += 1
        if run.id in self._waiters:
            self._spawn(self._tell_end(run.id))

    # ----------------------------------------------------------------- what strategies found

    def placed(self, batch: list[Placed]) -> None:
        """From a strategy: leases for units. Journal who got what, then tell the peers."""
        by_run: dict[str, list[Placed]] = defaultdict(list)
        stale: dict[bytes, tuple[Contact, list[int]]] = {}
        for one in batch:
            if all(map(self.is_pending, one.unit.gang or (one.unit.key,))):
                by_run[one.unit.key.workflow].append(one)
            else:
                stale.setdefault(one.peer.id, (one.peer, []))[1].append(one.lease)
        for contact, leases in stale.values():
            self._rpc.tell(contact, ReturnLeases(leases=tuple(leases)))
        for id, rows in by_run.items():
            with self.deciding(self._active[id]) as decide:
                decide.start(rows)

    def _start(self, run: Run, placed: tuple[Placed, ...]) -> None:
        for one in placed:
            self.given.add(one.peer.id, one.unit.key)
        here = [one for one in placed if self.is_me(one.peer.id)]
        away = [one for one in placed if not self.is_me(one.peer.id)]
        if here:
            self.dispatch.here(run, here)
        if away:
            self.given.on_the_way.update(one.unit.key for one in away)
            self._spawn(self.dispatch.away(run, away))

    def is_pending(self, key: AttemptKey) -> bool:
        run = self._active.get(key.workflow)
        task = run.tasks.get(key.task) if run else None
        return task is not None and task.state == "pending" and key.number > task.number

    def make_work(self, run: Run, one: Placed) -> Work | None:
        """None if it is not wanted any more, or can't be put into a message."""
        key = one.unit.key
        if not self._wanted(run, key):
            return None
        if run.tasks[key.task].missing:
            # While `started` was on its way to the keepers, a peer died with what this reads: what
            # its maker makes now does not count yet, and may be another file.
            self.lost([(key, "what it reads is made again")], begun=False)
            return None
        try:
            return self._work(run, one)
        except LookupError as error:  # a file it needs was lost this very moment
            self.lost([(key, str(error))], begun=False)
        except Exception as error:
            log.exception("%s can't be sent", key)
            self._fail(run, [key.task], f"it can't be sent to a peer: {error}"[:1000])
        return None

    def _fail(self, run: Run, tasks: Iterable[str], reason: str) -> None:
        with self.deciding(run) as decide:
            for task in tasks:
                decide.fail(task, reason)
            decide.conclude()

    def _fenced(self, run: Run) -> None:
        self._spawn(self.duplicates.look(run))

    def _wanted(self, run: Run, key: AttemptKey) -> bool:
        task = run.tasks[key.task]
        attempt = task.attempt(key.number)
        alive = attempt is not None and attempt.state == "running"
        return self.runs.is_active(run) and alive and task.state not in FINAL and not run.over

    def _work(self, run: Run, one: Placed) -> Work:
        work = make_work(run, one, self.estimate(one.unit), self.targets.held_too)
        if one.unit.gang:
            others = self._company.environment(run, one.unit)
            work = work._replace(env=(*work.env, *others), gang=True)
        # what goes to another peer must be what it can read; this one takes it as it is
        return work if one.peer.id == self._rpc.me.id else CHECKED_WORK.validate_python(work)

    # ----------------------------------------------------------------- outcomes

    def take(self, run: Run, peer: bytes, outcomes: list[Outcome]) -> None:
        with self.deciding(run) as decide:
            decide.take(peer, outcomes)

    def take_own(self, ended: Outcome) -> bool:
        """From this very peer. False: its home is elsewhere by now."""
        taken = self.reception.take_own(self._rpc.me.id, ended)
        if isinstance(taken, bool):
            return taken
        self._spawn(taken)
        return True

    def _copied(self, run: Run, rows: list[CopiedFile]) -> None:
        if self.runs.is_active(run):
            with self.deciding(run) as decide:
                decide.write(FilesCopied(files=tuple(rows)))

    async def _tell_end(self, id: str) -> None:
        with contextlib.suppress(Deposed):
            await self.journal.kept(id)
        ended = self._waiters.pop(id, None)
        if ended is not None:
            ended.set()

    async def ended(self, run: Run, wait_s: float) -> None:
        """When it is over, or is not this peer's any more; or after a while."""
        if run.over:
            return
        event = self._waiters.setdefault(run.id, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await event.wait()

    async def stands(self, run: Run) -> bool:
        """What is known here of its end counts; False if this peer can't say so."""
        return await self.reception.is_committed(run.id)

    # ----------------------------------------------------------------- cancelling

    async def cancel(self, id: str, reason: str) -> Run | None:
        run = await self.get(id)
        if run is None or run.over:
            return run
        self._cancel(run, reason)
        if not await self.reception.is_committed(id):
            raise Deposed(id)  # or its keepers do not answer: it is not said to be cancelled
        return run

    def _cancel(self, run: Run, reason: str) -> None:
        with self.deciding(run) as decide:
            decide.cancel(reason)

    # ----------------------------------------------------------------- doubts

    def heard_of_room(self, peer: bytes, free: Capacity) -> None:
        for strategy in self._strategies.values():
            strategy.vacancy(peer, free)

    def _member_changed(self, old: Member | None, new: Member) -> None:
        peer = new.contact.id
        if self.closed:
            return  # others may be leaving with this one, and be back with it: nothing is lost
        if new.state >= State.DEAD:
            what = "died" if new.state == State.DEAD else "left"
            lost = [(key, f"its peer {peer.hex()[:8]} {what}") for key in self.given.to(peer)]
            if lost:
                self.lost(lost)
            for run in self.active():
                with self.deciding(run) as decide:
                    decide.reopen_lost(peer)
        elif old is not None and old.boot != new.boot:
            self.given.doubt(peer)  # it was started anew: ask what it still has
        elif new.state == State.SUSPECT:
            self.run_elsewhere(peer)
        if new.state == State.ALIVE and (old is None or old.state >= State.DEAD):
            for run in self.active():  # what waited for its files, or for its kind of peer
                with self.deciding(run) as decide:
                    decide.place_ready()

    def run_elsewhere(self, peer: bytes) -> None:
        """It may be dead, or just slow. What has not run long begins at another peer too: should
        the first one come back with a result, that counts as well as any."""
        young = []
        now = self._clock()
        for key in self.given.to(peer):
            run = self._active.get(key.workflow)
            attempt = run.tasks[key.task].attempt(key.number) if run else None
            if (
                attempt is not None
                and now - attempt.at < YOUNG_S
                and key not in self.given.on_the_way
                and not (run and run.workflow.tasks[key.task].gang)  # all of it would begin anew
            ):
                young.append((key, f"its peer {peer.hex()[:8]} does not answer"))
        self.lost(young, begun=False)

    def _speed_of(self, peer: bytes) -> float:
        member = self.members.get(peer)
        return max(1e-3, member.traits.speed) if member is not None else 1.0

    def _begin_beside(self, key: AttemptKey, why: str) -> None:
        """A second attempt, with the first left running: the first result wins."""
        self.lost([(key, why)], begun=False)

    def lost(self, rows: list[tuple[AttemptKey, str]], begun: bool = True) -> None:
        """Attempts that will not report. Those that never began don't count against the task."""
        by_run: dict[str, list[tuple[AttemptKey, str]]] = defaultdict(list)
        for key, reason in list(rows):
            by_run[key.workflow].append((key, reason))
        self.given.drop_anywhere(key for key, _ in rows)
        for id, lost in by_run.items():
            run = self._active.get(id)
            if run is not None:
                with self.deciding(run) as decide:
                    decide.lose(lost, begun)

    def waiting_for(self, run: Run, task: TaskState) -> str:
        known = self.targets.waiting_for(run, task)
        if known:
            return known
        gang = run.workflow.tasks[task.id].gang
        strategy = self._strategies[Gangs.name] if gang else self.strategy(run)
        return waiting_for(run, task, self.journal, strategy)

    # ----------------------------------------------------------------- small things

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Deposed):
            log.error("an error in the home", exc_info=error)

    async def close(self) -> None:
        await self._delivery.close()
        await self.targets.close()
        await self.copies.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _key(run: Run, task: str, number: int) -> AttemptKey:
    return AttemptKey(run.id, task, number)
