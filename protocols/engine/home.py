"""Enacts the workflows whose home this peer is, from their journals.

What follows from an event is decided in `decisions`, from the run's state, and performed by the
`performer`: entries are appended, capacity is looked for, peers are told.

Rules:
- Decide, apply in memory, append to the journal; act outside (answer, commit, acknowledge) only
  when the entry is on disk. A home killed between any two lines goes on from what it wrote.
- Every attempt has a number, journaled with its peer before another peer is told to run it. (The
  attempts of this very peer end with it and leave nothing behind: they do not wait for the disk.)
- An attempt that was given to a peer is asked about until its end is known (`outstanding`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from valence.workflow.model import Workflow

from ..consensus.keeping import Deposed
from ..consensus.placement import risk
from ..consensus.replica import shown
from ..data.transfer import Transfer
from ..membership.members import Members
from ..ports import Blobs, DatabaseError, StorageElements
from ..records import Records, key_of
from ..strategies.base import Placed, Strategy, Unit
from ..strategies.gangs import Gangs
from ..wire.entries import VOID, CopiedFile, Ended, FilesCopied, FilesDelivered
from ..wire.messages import AttemptKey, Capacity, Outcome
from ..wire.rpc import Refused, Rpc
from .acceptance import Acceptance
from .delivery import Delivery
from .duplicate_submissions import DuplicateSubmissions
from .experience import Experience
from .explain import waiting_for
from .gangs import Company
from .journal import About, Journal
from .losses import Losses
from .outstanding import Outstanding
from .performer import Deciding, Performer
from .placements import Placements
from .planning import Admitted, NotPromised, Planning
from .promises import Promises
from .reception import Reception
from .replication import Replication
from .run import NeverWritten, Run, TaskState, WaitAgain
from .runs import Material, Runs, is_large, made, rebuilt
from .stage import Inputs
from .stragglers import Stragglers
from .surroundings import HomeSurroundings
from .targets import Peers, Targets
from .work import is_much, wire_needs

log = logging.getLogger("valence.home")

PUBLISH_S = 0.3
RUNTIME_S_MAX = 1e8
CREATE_S_MAX = 10.0
UNPROMISED = "its submission was interrupted before its deadline was promised"
UNACKNOWLEDGED = "its submission could not be acknowledged"
KEEPERS_SILENT = "too few of the peers that are to keep the workflow answered"


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
        self.outstanding = Outstanding(rpc, members, journal.keeping.epoch, self.lost)
        self.duplicates = DuplicateSubmissions(journal.keeping, self.runs.is_active, self._cancel)
        self.losses = Losses(
            self.runs, self.outstanding, members, self.deciding, clock, lambda: self.closed
        )
        self.stragglers = Stragglers(
            self.active, clock, self.losses.speed_of, self.losses.begin_beside
        )
        self._acceptance = Acceptance(self.runs, journal, lambda: self.closed)
        self._experience = Experience()
        self._company = Company(rpc, members)
        self._delivery = Delivery(storage, blobs, transfer, rng, self._delivered)
        self.replication = Replication(rpc, members, transfer, rng, self.keepers, self._copied)
        self.inputs = Inputs(
            runs=self.runs, blobs=blobs, transfer=transfer, storage=storage,
            replication=self.replication, rng=rng, deciding=self.deciding, spawn=self._spawn,
        )  # fmt: skip
        self._rpc = rpc
        self.members = members
        self._records = records
        self.blobs = blobs
        self.transfer = transfer
        self._clock = clock
        self._strategies: dict[str, Strategy] = {}
        self._active = self.runs.active
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: dict[str, asyncio.Event] = {}
        self._creating: dict[str, asyncio.Future[None]] = {}  # not acknowledged yet
        self._unpublished: set[str] = set()
        self._published_at = 0.0
        self.reception = Reception(
            home=self, runs=self.runs, journal=journal, blobs=blobs, outstanding=self.outstanding,
            company=self._company, replication=self.replication, counts=self.counts,
        )  # fmt: skip
        self.reception.serve(rpc)
        self.targets: Targets = (targets or Peers)(self)
        self.placements = Placements(
            rpc=rpc, runs=self.runs, journal=journal, outstanding=self.outstanding,
            losses=self.losses, company=self._company, targets=self.targets, estimate=self.estimate,
            deciding=self.deciding, on_fenced=self._fenced, spawn=self._spawn,
        )  # fmt: skip
        self.dispatch = self.placements.dispatch
        around = HomeSurroundings(
            rpc.me.id, members, blobs, self.outstanding, self.targets, clock, lambda: self.closed
        )
        self.planning = Planning(clock, lambda: f"{rng.getrandbits(64):016x}", self.counts)
        self.promises = Promises(
            planning=self.planning, runs=self.runs, members=members, deciding=self.deciding,
            epoch=journal.keeping.epoch, clock=clock, spawn=self._spawn, counts=self.counts,
        )  # fmt: skip
        self._performer = Performer(
            runs=self.runs, journal=journal, surroundings=around, targets=self.targets,
            strategies=self._strategies, strategy=self.strategy, experience=self._experience,
            counts=self.counts, rng=rng, start=self.placements.start,
            bring_inputs=self.inputs.bring, deliver=self._delivery.begin,
            book_missing=self.promises.book_missing, conclude=self._concluded,
        )  # fmt: skip
        members.listen(self.losses.member_changed, at_stake=self._active)

    def use(self, strategy: Strategy) -> None:
        self._strategies[strategy.name] = strategy

    def estimate(self, unit: Unit) -> float | None:
        """How long a unit will take, from what has been observed so far."""
        run = self._active.get(unit.key.workflow)
        runtime_s = None if run is None else run.observed_s(unit.key.task)
        if runtime_s is None and unit.runtime_s is not None:
            runtime_s = self._experience.corrected(unit.owner, unit.runtime_s)
        return None if runtime_s is None else min(RUNTIME_S_MAX, runtime_s)

    def strategy(self, run: Run) -> Strategy:
        imposed = self.targets.strategy(run)
        if imposed is not None:
            return imposed
        name = run.workflow.strategy
        if name == "auto":
            name = "probe" if run.promise is None else "deadline"
        return self._strategies[name]

    def deciding(self, run: Run) -> Deciding:
        """`with` this, decide; the effects are performed at its end."""
        return self._performer.deciding(run)

    # ----------------------------------------------------------------- beginning

    async def submit(
        self,
        text: bytes,
        workflow: Workflow,
        workflow_id: str,
        options: dict[str, object],
        owner: str,
        patient: bool = False,
        accept: str = "",
    ) -> Run:
        """On disk when this returns; `patient`: its user waits for its end anyway. `accept`: the
        offer of a plan that ends later than the document asks for."""
        refusal = self.targets.refusal(workflow)
        if refusal:
            raise Refused("targets", refusal)
        for needs in {task.needs for task in workflow.tasks.values()}:
            wire_needs(needs)  # needs that no message can express are refused here
        named = "idempotency" in options  # else the id was drawn a moment ago
        self._acceptance.check(workflow_id, workflow, owner, named)
        about = About(workflow.name, owner, len(workflow.tasks), json.dumps(options))
        # whatever can go wrong with the workflow goes wrong before it is written
        make = partial(Run, workflow_id, workflow, self._clock(), self._rpc.me.id, owner)
        is_slow = is_much(text)
        run = await made(make, is_slow)
        if is_slow:  # others may have come since
            self._acceptance.check(workflow_id, workflow, owner, named)
        admitted = await self._admit(workflow_id, workflow, owner, text, accept)
        if admitted is None:
            if workflow.deadline is not None:  # planning took its time
                self._acceptance.check(workflow_id, workflow, owner, named)
            return await self._create(run, text, about, patient, named)
        options["promised"] = run.to_be_promised = True
        about = about._replace(options=json.dumps(options))
        run.submitted_at = self._clock()  # planning took its time
        try:
            self._acceptance.check(workflow_id, workflow, owner, named)
            return await self._create(run, text, about, patient, named, admitted)
        except BaseException:
            self.planning.release(admitted)
            raise

    async def _admit(
        self, workflow_id: str, workflow: Workflow, owner: str, text: bytes, accept: str
    ) -> Admitted | None:
        """The plan of a workflow that is to be done by its deadline. None: it is promised nothing.
        `NotPromised` if it can't be done in time."""
        if workflow.deadline is None:
            return None
        why = self.planning.why_none(workflow, owner)
        if why and accept:
            raise NotPromised(why, None)
        if why:
            self.planning.insist(workflow, owner, why)
            return None
        try:
            return await self.planning.admit(workflow_id, workflow, owner, text, accept)
        except NotPromised:
            if workflow.promise.infeasible == "best-effort" and not accept:
                return None
            raise

    async def _create(
        self,
        run: Run,
        text: bytes,
        about: About,
        patient: bool,
        named: bool,
        admitted: Admitted | None = None,
    ) -> Run:
        workflow_id = run.id
        first, at, written = self.journal.create(workflow_id, about, text, patient, named)
        run.apply(first, at, self.journal.keeping.epoch(workflow_id))
        # While it is being written, peers are found for it. No other peer is told before it is
        # committed: if that fails, nobody else has heard of it, and what began here is ended.
        self.runs.begin(run)
        self._creating[workflow_id] = created = asyncio.get_running_loop().create_future()
        try:
            if admitted is not None:
                with self.deciding(run) as decide:
                    decide.write(admitted.entry)
            self._begin(run)
            await asyncio.shield(written)
            if not self.journal.is_kept(workflow_id):
                async with asyncio.timeout(CREATE_S_MAX):
                    await self.journal.kept(workflow_id)
        except DatabaseError:
            self._undo(run)
            raise
        except (TimeoutError, Deposed) as error:
            # some keeper may have it: should it ever be committed, it is cancelled at once
            if isinstance(error, TimeoutError) and self._active.get(workflow_id) is run:
                self._cancel(run, UNACKNOWLEDGED)
            raise Refused("keepers", f"{KEEPERS_SILENT}; submit it again") from None
        finally:
            self._creating.pop(workflow_id, None)
            created.set_result(None)
        self.counts["submitted"] += 1
        self.counts["promises_made"] += admitted is not None
        return run

    def _undo(self, run: Run) -> None:
        """It could not be written: end what began here."""
        run.note(NeverWritten())
        self._forget(run)
        me = self._rpc.me.id
        keys = [key for key in self.outstanding.to(me) if key.workflow == run.id]
        if keys:
            self.targets.abort(run, me, keys)
        self.journal.keeping.abandon(run.id)

    def _forget(self, run: Run) -> None:
        """This peer does nothing more for it."""
        self.runs.forget(run.id)
        self.inputs.stop(run.id)
        keys = [AttemptKey(run.id, task.id, task.number + 1) for task in run.tasks.values()]
        self._performer.withdraw(run, keys)

    def deposed(self, workflow_id: str) -> None:
        """Another peer is its home now, or will be: what is not committed here never happened."""
        run = self.remembered(workflow_id)
        if run is None:
            return
        self.counts["homes_lost"] += 1
        self._forget(run)
        self.outstanding.forget(workflow_id)
        self._wake_waiters(workflow_id)

    def dropped(self, workflow_id: str) -> None:
        """The replica here is given up: others answer for it, even if it ended here."""
        ended = self.runs.ended(workflow_id)
        if ended is not None:
            self._forget(ended)

    def take_up(self, workflow_id: str) -> None:
        """This peer is its home now: go on as the journal says."""
        if self.closed:
            return  # this peer leaves, perhaps with all others: those that stay or return go on
        material = self.runs.material(workflow_id)
        if material is not None and is_large(material):
            self._spawn(self._take_up_large(workflow_id, material))
        else:
            self._take_up(workflow_id, material)

    async def _take_up_large(self, workflow_id: str, material: Material) -> None:
        epoch = self.journal.keeping.epoch(workflow_id)
        run = await asyncio.to_thread(rebuilt, material)
        if epoch and self.journal.keeping.epoch(workflow_id) == epoch:
            self._take_up(workflow_id, material, run)

    def _take_up(self, workflow_id: str, material: Material | None, run: Run | None = None) -> None:
        if material is None:
            self._void(workflow_id)
            return
        run = run or rebuilt(material)
        if run is None:
            return
        if run.over:
            self.runs.end(run)
            return
        self.counts["homes_taken"] += 1
        self.runs.begin(run)
        if run.to_be_promised and run.promise is None and not run.cancelling:
            self._cancel(run, UNPROMISED)
            return
        run.note(WaitAgain(tuple(t.id for t in run.tasks.values() if t.state == "retrying")))
        self.targets.resume(run)
        with self.deciding(run) as decide:
            decide.mend_those(run.tasks)
            decide.stage_again(list(run.staged))
        self._begin(run)

    def _void(self, workflow_id: str) -> None:
        """The previous home died while it wrote the submission, and acknowledged it to nobody: this
        part of it can never run, and its name is free for another try."""
        if self.journal.keeping.replicas[workflow_id].ended_at_count:
            return  # another home has ended it already
        self.counts["submissions_broken_off"] += 1
        reason = "its submission was interrupted before it was accepted"
        self.journal.append(workflow_id, Ended(state=VOID, reason=reason))

    def settle(self) -> None:
        """The other peers are known, or none answered for a while."""
        self.outstanding.settled = True
        self.targets.settle()
        for run in self.active():
            self._begin(run)

    def _begin(self, run: Run) -> None:
        self.promises.begin(run)
        self._unpublished.add(run.id)
        if len(self._unpublished) == 1:
            now = asyncio.get_running_loop().time()
            self._spawn(self._publish(max(0.0, self._published_at + PUBLISH_S - now)))
        self.stragglers.begun(run)
        self.inputs.bring(run)
        with self.deciding(run) as decide:
            decide.place_ready()
        self._delivery.begin(run)
        if self.runs.is_active(run):
            with self.deciding(run) as decide:
                decide.conclude()

    def _delivered(self, run: Run, entry: FilesDelivered) -> None:
        if self.runs.is_active(run):
            with self.deciding(run) as decide:
                decide.write(entry)
                decide.conclude()

    async def _publish(self, wait_s: float) -> None:
        """Publish where workflows have their home; those close in time go together."""
        await asyncio.sleep(wait_s)
        self._published_at = asyncio.get_running_loop().time()
        workflow_ids, self._unpublished = self._unpublished, set()
        by_epoch: dict[int, dict[bytes, bytes]] = defaultdict(dict)
        for workflow_id in workflow_ids:
            epoch = shown(self.journal.keeping.epoch(workflow_id))
            if epoch:
                by_epoch[epoch][key_of("home", workflow_id)] = self._rpc.me.id
        for epoch, records in by_epoch.items():
            await self._records.publish(records, epoch)

    # ----------------------------------------------------------------- questions

    async def get(self, workflow_id: str) -> Run | None:
        """A workflow whose home is here, or that has ended and has a replica here."""
        return await self.runs.get(workflow_id)

    def remembered(self, workflow_id: str) -> Run | None:
        """A workflow whose home is here, or that ended here not long ago."""
        return self.runs.remembered(workflow_id)

    async def created(self, workflow_id: str) -> None:
        """Waits until it is on disk, if it is on its way there."""
        written = self._creating.get(workflow_id)
        if written is not None:
            await asyncio.wait([written])

    def knows(self, workflow_id: str) -> bool:
        return self.runs.knows(workflow_id)

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

    def now(self) -> float:
        """On the wall clock."""
        return self._clock()

    def waiting_for(self, run: Run, task: TaskState) -> str:
        known = self.targets.waiting_for(run, task)
        if known:
            return known
        gang = run.workflow.tasks[task.id].gang
        strategy = self._strategies[Gangs.name] if gang else self.strategy(run)
        return waiting_for(run, task, self.journal, strategy)

    # ----------------------------------------------------------------- what happens to attempts

    def placed(self, batch: list[Placed]) -> None:
        """From a strategy: leases for units."""
        self.placements.placed(batch)

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

    def lost(self, rows: list[tuple[AttemptKey, str]], begun: bool = True) -> None:
        """Attempts that will not report. Those that never began don't count against the task."""
        self.losses.lost(rows, begun)

    def run_elsewhere(self, peer: bytes) -> None:
        """This peer may be dead, or just slow: its young attempts begin at another peer too."""
        self.losses.run_elsewhere(peer)

    def heard_of_room(self, peer: bytes, free: Capacity) -> None:
        for strategy in self._strategies.values():
            strategy.vacancy(peer, free)

    def _copied(self, run: Run, rows: list[CopiedFile]) -> None:
        if self.runs.is_active(run):
            with self.deciding(run) as decide:
                decide.write(FilesCopied(files=tuple(rows)))

    def _fenced(self, run: Run) -> None:
        self._spawn(self.duplicates.look(run))

    # ----------------------------------------------------------------- ends

    async def cancel(self, workflow_id: str, reason: str) -> Run | None:
        run = await self.get(workflow_id)
        if run is None or run.over:
            return run
        self._cancel(run, reason)
        if not await self.reception.is_committed(workflow_id):
            raise Deposed(workflow_id)  # or its keepers are silent: the cancel is not acknowledged
        return run

    def _cancel(self, run: Run, reason: str) -> None:
        with self.deciding(run) as decide:
            decide.cancel(reason)

    def _concluded(self, run: Run, state: str) -> None:
        self.runs.end(run)
        self.promises.ended(run)
        self.inputs.stop(run.id)
        self.counts[f"workflows_{state}"] += 1
        if run.id in self._waiters:
            self._spawn(self._tell_end(run.id))

    async def _tell_end(self, workflow_id: str) -> None:
        with contextlib.suppress(Deposed):
            await self.journal.kept(workflow_id)
        self._wake_waiters(workflow_id)

    def _wake_waiters(self, workflow_id: str) -> None:
        event = self._waiters.pop(workflow_id, None)
        if event is not None:
            event.set()

    async def ended(self, run: Run, wait_s: float) -> None:
        """Waits until it is over, or this peer is its home no more; but no longer than `wait_s`."""
        if run.over:
            return
        event = self._waiters.setdefault(run.id, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await event.wait()

    async def stands(self, run: Run) -> bool:
        """What is known here of its end is committed; False if this peer can't tell."""
        return await self.reception.is_committed(run.id)

    # ----------------------------------------------------------------- work in the background

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Deposed):
            log.error("background work of the home has failed", exc_info=error)

    async def close(self) -> None:
        await self._delivery.close()
        await self.targets.close()
        await self.replication.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
