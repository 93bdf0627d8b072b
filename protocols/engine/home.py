"""The home: enacts the workflows it accepted, from their journals.

Rules:
- Decide, apply in memory, append to the journal; act outside (answer, commit, acknowledge) only
  when the entry is on disk. A home killed between any two lines goes on from what it wrote.
- Every attempt has a number, journaled with its peer before another peer is told to run it. (What
  this very peer runs falls with it and leaves nothing behind: its work does not wait for the disk.)
  The first result of a task that is committed wins, whichever attempt it came from; all others are
  ignored.
- What was given away is asked about until its end is known (`given`).
- What can't be made out (a lost peer) does not count as the task's failure, up to a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from workflow.model import Task, Workflow

from ..capacity.matching import unmet
from ..consensus.keeping import Deposed
from ..consensus.placement import is_queued, risk
from ..consensus.replica import shown
from ..data.cache import BlobError
from ..data.transfer import Transfer
from ..membership.members import Members, State
from ..ports import Blobs, DatabaseError, StorageElements
from ..records import Records, key_of
from ..strategies.base import Placed, Placement, Strategy, Unit, reads_of
from ..strategies.gangs import Gangs
from ..wire.entries import (
    VOID,
    AttemptsFinished,
    AttemptsLost,
    AttemptsStarted,
    CancelAsked,
    CopiedFile,
    Ended,
    FilesCopied,
    FilesDelivered,
    FinishedAttempt,
    InputReason,
    InputsLost,
    InputsStaged,
    Journaled,
    LostAttempt,
    ReopenedTask,
    SkippedTask,
    StartedAttempt,
    TasksReopened,
    TasksSkipped,
)
from ..wire.messages import (
    CHECKED_WORK,
    AttemptKey,
    Capacity,
    Contact,
    File,
    HandedOn,
    HandOn,
    Member,
    Outcome,
    Report,
    Reported,
    ReturnLeases,
    StillHeld,
    StillWanted,
    Unheld,
    Vacancy,
    Wanted,
    Work,
)
from ..wire.rpc import Refused, Rpc
from .alternatives import mend_branch
from .delivery import Delivery
from .dispatch import Dispatch
from .duplicate_submissions import Twins
from .experience import Experience
from .explain import waiting_for
from .gangs import REASON_MAX, Company, Mending, mend
from .journal import About, Journal, Recorded
from .outcomes import NO_ROOM
from .outstanding import Given
from .replication import NEAR_BYTES_MIN, Copies
from .run import FINAL, AttemptState, Run, TaskState
from .stage import Stage
from .stragglers import Slow
from .work import deadline_at, is_much, make_work, read_document, wire_needs

log = logging.getLogger("valence.home")

RUNS_REMEMBERED = 1000
ENDED_TASKS_MAX = 100_000  # of all that are remembered: the others are read from the journal
ACTIVE_MAX = 1000
OWNER_ACTIVE_MAX, OWNER_TASKS_MAX = 500, 500_000
LOSSES_MAX = 30
PUBLISH_S = 0.3
RETRY_S_MIN, RETRY_S_MAX = 0.2, 10.0
RUNTIME_S_MAX = 1e8
YOUNG_S = 60.0
CREATE_S_MAX = 10.0
UNACKNOWLEDGED = "its submission could not be acknowledged"
COUNT_S_MAX = 10.0
RETURN_S = 8.0
KEEPERS_SILENT = "a majority of the peers that were to keep it did not answer"
WON = "succeeded"


#: a larger workflow is made, read again and placed in parts, so that others have their turn
AT_ONCE_TASKS_MAX = 2000

T = TypeVar("T")

#: of a workflow: its id, its submission, its journal's entries
_Material = tuple[
    str,
    tuple[bytes, dict[str, Any], float, str],
    list[Recorded],
]

#: outcomes of a peer, and what becomes of them
Relay = Callable[[bytes, list[Outcome]], Awaitable[Reported]]


async def _nowhere(peer: bytes, outcomes: list[Outcome]) -> Reported:
    return Reported(kept=(), unknown=tuple(ended.key for ended in outcomes))


class AlreadyHere(Exception):
    """A workflow of that name, which follows from its Idempotency-Key."""


class Home:
    near_bytes_min = NEAR_BYTES_MIN

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
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.journal = journal
        self.closed = False  # this peer is leaving
        self.relay: Relay = _nowhere  # outcomes of workflows that are a task queue's
        self.still_held_elsewhere: Callable[[StillHeld], Awaitable[Unheld]] | None = None
        self.given = Given(rpc, members, journal.keeping.epoch, self._lost)
        self.twins = Twins(journal.keeping, self._is_mine, self._cancel)
        self.slow = Slow(self.active, clock, self._speed_of, self._begin_beside)
        self._experience = Experience()
        self._company = Company(rpc, members)
        self._dispatch = Dispatch(rpc, self.given, journal.kept, self._make_work, self._wanted)
        self._dispatch.on_refused = partial(self._lost, begun=False)
        self._dispatch.on_too_large = self._too_large
        self._dispatch.on_fenced = self._fenced
        self._delivery = Delivery(storage, blobs, transfer, rng, self._delivered)
        self._copies = Copies(rpc, members, transfer, rng, self.keepers, self._copied)
        self._storage = storage
        self._rpc = rpc
        self._members = members
        self._records = records
        self._blobs = blobs
        self._transfer = transfer
        self._clock = clock
        self._rng = rng
        self._strategies: dict[str, Strategy] = {}
        self._active: dict[str, Run] = {}
        self._ended: OrderedDict[str, Run] = OrderedDict()
        self._ended_tasks = 0
        self._stages: dict[str, tuple[Stage, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiters: dict[str, asyncio.Event] = {}
        self._creating: dict[str, asyncio.Future[None]] = {}  # not acknowledged yet
        self._unpublished: set[str] = set()
        self._waits_until = 0.0
        self._published_at = 0.0
        rpc.on(Report, self._report)
        rpc.on(StillWanted, self._still_wanted)
        rpc.on(StillHeld, self._still_held)
        rpc.on(HandOn, self._hand_on)
        rpc.on(Vacancy, self._vacancy)
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

    def strategy(self, run: Run) -> Strategy:
        name = run.workflow.strategy
        return self._strategies["probe" if name == "auto" else name]

    def _withdraw(self, run: Run, keys: list[AttemptKey]) -> None:
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
        for needs in {task.needs for task in workflow.tasks.values()}:
            wire_needs(needs)  # what can't be asked for is refused before it is on disk
        self._check_may(id, workflow, owner, "idempotency" in options)
        about = About(workflow.name, owner, len(workflow.tasks), json.dumps(options))
        # all that can go wrong with it goes wrong before it is written
        make = partial(Run, id, workflow, self._clock(), self._rpc.me.id, owner)
        run = await self._made(make, is_much(text))
        named = "idempotency" in options  # else the id was drawn a moment ago
        self._check_may(id, workflow, owner, named)  # others may have come meanwhile
        first, at, written = self.journal.create(id, about, text, patient, named)
        run.submitted_at = at
        run.apply(first, at, self.journal.keeping.epoch(id))
        # While it is being written, peers are found for it. None but this one is told before it
        # counts: should that fail, nobody else has heard of it, and what began here is ended.
        self._active[id] = run
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

    async def _made(self, make: Callable[[], T], much: bool) -> T:
        return await asyncio.to_thread(make) if much else make()

    def _undo(self, run: Run) -> None:
        """It could not be written, and never was."""
        run.ended_at = run.submitted_at
        self._forget(run)
        mine = [key for key in self.given.to(self._rpc.me.id) if key.workflow == run.id]
        if mine:
            self._abort_at(run, self._rpc.me.id, mine)
        self.journal.keeping.abandon(run.id)

    def _forget(self, run: Run) -> None:
        """This peer does nothing more for it."""
        self._active.pop(run.id, None)
        if self._ended.pop(run.id, None) is not None:
            self._ended_tasks -= len(run.tasks)
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
        ended = self._ended.get(id)
        if ended is not None:
            self._forget(ended)

    def take_up(self, id: str) -> None:
        """This peer is its home now: go on as the journal says."""
        if self.closed:
            return  # it leaves, perhaps with all others: who is here then goes on
        material = self._material(id)
        if material is not None and _is_much(material):
            self._spawn(self._take_up_large(id, material))
        else:
            self._take_up(id, material)

    async def _take_up_large(self, id: str, material: _Material) -> None:
        epoch = self.journal.keeping.epoch(id)
        run = await asyncio.to_thread(_rebuilt, material)
        if epoch and self.journal.keeping.epoch(id) == epoch:
            self._take_up(id, material, run)

    def _take_up(self, id: str, material: _Material | None, run: Run | None = None) -> None:
        if material is None:
            # The home before fell with a part of the submission on its way, and told nobody that
            # it has it: what is here can never run, and its name is free for another try.
            if self.journal.keeping.replicas[id].ended_at_count:
                return  # it was found out before
            self.counts["submissions_broken_off"] += 1
            reason = "its submission broke off before it was accepted"
            self.journal.append(id, Ended(state=VOID, reason=reason))
            return
        run = run or _rebuilt(material)
        if run is None:
            return
        if run.over:
            self._remember(run)
            return
        if id in self._ended:
            self._ended_tasks -= len(self._ended.pop(id).tasks)
        self.counts["homes_taken"] += 1
        self._active[id] = run
        for task in run.tasks.values():
            if task.state == "retrying":
                run._set(task, "waiting")
        self._resume(run)
        self._mend_those(run, run.tasks)
        self._stage_again(run, list(run.staged))
        self._begin(run)

    def _resume(self, run: Run) -> None:
        """Ask about what runs somewhere, as the journal says."""
        for task in run.tasks.values():
            for attempt in task.attempts:
                if attempt.state == "running" and task.state == "running":
                    self.given.add(attempt.peer, _key(run, task.id, attempt.number))
                    self.given.doubt(attempt.peer)
        for peer in [p for p in self.given.peers() if not self._members.is_alive(p)]:
            self._run_elsewhere(peer)

    def _stage_again(self, run: Run, names: Iterable[str]) -> bool:
        """Inputs that went with all who held them are brought in anew; True if there are any."""
        gone = [
            InputReason(name, "it was lost with the peers that held it, and is brought in again")
            for name in names
            if name in run.staged and not self._held_somewhere(run.file(name))
        ]
        if gone:
            self._write(run, InputsLost(files=tuple(gone)))
            for gang in run.gangs:
                self._mend(run, gang)
            self._bring_inputs(run)
        return bool(gone)

    def _held_somewhere(self, file: File | None) -> bool:
        if file is None:
            return False
        if file.hash in self._blobs or any(map(self._members.is_here, file.holders)):
            return True
        # after a start: others that were stopped with this peer may be about to be back
        young = asyncio.get_running_loop().time() < self._waits_until
        return young and any(map(self._may_return, file.holders))

    def _may_return(self, peer: bytes) -> bool:
        member = self._members.get(peer)
        return member is None or member.state != State.DEAD

    def settle(self) -> None:
        """The others are known, or nobody answered for a while."""
        self.given.settled = True
        self._waits_until = asyncio.get_running_loop().time() + RETURN_S
        for run in self.active():
            self._begin(run)

    def _begin(self, run: Run) -> None:
        self._unpublished.add(run.id)
        if len(self._unpublished) == 1:
            now = asyncio.get_running_loop().time()
            self._spawn(self._publish(max(0.0, self._published_at + PUBLISH_S - now)))
        self.slow.begun(run)
        self._bring_inputs(run)
        self._place_ready(run)
        self._delivery.begin(run)
        self._conclude(run)

    def _delivered(self, run: Run, said: FilesDelivered) -> None:
        if self._active.get(run.id) is run:
            self._write(run, said)
            self._conclude(run)

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

    def _material(self, id: str) -> _Material | None:
        """What its journal has of it, if all of its submission is there."""
        found = self.journal.document(id)
        return None if found is None else (id, found, self.journal.read(id))

    async def get(self, id: str) -> Run | None:
        """A workflow whose home is here, or that has ended and of which a copy is here."""
        run = self.remembered(id)
        if run is not None or not self.journal.is_over(id):
            return run
        material = self._material(id)
        if material is not None:
            run = await self._made(partial(_rebuilt, material), _is_much(material))
        if run is not None and self.remembered(id) is None and self.journal.is_over(id):
            self._remember(run)
        return self.remembered(id) or run

    def remembered(self, id: str) -> Run | None:
        """One whose home is here, or that ended here not long ago."""
        return self._active.get(id) or self._ended.get(id)

    async def created(self, id: str) -> None:
        """When it is on disk, if it is on its way there."""
        written = self._creating.get(id)
        if written is not None:
            await asyncio.wait([written])

    def knows(self, id: str) -> bool:
        return id in self._active or id in self._ended or self.journal.is_over(id)

    def _remember(self, run: Run) -> None:
        before = self._ended.pop(run.id, None)
        self._ended_tasks -= len(before.tasks) if before is not None else 0
        self._ended[run.id] = run
        self._ended_tasks += len(run.tasks)
        while len(self._ended) > 1 and (
            len(self._ended) > RUNS_REMEMBERED or self._ended_tasks > ENDED_TASKS_MAX
        ):
            _, oldest = self._ended.popitem(last=False)
            self._ended_tasks -= len(oldest.tasks)

    def keepers(self, run: Run) -> tuple[bytes, ...]:
        replica = self.journal.keeping.replicas.get(run.id)
        if replica is None and not run.keepers:  # it is over, and was not read from its journal
            run.keepers = self.journal.keepers(run.id)
        return replica.keepers if replica is not None else run.keepers

    def risk(self, run: Run) -> str:
        """What one failure would cost, in words."""
        return risk(self.journal.keeping.places(self.keepers(run)))

    def now(self) -> float:
        """On the wall clock."""
        return self._clock()

    def active(self) -> list[Run]:
        return list(self._active.values())

    # ----------------------------------------------------------------- inputs

    def _bring_inputs(self, run: Run) -> None:
        _, staging = self._stages.get(run.id, (None, None))
        if run.unstaged and (staging is None or staging.done()):
            stage = Stage(run, self._blobs, self._transfer, self._storage, self._rng)
            self._stages[run.id] = (stage, self._spawn(self._stage(run, stage)))

    async def _stage(self, run: Run, stage: Stage) -> None:
        """Bring the workflow's inputs into this peer's blobs, as they come."""
        async for files, failed in stage.bring():
            if run.over:
                break
            rows = await self._copies.staged(run, files)
            if self._active.get(run.id) is not run:
                break
            said = InputsStaged(files=tuple(rows), failed=tuple(failed))
            self._write(run, said, then=partial(self._staged, run, said))
            for name, reason in failed:
                doomed = [t for t in run.workflow.tasks.values() if name in t.inputs]
                for task in doomed:
                    self._fail(run, task.id, f"input {name}: {reason}")
            self._conclude(run)

    def _staged(self, run: Run, said: InputsStaged) -> None:
        run.counts_now(said)
        if self._active.get(run.id) is run:
            self._place_ready(run)

    def blob_arrived(self, hash: bytes) -> None:
        for stage, _ in self._stages.values():
            stage.arrived.set()

    # ----------------------------------------------------------------- placing

    def _place_ready(self, run: Run, among: Iterable[TaskState] | None = None) -> None:
        if run.over or run.cancelling or self.closed or not self.given.settled:
            return
        units, gangs = [], []
        seen: set[tuple[str, ...]] = set()
        deadline = self._deadline(run)
        listed = run.ready() if among is None else list(among)
        if len(listed) > AT_ONCE_TASKS_MAX:  # the rest after others had their turn
            rest = listed[AT_ONCE_TASKS_MAX:]
            asyncio.get_running_loop().call_soon(self._place_rest, run, rest)
        for task in listed[:AT_ONCE_TASKS_MAX]:
            gang = run.workflow.tasks[task.id].gang
            if gang in seen:
                continue
            if gang:
                seen.add(gang)
                self._mend(run, gang)
            tied = [run.tasks[name] for name in gang] or [task]
            if not all(run.is_ready(t) and self._inputs_held(run, t) for t in tied):
                continue
            parts = [self._unit(run, t, deadline) for t in tied]
            if gang:
                gangs.append(_gang(parts))
            else:
                units += parts
            for t in tied:
                run.set_pending(t)
        if units:
            self.strategy(run).add(units)
        if gangs:
            self._strategies[Gangs.name].add(gangs)

    def _place_rest(self, run: Run, listed: list[TaskState]) -> None:
        if self._active.get(run.id) is run:
            self._place_ready(run, [t for t in listed if t.state == "waiting"])

    def _mend(self, run: Run, gang: tuple[str, ...]) -> None:
        """What runs at several peers at once runs at all of them, or at none."""
        self._do(run, mend(run, gang), counting=True)
        if not any(run.tasks[name].state == "pending" for name in gang):
            self._withdraw_gang(run, gang)

    def _mend_branch(self, run: Run, branch: str) -> None:
        found = mend_branch(run, branch)
        self._do(run, found, counting=False)
        keys = [_key(run, name, run.tasks[name].number + 1) for name in found.unplaced]
        if keys:
            self.strategy(run).withdraw(keys)
        again = [*found.unplaced, *(n for n, *_ in found.lost), *(n for n, _ in found.reopened)]
        for name in again:
            if run.tasks[name].state == "retrying":
                run._set(run.tasks[name], "waiting")
        self._place_ready(run, [run.tasks[name] for name in again])

    def _do(self, run: Run, found: Mending, counting: bool) -> None:
        """`counting`: what begins anew keeps its number of failures."""
        if found.skipped:
            self._write(run, TasksSkipped(tasks=tuple(found.skipped)))
            for name, _, _ in found.skipped:
                self._skip_behind(run, name)
        if found.lost:
            self._write(run, AttemptsLost(attempts=tuple(found.lost)))
        if found.reopened:
            gang = True if counting else None
            self._write(run, TasksReopened(tasks=tuple(found.reopened), gang=gang))
        for name in found.unplaced:
            run.unplace(run.tasks[name])
        for name, number, peer in found.running:
            self._abort_at(run, peer, [_key(run, name, number)])

    def _withdraw_gang(self, run: Run, gang: tuple[str, ...]) -> None:
        keys = [_key(run, name, run.tasks[name].number + 1) for name in gang]
        self._strategies[Gangs.name].withdraw(keys)

    def _mend_those(self, run: Run, names: Iterable[str]) -> None:
        tasks = run.workflow.tasks
        names = list(names)
        for gang in dict.fromkeys(tasks[name].gang for name in names):
            if gang:
                self._mend(run, gang)
        for branch in dict.fromkeys(tasks[name].branch for name in names):
            if branch:
                self._mend_branch(run, branch)

    def _unit(self, run: Run, task: TaskState, deadline: float | None) -> Unit:
        avoid: frozenset[bytes] = frozenset()
        if task.attempts:
            avoid = frozenset(
                a.peer
                for a in task.attempts
                if a.state in ("failed", "lost") or (a.state == "returned" and _began(a))
            )
        return Unit(
            AttemptKey(run.id, task.id, task.number + 1),
            wire_needs(run.needs(task.id)),
            run.ranks[task.id],
            run.workflow.tasks[task.id].runtime_s,
            deadline,
            avoid,
            self._near(run, run.workflow.tasks[task.id]),
            reads_of(filter(None, map(run.file, run.workflow.tasks[task.id].inputs))),
            run.workflow.rank,
            run.owner,
        )

    def _near(self, run: Run, task: Task) -> frozenset[bytes]:
        """The peers that hold most of what it reads, if that is worth a thought."""
        held: Counter[bytes] = Counter()
        for name in task.inputs:
            file = run.file(name)
            if file is not None and file.size >= self.near_bytes_min:
                held.update(dict.fromkeys(file.holders, file.size))
        most = max(held.values(), default=0)
        return frozenset(peer for peer, size in held.items() if 2 * size > most)

    def _deadline(self, run: Run) -> float | None:
        at = deadline_at(run)
        if at is None:
            return None
        return asyncio.get_running_loop().time() + (at - self._clock())

    def _inputs_held(self, run: Run, task: TaskState) -> bool:
        """True if some peer here holds each input; else their makers run again."""
        spec = run.workflow.tasks[task.id]
        if not spec.inputs and not spec.references:
            return True
        if self._stage_again(run, spec.inputs):
            return False
        lost: dict[str, str] = {}
        files = [(run.workflow.producers.get(name), run.file(name)) for name in spec.inputs]
        for ref in spec.references.values():
            for name in ref.tasks:
                value = run.value(name)
                if value is not None and value.file is not None:
                    files.append((name, value.file))
        for maker, file in files:
            if file is not None and maker is not None and not self._held_somewhere(file):
                lost[maker] = f"{file.name} was lost with the only peer that held it"
        if not lost:
            return True
        self._reopen(run, [(m, why) for m, why in lost.items() if run.tasks[m].state == WON])
        return False

    def placed(self, batch: list[Placed]) -> None:
        """From a strategy: leases for units. Journal who got what, then tell the peers."""
        by_run: dict[str, list[Placed]] = defaultdict(list)
        stale: dict[bytes, tuple[Contact, list[int]]] = {}
        for one in batch:
            if all(map(self._is_pending, one.unit.gang or (one.unit.key,))):
                by_run[one.unit.key.workflow].append(one)
            else:
                stale.setdefault(one.peer.id, (one.peer, []))[1].append(one.lease)
        for contact, leases in stale.values():
            self._rpc.tell(contact, ReturnLeases(leases=tuple(leases)))
        for id, rows in by_run.items():
            run = self._active[id]
            by_placement: dict[int, tuple[Placement, list[StartedAttempt]]] = {}
            for one in rows:
                member = self._members.get(one.peer.id)
                boot = member.boot if member else 0
                key = one.unit.key
                entry = by_placement.setdefault(_identity(one.placement), (one.placement, []))
                entry[1].append(StartedAttempt(key.task, key.number, one.peer.id, boot))
            for placement, attempts in by_placement.values():
                here = all(peer == self._rpc.me.id for _, _, peer, _ in attempts)
                said = AttemptsStarted(placement=placement.to_row(), attempts=tuple(attempts))
                self._write(run, said, soon=here)
            for one in rows:
                self.given.add(one.peer.id, one.unit.key)
            me = self._rpc.me.id
            away = [one for one in rows if one.peer.id != me]
            if len(away) < len(rows):
                self._dispatch.here(run, [one for one in rows if one.peer.id == me])
            if away:
                self.given.on_the_way.update(one.unit.key for one in away)
                self._spawn(self._dispatch.away(run, away))

    def _is_pending(self, key: AttemptKey) -> bool:
        run = self._active.get(key.workflow)
        task = run.tasks.get(key.task) if run else None
        return task is not None and task.state == "pending" and key.number > task.number

    def _make_work(self, run: Run, one: Placed) -> Work | None:
        """None if it is not wanted any more, or can't be put into a message."""
        key = one.unit.key
        if not self._wanted(run, key):
            return None
        if run.tasks[key.task].missing:
            # While `started` was on its way to the keepers, a peer died with what this reads: what
            # its maker makes now does not count yet, and may be another file.
            self._lost([(key, "what it reads is made again")], begun=False)
            return None
        try:
            return self._work(run, one)
        except LookupError as error:  # a file it needs was lost this very moment
            self._lost([(key, str(error))], begun=False)
        except Exception as error:
            log.exception("%s can't be sent", key)
            self._fail(run, key.task, f"it can't be sent to a peer: {error}"[:1000])
            self._conclude(run)
        return None

    def _too_large(self, run: Run, tasks: list[str], reason: str) -> None:
        for task in tasks:
            self._fail(run, task, reason)
        self._conclude(run)

    def _fenced(self, run: Run) -> None:
        self._spawn(self.twins.look(run))

    def _is_mine(self, run: Run) -> bool:
        return self._active.get(run.id) is run

    def _wanted(self, run: Run, key: AttemptKey) -> bool:
        task = run.tasks[key.task]
        attempt = task.attempt(key.number)
        alive = attempt is not None and attempt.state == "running"
        return self._is_mine(run) and alive and task.state not in FINAL and not run.over

    def _work(self, run: Run, one: Placed) -> Work:
        work = make_work(run, one, self.estimate(one.unit), self.held_too)
        if one.unit.gang:
            others = self._company.environment(run, one.unit)
            work = work._replace(env=(*work.env, *others), gang=True)
        # what goes to another peer must be what it can read; this one takes it as it is
        return work if one.peer.id == self._rpc.me.id else CHECKED_WORK.validate_python(work)

    def called(self, peer: bytes) -> str:
        """To users."""
        return peer.hex()

    def held_too(self, file: File) -> File:
        """With this peer among the holders, if it is one."""
        me = self._rpc.me.id
        if file.hash in self._blobs and me not in file.holders:
            return file._replace(holders=(*file.holders, me))
        return file

    # ----------------------------------------------------------------- outcomes

    async def _report(self, sender: Contact, message: Report) -> Reported:
        by_run: dict[str, list[Outcome]] = defaultdict(list)
        unknown: list[AttemptKey] = []
        moved: dict[str, bytes] = {}
        relayed: list[Outcome] = []
        faulty: set[str] = set()  # none of these is acknowledged: they are told again
        for ended in message.outcomes:
            id = ended.key.workflow
            if is_queued(id):
                relayed.append(ended)
                continue
            self._heard_of(sender.id, ended)
            if self.knows(id):  # elected, but not in office yet, is not enough
                by_run[id].append(ended)
            elif (home := self.journal.keeping.follows(id)) is not None:
                moved[id] = home
            else:
                unknown.append(ended.key)
        for outcomes in by_run.values():
            for ended in outcomes:
                await self._take_enclosed(ended)
        for id, outcomes in by_run.items():
            run = self._active.get(id)
            if run is not None:
                known = [e for e in outcomes if e.key.task in run.tasks]
                if run.gangs:
                    known = await asyncio.gather(*(self._company.judged(run, e) for e in known))
                if self._active.get(id) is run and not self._taken(run, sender.id, known):
                    faulty.add(id)
        for strategy in self._strategies.values():
            strategy.vacancy(sender.id, message.free)
        for id in faulty:
            del by_run[id]
        counted = await asyncio.gather(*map(self._counts_now, by_run))
        kept = [
            ended.key
            for counts, outcomes in zip(counted, by_run.values(), strict=True)
            if counts
            for ended in outcomes
        ]
        if relayed:
            found = await self.relay(sender.id, relayed)
            kept += found.kept
            unknown += found.unknown
            moved.update(found.moved)
        return Reported(kept=tuple(kept), unknown=tuple(unknown), moved=tuple(moved.items()))

    def _still_wanted(self, sender: Contact, message: StillWanted) -> Wanted:
        unwanted: list[AttemptKey] = []
        unknown: list[AttemptKey] = []
        for key, epoch in message.attempts:
            run = self._active.get(key.workflow)
            if run is None:
                (unwanted if self.knows(key.workflow) else unknown).append(key)
                continue
            task = run.tasks.get(key.task)
            attempt = task.attempt(key.number) if task is not None else None
            if (
                attempt is None
                or attempt.state != "running"
                or (attempt.peer, attempt.epoch) != (sender.id, epoch)
            ):
                unwanted.append(key)
        return Wanted(unwanted=tuple(unwanted), unknown=tuple(unknown))

    async def _still_held(self, sender: Contact, message: StillHeld) -> Unheld:
        """Only the home can say, and only of what counts: another home might undo the rest."""
        id = message.workflow
        elsewhere = self.still_held_elsewhere
        if is_queued(id) and not self.knows(id) and elsewhere is not None:
            return await elsewhere(message)
        run = self._active.get(id) or await self.get(id)
        found = run.unwanted(message.hashes) if run is not None else []
        if run is None or (not run.over and not await self._counts_now(id)):
            raise Refused("moved", "its home is elsewhere")
        return Unheld(hashes=tuple(found))

    async def _counts_now(self, id: str) -> bool:
        """All that was written of it so far counts; False if that can't be said soon."""
        try:
            async with asyncio.timeout(COUNT_S_MAX):
                await self.journal.kept(id)
        except (TimeoutError, Deposed):
            return False
        return True

    def take_own(self, ended: Outcome) -> bool:
        """From this very peer, on the spot: there is nobody to acknowledge it to.

        False: its home is elsewhere by now."""
        me = self._rpc.me.id
        id = ended.key.workflow
        self._heard_of(me, ended)
        run = self._active.get(id)
        if run is not None and ended.key.task in run.tasks:
            if ended.kind == "failed" and run.workflow.tasks[ended.key.task].gang:
                self._spawn(self._take_judged(run, ended))
            else:
                return self._taken(run, me, [ended])
        return run is not None or self.knows(id)

    async def _take_judged(self, run: Run, ended: Outcome) -> None:
        judged = await self._company.judged(run, ended)
        if self._active.get(run.id) is run:
            self._taken(run, self._rpc.me.id, [judged])

    def _taken(self, run: Run, peer: bytes, outcomes: list[Outcome]) -> bool:
        """False: an error in the home. It is this workflow's, and no other has to bear it."""
        try:
            self._take(run, peer, outcomes)
        except Deposed:
            raise
        except Exception:
            self.counts["errors"] += 1
            log.exception("outcomes of %s can't be taken", run.id)
            return False
        return True

    def _heard_of(self, peer: bytes, ended: Outcome) -> None:
        """It need not be asked about any more; unless this is of an attempt that has its number by
        chance, as another home gave it: of its own the peer may know nothing."""
        run = self._active.get(ended.key.workflow)
        task = run.tasks.get(ended.key.task) if run else None
        attempt = task.attempt(ended.key.number) if task else None
        if attempt is None or attempt.epoch == ended.epoch:
            self.given.drop(peer, [ended.key])

    async def _take_enclosed(self, ended: Outcome) -> None:
        for hash, data in ended.enclosed:
            if hash not in self._blobs:
                try:
                    await self._blobs.put(data, ended.key.workflow)
                except BlobError as error:
                    log.warning("no room for a second copy of an output: %s", error)

    def _take(self, run: Run, peer: bytes, outcomes: list[Outcome]) -> None:
        """Those that count, in one entry."""
        rows = []
        changed: list[TaskState] = []
        memory: dict[str, int] = {}
        instead: list[str] = []
        rivals: set[str] = set()
        seen: set[str] = set()
        # a result first: beside a failure of another attempt it is what counts of the two
        for ended in sorted(outcomes, key=lambda ended: ended.kind != "ok"):
            task = run.tasks[ended.key.task]
            attempt = task.attempt(ended.key.number)
            stale = (
                attempt is None
                or (attempt.peer, attempt.epoch) != (peer, ended.epoch)  # of no journaled attempt
                or (attempt.state != "running" and ended.kind != "ok")
                # what was begun anew with its gang is of no use to that
                or (attempt.state != "running" and run.workflow.tasks[task.id].gang)
                or (run.workflow.tasks[task.id].branch and attempt.way != run.ways[task.id])
            )
            # after the first result, after a cancel, or for an attempt given up: ignored
            if task.state in FINAL or stale or task.id in seen:
                self.counts["ignored_outcomes"] += 1
                continue
            if ended.kind != "ok" and ended.key.number != task.number:
                self.counts["ignored_outcomes"] += 1
                continue
            seen.add(task.id)
            if ended.enclosed:
                held = tuple((h, b"") for h, _ in ended.enclosed if h in self._blobs)
                ended = ended._replace(enclosed=held)
            if task.state != "running" or len(task.attempts) > 1:
                rivals.add(task.id)
            verdict = run.verdict(ended)
            again = run.consider(ended)
            if again is not None:
                verdict = "retrying"
                ended = ended._replace(reason=f"{ended.reason}; {again.why}"[:REASON_MAX])
                if again.memory_bytes:
                    memory[task.id] = again.memory_bytes
                if again.instead:
                    instead.append(task.id)  # for all of its branch: once, see `Run._on_finished`
            if verdict == "returned" and ended.started_at and task.losses >= LOSSES_MAX:
                verdict = "failed"
            if verdict == "returned" and ended.cause == NO_ROOM and self._no_room(run, task, peer):
                verdict = "failed"
            rows.append(FinishedAttempt(ended, peer, verdict))
            changed.append(task)
        if not rows:
            return
        # what follows from a result begins when the result counts: another home might undo it
        wins = [
            (task, ended) for (ended, _, v), task in zip(rows, changed, strict=True) if v == WON
        ]
        said = AttemptsFinished(outcomes=tuple(rows))
        if memory or instead:
            said = AttemptsFinished(outcomes=tuple(rows), memory=memory, instead=tuple(instead))
        self._write(run, said, then=lambda: self._go_on(run, said, wins, rivals))
        for (ended, _, verdict), task in zip(rows, changed, strict=True):
            said_s = run.workflow.tasks[task.id].runtime_s
            if said_s is not None and ended.started_at:
                took_s = (ended.ended_at - ended.started_at) * ended.speed
                self._experience.observe(run.owner, said_s, max(0.0, took_s))
            self.counts[f"tasks_{verdict}"] += 1
            if verdict == "failed":
                self._skip_behind(run, task.id)
            elif verdict != WON:
                self._place_later(run, task)
        self._mend_those(run, [task.id for task in changed])
        self._conclude(run)

    def _no_room(self, run: Run, task: TaskState, peer: bytes) -> bool:
        """All who could run it have said that it is more than they have."""
        said = {a.peer for a in task.attempts if a.outcome and a.outcome.cause == NO_ROOM} | {peer}
        return self._could_run(run, task) <= said

    def _could_run(self, run: Run, task: TaskState) -> set[bytes]:
        needs = wire_needs(run.needs(task.id))
        here = self._members.here()
        return {m.contact.id for m in here if not unmet(m.capacity, m.traits, needs)}

    def _go_on(
        self,
        run: Run,
        said: AttemptsFinished,
        wins: list[tuple[TaskState, Outcome]],
        rivals: set[str],
    ) -> None:
        """Results that count now."""
        level = run.level
        run.counts_now(said)
        for task, ended in wins:
            if task.id in rivals and task.state == WON:
                self._drop_others(run, task, ended.key.number)
        self._keep_twice(run, [task for task, _ in wins])
        if self._active.get(run.id) is not run:
            return
        self._delivery.begin(run)
        if run.level > level:  # all that waited for that
            self._place_ready(run)
            return
        ready = {
            child: run.tasks[child]
            for task, _ in wins
            if task.state == WON
            for child in run.children[task.id]
            if not run.tasks[child].missing
        }
        self._place_ready(run, [t for t in ready.values() if t.state == "waiting"])

    def _keep_twice(self, run: Run, changed: list[TaskState]) -> None:
        self._copies.keep_twice(run, changed)

    def _copied(self, run: Run, rows: list[CopiedFile]) -> None:
        if self._active.get(run.id) is run:
            self._write(run, FilesCopied(files=tuple(rows)))

    async def _hand_on(self, sender: Contact, message: HandOn) -> HandedOn:
        done = await self.hand_on(sender.id, message.workflow, message.files)
        return HandedOn(hashes=tuple(done))

    async def hand_on(self, peer: bytes, id: str, files: tuple[File, ...]) -> list[bytes]:
        """That peer leaves: what it alone has of a workflow is copied to others. Those that are
        somewhere else then, or that nobody wants."""
        run = await self.get(id)
        if run is None:
            raise Refused("moved", "its home is elsewhere")
        counts = self.journal.is_over(id) or await self._counts_now(id)
        unwanted = set(run.unwanted(file.hash for file in files)) if counts else set()
        wanted = [file for file in files if file.hash not in unwanted]
        return [*unwanted, *await self._copies.hand_on(peer, run, wanted)]

    def _drop_others(self, run: Run, task: TaskState, winner: int) -> None:
        """Other attempts of a task that is done are of no use any more."""
        self._withdraw(run, [_key(run, task.id, task.number + 1)])
        for attempt in task.attempts:
            if attempt.number != winner and attempt.state == "running":
                self._abort_at(run, attempt.peer, [_key(run, task.id, attempt.number)])

    def _abort_at(self, run: Run, peer: bytes, keys: list[AttemptKey]) -> None:
        self.given.drop(peer, keys)
        contact = self._members.contact(peer)
        if contact is not None:
            self._spawn(self._dispatch.abort(contact, keys, (run.id, run.epoch)))

    def _place_later(self, run: Run, task: TaskState) -> None:
        tries = task.failures + task.losses + task.returns
        wait_s = min(RETRY_S_MAX, RETRY_S_MIN * 2 ** min(10, max(0, tries - 1)))
        if not task.failures and tries <= 2:
            wait_s = 0.0  # it was nobody's fault
        loop = asyncio.get_running_loop()
        loop.call_later(wait_s * (0.75 + self._rng.random() / 2), self._place_again, run, task)

    def _place_again(self, run: Run, task: TaskState) -> None:
        if self._active.get(run.id) is run and task.state == "retrying":
            run._set(task, "waiting")
            self._place_ready(run, [task])

    def _fail(self, run: Run, task: str, reason: str) -> None:
        if run.tasks[task].state not in FINAL:
            self._write(run, TasksSkipped(tasks=(SkippedTask(task, "failed", reason),)))
            self._skip_behind(run, task)
            self._mend_those(run, [task])

    def _skip_behind(self, run: Run, failed: str) -> None:
        why = f"it depends on {failed}, which failed"
        if run.levels:
            why = f"levels are strict, and {failed}, in one above, failed"
        doomed = tuple(SkippedTask(t, "skipped", why) for t in run.doomed_by(failed))
        if doomed:
            self._write(run, TasksSkipped(tasks=doomed))

    def _conclude(self, run: Run) -> None:
        found = None if run.over else run.conclusion()
        if found is None:
            return
        state, reason = found
        self._write(run, Ended(state=state, reason=reason))
        for gang in run.gangs:
            self._withdraw_gang(run, gang)
        self._active.pop(run.id, None)
        self._remember(run)
        _, staging = self._stages.pop(run.id, (None, None))
        if staging is not None and staging is not asyncio.current_task():
            staging.cancel()
        self.counts[f"workflows_{state}"] += 1
        if run.id in self._waiters:
            self._spawn(self._tell_end(run.id))

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
        return await self._counts_now(run.id)

    def _write(
        self,
        run: Run,
        said: Journaled,
        soon: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        if self._active.get(run.id) is not run:
            raise Deposed(run.id)
        at = self.journal.append(run.id, said, soon, then)
        run.apply(said, at, self.journal.keeping.epoch(run.id))

    # ----------------------------------------------------------------- cancelling

    async def cancel(self, id: str, reason: str) -> Run | None:
        run = await self.get(id)
        if run is None or run.over:
            return run
        self._cancel(run, reason)
        if not await self._counts_now(id):
            raise Deposed(id)  # or its keepers do not answer: it is not said to be cancelled
        return run

    def _cancel(self, run: Run, reason: str) -> None:
        running: dict[bytes, list[AttemptKey]] = defaultdict(list)
        pending = []
        for task in run.tasks.values():
            if task.state == "pending":
                pending.append(_key(run, task.id, task.number + 1))
            for attempt in task.attempts:
                if attempt.state == "running":
                    running[attempt.peer].append(_key(run, task.id, attempt.number))

        def end_them() -> None:
            for peer, keys in running.items():
                self._abort_at(run, peer, keys)

        self._withdraw(run, pending)
        self._write(run, CancelAsked(reason=reason), then=end_them)
        self._conclude(run)

    # ----------------------------------------------------------------- doubts

    def _vacancy(self, sender: Contact, message: Vacancy) -> None:
        self._heard_of_room(sender.id, message.free)

    def _heard_of_room(self, peer: bytes, free: Capacity) -> None:
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
                self._lost(lost)
            for run in self.active():
                self._reopen_lost(run, peer)
        elif old is not None and old.boot != new.boot:
            self.given.doubt(peer)  # it was started anew: ask what it still has
        elif new.state == State.SUSPECT:
            self._run_elsewhere(peer)
        if new.state == State.ALIVE and (old is None or old.state >= State.DEAD):
            for run in self.active():  # what waited for its files, or for its kind of peer
                self._place_ready(run)

    def _reopen_lost(self, run: Run, peer: bytes) -> None:
        """What only that peer had, and somebody will read, is made again now: not when its reader
        has found out."""
        lost: dict[str, str] = {}
        for name, maker in run.workflow.producers.items():
            if run.tasks[maker].state != WON or maker in lost:
                continue
            file = run.file(name)
            if file is None or peer not in file.holders or self._held_somewhere(file):
                continue
            if run.readers(name):
                lost[maker] = f"{name} was lost with the only peer that held it"
        for name in run.taken:
            value = run.value(name) if run.tasks[name].state == WON else None
            file = value.file if value is not None else None
            if file is None or peer not in file.holders or self._held_somewhere(file):
                continue
            if run.takers(name):
                lost[name] = "its value was lost with the only peer that held it"
        self._reopen(run, list(lost.items()))

    def _reopen(self, run: Run, again: list[tuple[str, str]]) -> None:
        if again:
            rows = tuple(ReopenedTask(maker, why) for maker, why in again)
            self._write(run, TasksReopened(tasks=rows))
            self.counts["reopened"] += len(again)
            self._mend_those(run, [m for m, _ in again])
            self._place_ready(run, [run.tasks[m] for m, _ in again])

    def _run_elsewhere(self, peer: bytes) -> None:
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
        self._lost(young, begun=False)

    def _speed_of(self, peer: bytes) -> float:
        member = self._members.get(peer)
        return max(1e-3, member.traits.speed) if member is not None else 1.0

    def _begin_beside(self, key: AttemptKey, why: str) -> None:
        """A second attempt, with the first left running: the first result wins."""
        self._lost([(key, why)], begun=False)

    def _lost(self, rows: list[tuple[AttemptKey, str]], begun: bool = True) -> None:
        """Attempts that will not report. Those that never began don't count against the task."""
        by_run: dict[str, list[LostAttempt]] = defaultdict(list)
        for key, reason in list(rows):
            run = self._active.get(key.workflow)
            task = run.tasks.get(key.task) if run else None
            attempt = task.attempt(key.number) if task else None
            if task is None or attempt is None or attempt.state != "running":
                continue
            if task.state in FINAL or task.number != key.number:
                continue
            verdict = "failed" if begun and task.losses >= LOSSES_MAX else "retrying"
            row = LostAttempt(key.task, key.number, reason, verdict, begun)
            by_run[key.workflow].append(row)
        self.given.drop_anywhere(key for key, _ in rows)
        for id, lost in by_run.items():
            run = self._active[id]
            self._write(run, AttemptsLost(attempts=tuple(lost)))
            self.counts["attempts_lost"] += len(lost)
            for name, _, _, verdict, _ in lost:
                if verdict == "failed":
                    self._skip_behind(run, name)
                else:
                    self._place_later(run, run.tasks[name])
            self._mend_those(run, [row.task for row in lost])
            self._conclude(run)

    def waiting_for(self, run: Run, task: TaskState) -> str:
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
        await self._copies.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_much(material: _Material) -> bool:
    _, (text, *_), entries = material
    return is_much(text) or len(entries) > AT_ONCE_TASKS_MAX


def _rebuilt(material: _Material) -> Run | None:
    id, (text, options, submitted_at, owner), rows = material
    try:
        workflow = read_document(text, options)
    except Exception:
        log.exception("the document of %s can't be read any more", id)
        return None
    run = Run(id, workflow, submitted_at, b"", owner)
    for row in rows:
        run.apply(row.said, row.at, row.epoch)
        run.counts_now(row.said)
    return run


#: `id` is a parameter's name in here
_identity = id


def _key(run: Run, task: str, number: int) -> AttemptKey:
    return AttemptKey(run.id, task, number)


def _began(attempt: AttemptState) -> bool:
    """It ran, or fetched what it reads; and was not just handed back."""
    return attempt.outcome is not None and attempt.outcome.started_at > 0


def _gang(parts: list[Unit]) -> Unit:
    """Units that are to run at once, as one."""
    return replace(
        parts[0],
        needs=max((part.needs for part in parts), key=lambda n: n.capacity.memory_bytes),
        avoid=frozenset().union(*(part.avoid for part in parts)),
        near=frozenset().union(*(part.near for part in parts)),
        gang=tuple(part.key for part in parts),
    )
