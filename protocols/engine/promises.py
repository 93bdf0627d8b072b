"""The promises of this home: looked after until they end.

Rules:
- The slots of a promise are confirmed when it is in the journal; slots that are lost before that
  are found missing like all others.
- A slot that is lost is booked again: first its task alone, then all tasks that have not begun.
- A promise ends kept or broken, once, with what has cost most time as the cause.
- Another home finds the slots in the journal, and affirms them: they belong to the workflow.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from valence.workflow.quantities import show_seconds
from valence.workflow.sequences import Graph, Slot

from ..capacity.bookings import LENGTH_EXTRA_S, LENGTH_FACTOR, length_here
from ..membership.members import Members, State
from ..strategies.base import BookedSlot, Plan, Planner, PlanRequest
from ..wire.entries import BookedTask, PromiseAtRisk, TasksBooked
from ..wire.messages import Member
from .performer import Decide
from .planning import BYTES_PER_S, Planning
from .promise import (
    APART_S,
    OVERRUN,
    OVERRUN_SHARE,
    RemainingWork,
    Trouble,
    WorkflowPromise,
    due_of,
)
from .run import FINAL, Foreseen, Run, SlotsConfirmed, SlotsLost
from .runs import Runs
from .work import wire_needs

LOOK_S = 0.5  # how often open promises are looked at
AFFIRM_S = 30.0
CONFIRM_S = 2.0  # until a slot that could not be confirmed is tried again
BOOK_AGAIN_S = 1.0  # between two tries to book what is missing
IMPROVE_S = 5.0  # between two tries to make up for lost time


class Promises:
    def __init__(
        self,
        *,
        planning: Planning,
        runs: Runs,
        members: Members,
        deciding: Decide,
        epoch: Callable[[str], int],
        clock: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        counts: Counter[str],
    ) -> None:
        self._planning = planning
        self._runs = runs
        self._members = members
        self._deciding = deciding
        self._epoch = epoch
        self._clock = clock
        self._spawn = spawn
        self._counts = counts
        self._some = asyncio.Event()
        self._affirm_at: dict[str, float] = {}
        self._booking: set[str] = set()  # workflows for which slots are being booked
        self._book_at: dict[str, float] = {}  # not again before
        members.listen(self._member_changed, at_stake=runs.active)

    @property
    def _planner(self) -> Planner:
        planner = self._planning.planner
        assert planner is not None, "without one nothing is promised"
        return planner

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
        deadline_at = promise.deadline_at + self._now() - self._clock()
        if missing:
            plan = await self._planner.plan(self._request(run, promise, True, deadline_at))
            if isinstance(plan, Plan):
                return plan
            if plan.earliest is not None:
                self._planner.release(plan.earliest.slots.values())
        plan = await self._planner.plan(self._request(run, promise, False, deadline_at))
        if isinstance(plan, Plan):
            return plan
        early = plan.earliest
        if early is None:
            return None
        if not missing and self._wall(early.ends_at) > promise.ends_at - 1.0:
            self._planner.release(early.slots.values())
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
        current = self._runs.is_active(run) and promise.is_open
        wanted = {
            task: slot
            for task, slot in plan.slots.items()
            if current and run.tasks[task].state not in FINAL
            and run.tasks[task].state != "running"
        }  # fmt: skip
        self._planner.release(slot for task, slot in plan.slots.items() if task not in wanted)
        if not wanted:
            return
        old = [self._slot(promise.slots[t]) for t in wanted if t in promise.slots]
        self._planner.release(slot for slot in old if slot is not None)
        why = promise.worst().why if missing else "to make up for lost time"
        with self._deciding(run) as decide:
            decide.book(TasksBooked(booked=self._planning.rows(wanted, promise.lengths), why=why))
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
        lost, all_told = await self._planner.confirm(run.id, self._epoch(run.id), asked, due)
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
        self._planning.lengths.learn(run)
        self._affirm_at.pop(run.id, None)
        self._book_at.pop(run.id, None)
        if run.promise is None:
            return
        if self._planning.planner is not None:
            slots = (self._slot(row) for row in run.promise.slots.values())
            self._planner.release([slot for slot in slots if slot is not None])

    def _member_changed(self, old: Member | None, new: Member) -> None:
        if new.state >= State.DEAD or (old is not None and old.boot != new.boot):
            for run in self._open():
                self._affirm_at[run.id] = 0.0  # what does that peer still have?
            self._some.set()

    def _wall(self, at: float) -> float:
        return at + self._clock() - self._now()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
