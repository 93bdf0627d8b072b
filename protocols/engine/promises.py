"""Promises of this home: asked for before a workflow is accepted, and kept afterwards.

Rules:
- A workflow is accepted with a promise only when each of its tasks has a slot. The promise is in
  the journal before the user hears of it, and its slots are confirmed after that: slots that are
  lost in between are found missing like all others.
- A slot that is lost is booked again: first its task alone, then all tasks that have not begun.
- A promise ends kept or broken, once, with what has cost most time as the cause.
- Another home finds the slots in the journal, and affirms them: they belong to the workflow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from valence.workflow.model import Source, Workflow
from valence.workflow.quantities import show_seconds
from valence.workflow.sequences import Graph, Slot

from ..capacity.bookings import LENGTH_EXTRA_S, LENGTH_FACTOR, length_here
from ..membership.members import Members, State
from ..strategies.base import BookedSlot, Plan, Planner, PlanRequest
from ..wire.entries import BookedTask, PromiseAtRisk, Promised, TasksBooked
from ..wire.messages import Member
from .lengths import Lengths
from .performer import Decide
from .promise import (
    OVERRUN,
    OVERRUN_SHARE,
    RemainingWork,
    Trouble,
    WorkflowPromise,
    due_of,
    spare_for_one_s,
    survives,
)
from .run import FINAL, Foreseen, Run, SlotsConfirmed, SlotsLost
from .runs import Runs
from .work import due_at, wire_needs

log = logging.getLogger("valence.promises")

LOOK_S = 0.5  # how often open promises are looked at
AFFIRM_S = 30.0
CONFIRM_S = 2.0  # until a slot that could not be confirmed is tried again
BOOK_AGAIN_S = 1.0  # between two tries to book what is missing
IMPROVE_S = 5.0  # between two tries to make up for lost time
PROMISED_TASKS_MAX = 20_000  # a plan is one journal entry, which a message must carry
PLANS_AT_ONCE = 4
WAITING_PLANS_MAX = 8  # of one owner
OFFER_S = 10.0
OFFERS_MAX = 100
OFFERS_OF_OWNER_MAX = 5
APART_S = 0.1
#: how fast files travel between peers, as plans assume
BYTES_PER_S = 50e6
#: what an end may be later than foreseen in an offer, as plans are made of times that pass
OFFER_MARGIN_S = 0.5
DEADLINE_MAX_S = 366 * 86400.0


class NotPromised(Exception):
    """There is no plan that meets the deadline."""

    def __init__(self, why: str, earliest_at: float | None, offer: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.earliest_at = earliest_at  # on the wall clock
        self.offer = offer  # accepts the earliest plan, for a while


class Unpromisable(Exception):
    """Nothing can be promised of this document, whatever its deadline."""

    def __init__(self, why: str, tasks: list[str]) -> None:
        super().__init__(why)
        self.why = why
        self.tasks = tasks  # those without a run time, if that is why


@dataclass(frozen=True, slots=True)
class Admitted:
    """A plan whose slots are held. Times are of the wall clock."""

    workflow: str  # the id that they are held for
    plan: Plan
    deadline_at: float
    entry: Promised


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan that was only looked at."""

    admitted: Admitted | None
    why: str  # the deadline can't be met; empty: it can


@dataclass(frozen=True, slots=True)
class _StandingOffer:
    owner: str
    name: str  # of the workflow
    document: bytes
    admitted: Admitted
    takes_s: float
    until: float


class Promises:
    def __init__(
        self,
        *,
        runs: Runs,
        members: Members,
        deciding: Decide,
        epoch: Callable[[str], int],
        clock: Callable[[], float],
        new_id: Callable[[], str],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        counts: Counter[str],
    ) -> None:
        self.planner: Planner | None = None
        self.lengths = Lengths()
        self._runs = runs
        self._members = members
        self._deciding = deciding
        self._epoch = epoch
        self._clock = clock
        self._new_id = new_id
        self._spawn = spawn
        self._counts = counts
        self._offers: OrderedDict[str, _StandingOffer] = OrderedDict()
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}  # of each owner, and its users
        self._places = asyncio.Semaphore(PLANS_AT_ONCE)
        self._some = asyncio.Event()
        self._affirm_at: dict[str, float] = {}
        self._booking: set[str] = set()  # workflows for which slots are being booked
        self._book_at: dict[str, float] = {}  # not again before
        members.listen(self._member_changed, at_stake=runs.active)

    # ----------------------------------------------------------------- before a submission

    def why_none(self, workflow: Workflow, owner: str) -> str:
        """Why nothing can be promised of a workflow; empty: something can."""
        if workflow.deadline is None:
            return "the document has no deadline"
        if self.planner is None:
            return "a task queue makes no promises"
        if workflow.strategy not in ("deadline", "auto"):
            return f"the strategy {workflow.strategy} makes none"
        if any(task.gang for task in workflow.tasks.values()):
            return "tasks that need several peers at once can't be promised yet"
        if workflow.strict:
            return "strict levels can't be promised yet"
        if len(workflow.tasks) > PROMISED_TASKS_MAX:
            return f"at most {PROMISED_TASKS_MAX:,} tasks can be promised"
        unknown = self._unknown(workflow, owner)
        if unknown:
            more = f" and {len(unknown) - 1} more tasks have" if len(unknown) > 1 else " has"
            return f"{unknown[0]}{more} no run time"
        return ""

    def _unknown(self, workflow: Workflow, owner: str) -> list[str]:
        """The tasks whose run time nobody knows."""
        return [
            name
            for name, spec in workflow.tasks.items()
            if self.lengths.of(owner, workflow.name, spec) is None
        ]

    def insist(self, workflow: Workflow, owner: str, why: str) -> None:
        """A document that names this strategy and a deadline wants a promise or nothing."""
        if workflow.strategy == "deadline" and workflow.deadline is not None:
            raise Unpromisable(why, self._unknown(workflow, owner))

    async def admit(
        self, workflow_id: str, workflow: Workflow, owner: str, document: bytes, accept: str = ""
    ) -> Admitted:
        """A plan with slots for all tasks; else raises `NotPromised`."""
        try:
            async with self._its_turn(owner):
                return await self._plan(workflow_id, workflow, owner, document, accept)
        except NotPromised:
            self._counts["promises_refused"] += 1
            raise

    @contextlib.asynccontextmanager
    async def _its_turn(self, owner: str) -> AsyncIterator[None]:
        """Planning takes a while: each owner has one plan made at a time, and all together few."""
        lock, users = self._turns.get(owner, (asyncio.Lock(), 0))
        if users > WAITING_PLANS_MAX:
            raise NotPromised("you have too many plans made at once; try again in a moment", None)
        self._turns[owner] = lock, users + 1
        try:
            async with lock, self._places:
                yield
        finally:
            lock, users = self._turns.pop(owner)
            if users > 1:
                self._turns[owner] = lock, users - 1

    async def trial(self, workflow_id: str, workflow: Workflow, owner: str) -> Trial:
        """The plan that it would get now. Nothing of it is kept, and no offer changes."""
        async with self._its_turn(owner):
            request, deadline = self._request_for(workflow_id, workflow, owner)
            assert self.planner is not None
            plan = await self.planner.plan(request)
            made, why = (plan, "") if isinstance(plan, Plan) else (plan.earliest, plan.why)
            if made is None:
                return Trial(None, why)
            admitted = self._admitted(request, made, deadline)
            self.release(admitted)
            return Trial(admitted, why)

    async def _plan(
        self, workflow_id: str, workflow: Workflow, owner: str, document: bytes, accept: str
    ) -> Admitted:
        accepted_s = self._accepted(accept, owner, document) if accept else None
        assert self.planner is not None
        earlier = [
            name
            for name, standing in self._offers.items()
            if standing.owner == owner and standing.name == workflow.name
        ]
        for name in earlier:  # their slots would stand in the way of the new plan
            self._withdraw_offer(name)
        if earlier:
            await self.planner.settle()
        request, deadline = self._request_for(workflow_id, workflow, owner, accepted_s)
        plan = await self.planner.plan(request)
        if isinstance(plan, Plan):
            return self._admitted(request, plan, deadline)
        if plan.earliest is None:
            raise NotPromised(plan.why, None)
        ends_at = self._wall(plan.earliest.ends_at) + request.spare_s + OFFER_MARGIN_S
        earliest = self._admitted(request, plan.earliest, max(deadline, ends_at))
        if workflow.promise.infeasible == "earliest":
            return earliest
        offer = self._offer(owner, workflow.name, document, earliest)
        raise NotPromised(plan.why, ends_at, offer)

    def _request_for(
        self, workflow_id: str, workflow: Workflow, owner: str, accepted_s: float | None = None
    ) -> tuple[PlanRequest, float]:
        """What to plan, and its deadline on the wall clock. `accepted_s`: from now, whatever the
        document says."""
        now, wall = self._now(), self._clock()
        deadline = due_at(workflow, wall) if accepted_s is None else wall + accepted_s
        assert deadline is not None
        deadline = min(deadline, wall + DEADLINE_MAX_S)
        graph = self.graph_of(workflow, owner)
        request = PlanRequest(
            workflow_id,
            owner,
            graph,
            {name: wire_needs(spec.needs) for name, spec in workflow.tasks.items()},
            {},
            now + deadline - wall,
            spare_for_one_s(graph) if workflow.promise.survive else 0.0,
        )
        return request, deadline

    def graph_of(self, workflow: Workflow, owner: str) -> Graph:
        """The whole workflow. Inputs whose size is known count with the time that they travel; the
        sizes of files that are yet to be made are not known."""
        sizes = {name: _known_bytes(source) for name, source in workflow.inputs.items()}
        lengths = {
            name: (self.lengths.of(owner, workflow.name, spec) or 0.0)
            + sum(sizes.get(file, 0) for file in spec.inputs) / BYTES_PER_S
            for name, spec in workflow.tasks.items()
        }
        return Graph.of(lengths, workflow.parents)

    def _admitted(self, request: PlanRequest, plan: Plan, deadline: float) -> Admitted:
        slots = {task: Slot(slot.start_at, slot.end_at) for task, slot in plan.slots.items()}
        due = self._now() + deadline - self._clock()
        survived = survives(request.graph, slots, self._now(), due, APART_S)
        entry = Promised(
            deadline_at=deadline,
            survives=int(survived),
            booked=self._rows(plan.slots, request.graph.lengths),
        )
        return Admitted(request.workflow, plan, deadline, entry)

    def _rows(
        self, slots: Mapping[str, BookedSlot], lengths: Mapping[str, float]
    ) -> tuple[BookedTask, ...]:
        return tuple(
            BookedTask(
                task, s.peer.id, s.lease, self._wall(s.start_at), self._wall(s.end_at),
                lengths[task],
            )
            for task, s in slots.items()
        )  # fmt: skip

    # ----------------------------------------------------------------- offers

    def _offer(self, owner: str, workflow: str, document: bytes, admitted: Admitted) -> str:
        """Keeps a plan for a while, in case its user accepts it."""
        self._forget_offers()
        own = [name for name, offer in self._offers.items() if offer.owner == owner]
        if len(own) >= OFFERS_OF_OWNER_MAX:
            self._withdraw_offer(own[0])
        if len(self._offers) >= OFFERS_MAX:
            self._withdraw_offer(next(iter(self._offers)))
        name = self._new_id()
        takes_s = admitted.deadline_at - self._clock()
        until = self._now() + OFFER_S
        if self.planner is not None:
            self.planner.renew(admitted.workflow, admitted.plan.slots.values())
        self._offers[name] = _StandingOffer(owner, workflow, document, admitted, takes_s, until)
        loop = asyncio.get_running_loop()
        loop.call_later(OFFER_S + 0.1, self._forget_offers)
        return name

    def _accepted(self, name: str, owner: str, document: bytes) -> float:
        """In how many seconds it will be done, as was offered. (The time in which its user made up
        his mind is not held against him: the plan begins now. Until now its slots were kept.)"""
        self._forget_offers()
        offer = self._offers.get(name)
        if offer is None or offer.owner != owner:
            gone = f"the offer {name} does not exist or has expired; submit again for a new one"
            raise NotPromised(gone, None)
        if offer.document != document:
            raise NotPromised(f"the offer {name} was made for another document", None)
        return offer.takes_s

    def _forget_offers(self) -> None:
        for name in [n for n, offer in self._offers.items() if offer.until <= self._now()]:
            self._withdraw_offer(name)

    def _withdraw_offer(self, name: str) -> None:
        self.release(self._offers.pop(name).admitted)

    def release(self, admitted: Admitted) -> None:
        """Its workflow was not accepted."""
        if self.planner is not None:
            self.planner.release(admitted.plan.slots.values())

    # ----------------------------------------------------------------- an accepted workflow

    def begin(self, run: Run) -> None:
        """It is accepted, or this peer is its home now."""
        if run.promise is not None and run.promise.is_open:
            self._affirm_at[run.id] = 0.0
            self._some.set()

    def book_missing(self, run: Run) -> None:
        """A task is ready and has no slot."""
        self._book_at.setdefault(run.id, 0.0)
        self._some.set()

    async def watch(self) -> None:
        """Looks after open promises; sleeps while there are none."""
        while True:
            await self._some.wait()
            for run in self._open():
                self._look(run)
            if not self._open():
                self._some.clear()
                self._affirm_at.clear()
                self._book_at.clear()
            await asyncio.sleep(LOOK_S)

    def _open(self) -> list[Run]:
        runs = self._runs.active.values()
        return [run for run in runs if run.promise is not None and run.promise.is_open]

    def _look(self, run: Run) -> None:
        promise = run.promise
        assert promise is not None
        now, wall = self._now(), self._clock()
        if wall > promise.deadline_at:
            with self._deciding(run) as decide:
                decide.break_promise(promise.worst(self._overrun(run, promise)))
            return
        self._drop_lost(run, promise)
        missing = self._missing(run, promise)
        self._foresee(run, promise)
        is_late = promise.ends_at > promise.deadline_at
        if missing or is_late:
            if now >= self._book_at.get(run.id, 0.0) and run.id not in self._booking:
                self._booking.add(run.id)
                self._book_at[run.id] = now + (BOOK_AGAIN_S if missing else IMPROVE_S)
                self._spawn(self._book_again(run, promise, missing))
        elif now >= self._affirm_at.get(run.id, 0.0):
            self._affirm_at[run.id] = now + (AFFIRM_S if promise.confirmed else CONFIRM_S)
            self._spawn(self._confirm(run, promise))

    # ----------------------------------------------------------------- slots

    def _drop_lost(self, run: Run, promise: WorkflowPromise) -> None:
        """Slots at peers that are gone."""
        for task, slot in list(promise.slots.items()):
            if not self._members.is_here(slot.peer) and run.tasks[task].state != "running":
                run.note(SlotsLost((task,)))

    def _missing(self, run: Run, promise: WorkflowPromise) -> list[str]:
        """Tasks that have not begun and have no slot."""
        return [
            task.id
            for task in run.tasks.values()
            if task.state not in FINAL and task.state != "running" and task.id not in promise.slots
        ]

    def _rest(self, run: Run, promise: WorkflowPromise, kept: bool) -> RemainingWork:
        """What is left to do. `kept`: with the slots of tasks that have not begun."""
        left = [task for task in run.tasks.values() if task.state not in FINAL]
        names = {task.id for task in left}
        lengths = {task.id: self._length_s(run, promise, task.id) for task in left}
        parents = {
            task.id: tuple(p for p in run.workflow.parents[task.id] if p in names) for task in left
        }
        slots: dict[str, Slot] = {}
        running = {task.id for task in left if task.state == "running"}
        offset = self._now() - self._clock()
        for task in left:
            row = promise.slots.get(task.id)
            if task.id in running:
                slots[task.id] = self._running_slot(run, task.id, lengths[task.id], row, offset)
            elif row is not None and kept:
                slots[task.id] = Slot(row.start_at + offset, row.end_at + offset)
        return RemainingWork(Graph.of(lengths, parents), slots, frozenset(running))

    def _length_s(self, run: Run, promise: WorkflowPromise, task: str) -> float:
        """As it was said when the promise was made, with the time that inputs travel which are
        known by now."""
        length_s = promise.lengths.get(task, 1.0)
        if run.tasks[task].state == "running":
            return length_s
        files = (run.file(name) for name in run.workflow.tasks[task].inputs)
        travelling = sum(file.size for file in files if file is not None) / BYTES_PER_S
        return max(length_s, (run.runtime_s(task) or 0.0) + travelling)

    def _running_slot(
        self, run: Run, task: str, length_s: float, row: BookedTask | None, offset: float
    ) -> Slot:
        """A task that was sent to its peer runs by the end of its slot; else it takes longer."""
        now = self._now()
        attempt = run.tasks[task].attempt(run.tasks[task].number)
        since = now if attempt is None else attempt.at + offset
        end = since + length_s * LENGTH_FACTOR + LENGTH_EXTRA_S
        if row is not None:
            end = max(end, row.end_at + offset)
        if end <= now:
            end = now + max(LENGTH_EXTRA_S, OVERRUN_SHARE * (now - since))
        return Slot(min(since, now), end)

    def _overrun(self, run: Run, promise: WorkflowPromise) -> Trouble | None:
        """The task that runs now and has exceeded its time most."""
        worst: Trouble | None = None
        for name, said_s in promise.lengths.items():
            task = run.tasks[name]
            attempt = task.attempt(task.number) if task.state == "running" else None
            row = promise.slots.get(name)
            if attempt is None or row is None:
                continue
            begun_at = max(attempt.at, min(row.start_at, self._clock()))
            took_s = self._clock() - begun_at
            over_s = took_s - length_here(said_s, 1.0)
            if over_s > (worst.cost_s if worst is not None else 0.0):
                said = f"was said to take {show_seconds(said_s)}"
                why = f"{name} has run for {show_seconds(took_s)}, and {said}"
                worst = Trouble(OVERRUN, why, over_s)
        return worst

    def _foresee(self, run: Run, promise: WorkflowPromise) -> None:
        """Notes when the workflow will end, and whether that is too late."""
        ends = self._rest(run, promise, kept=True).ends(self._now(), APART_S)
        last = max(ends, key=lambda task: ends[task], default="")
        run.note(Foreseen(self._wall(ends[last]) if last else self._clock()))
        late_s = promise.ends_at - promise.deadline_at
        why = ""
        if late_s > 0:
            trouble = promise.worst(self._overrun(run, promise))
            why = f"{last} is expected to end {show_seconds(late_s)} too late: {trouble.why}"
        if bool(why) != bool(promise.risk):
            with self._deciding(run) as decide:
                decide.write(PromiseAtRisk(ends_at=promise.ends_at, why=why))

    async def _book_again(self, run: Run, promise: WorkflowPromise, missing: list[str]) -> None:
        try:
            plan = await self._new_plan(run, promise, missing)
            if plan is not None:
                await self._take(run, promise, plan, missing)
        finally:
            self._booking.discard(run.id)

    async def _new_plan(
        self, run: Run, promise: WorkflowPromise, missing: list[str]
    ) -> Plan | None:
        """First for what is missing alone, if that is enough; then for all that has not begun."""
        assert self.planner is not None
        deadline_at = promise.deadline_at + self._now() - self._clock()
        if missing:
            plan = await self.planner.plan(self._request(run, promise, True, deadline_at))
            if isinstance(plan, Plan):
                return plan
            if plan.earliest is not None:
                self.planner.release(plan.earliest.slots.values())
        plan = await self.planner.plan(self._request(run, promise, False, deadline_at))
        if isinstance(plan, Plan):
            return plan
        early = plan.earliest
        if early is None:
            return None
        if not missing and self._wall(early.ends_at) > promise.ends_at - 1.0:
            self.planner.release(early.slots.values())
            return None  # it gains nothing
        return early

    def _request(
        self, run: Run, promise: WorkflowPromise, kept: bool, deadline_at: float
    ) -> PlanRequest:
        rest = self._rest(run, promise, kept)
        return PlanRequest(
            run.id,
            run.owner,
            rest.graph,
            {task: wire_needs(run.needs(task)) for task in rest.graph.lengths},
            rest.slots,
            deadline_at,
            avoid={
                task: frozenset(a.peer for a in run.tasks[task].attempts if a.state != "running")
                for task in rest.graph.lengths
                if run.tasks[task].attempts
            },
        )

    async def _take(
        self, run: Run, promise: WorkflowPromise, plan: Plan, missing: list[str]
    ) -> None:
        """The new slots are the promise's now, if they are still wanted."""
        assert self.planner is not None
        current = self._runs.is_active(run) and promise.is_open
        wanted = {
            task: slot
            for task, slot in plan.slots.items()
            if current and run.tasks[task].state not in FINAL
            and run.tasks[task].state != "running"
        }  # fmt: skip
        self.planner.release(slot for task, slot in plan.slots.items() if task not in wanted)
        if not wanted:
            return
        old = [self._slot(promise.slots[t]) for t in wanted if t in promise.slots]
        self.planner.release(slot for slot in old if slot is not None)
        why = promise.worst().why if missing else "to make up for lost time"
        with self._deciding(run) as decide:
            decide.book(TasksBooked(booked=self._rows(wanted, promise.lengths), why=why))
        self._counts["promises_rebooked"] += len(wanted)
        self._affirm_at[run.id] = 0.0
        await self._confirm(run, promise)

    def _slot(self, row: BookedTask) -> BookedSlot | None:
        contact = self._members.contact(row.peer)
        if contact is None:
            return None
        offset = self._now() - self._clock()
        return BookedSlot(contact, row.lease, row.start_at + offset, row.end_at + offset)

    async def _confirm(self, run: Run, promise: WorkflowPromise) -> None:
        """Has the peers write down their slots; slots that they do not have are lost."""
        assert self.planner is not None
        slots = {
            task: slot
            for task, row in promise.slots.items()
            if run.tasks[task].state != "running" and (slot := self._slot(row)) is not None
        }
        offset = self._now() - self._clock()
        taken = {task: Slot(slot.start_at, slot.end_at) for task, slot in slots.items()}
        graph = self._rest(run, promise, kept=True).graph
        inside = {task: slot for task, slot in taken.items() if task in graph.lengths}
        due = due_of(graph, inside, promise.deadline_at + offset, APART_S)
        asked = {task: slots[task] for task in due}
        lost, all_told = await self.planner.confirm(run.id, self._epoch(run.id), asked, due)
        if not self._runs.is_active(run):
            return
        run.note(SlotsConfirmed(all_told and not lost))
        if not promise.confirmed:
            soon = self._now() + CONFIRM_S
            self._affirm_at[run.id] = min(self._affirm_at.get(run.id, soon), soon)
        for task in lost:
            row = promise.slots.get(task)
            mine = row is not None and row.lease == asked[task].lease
            if mine and run.tasks[task].state != "running":
                run.note(SlotsLost((task,)))

    def ended(self, run: Run) -> None:
        """The workflow is over: its slots are free."""
        self.lengths.learn(run)
        self._affirm_at.pop(run.id, None)
        self._book_at.pop(run.id, None)
        if run.promise is None:
            return
        if self.planner is not None:
            slots = (self._slot(row) for row in run.promise.slots.values())
            self.planner.release([slot for slot in slots if slot is not None])

    def _member_changed(self, old: Member | None, new: Member) -> None:
        if new.state >= State.DEAD or (old is not None and old.boot != new.boot):
            for run in self._open():
                self._affirm_at[run.id] = 0.0  # what does that peer still have?
            self._some.set()

    def _wall(self, at: float) -> float:
        return at + self._clock() - self._now()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _known_bytes(source: Source) -> int:
    return int(source.value) if source.kind == "size" else 0


def never_in_time(why: str, earliest_at: float | None, now: float) -> str:
    """A refusal, in words."""
    text = f"the deadline can't be met: {why}"
    if earliest_at is not None and earliest_at < math.inf:
        text += f"; the earliest end is in {show_seconds(max(0.0, earliest_at - now))}"
    return text
