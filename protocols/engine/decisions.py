"""What follows for a workflow from what has happened. Decided here, performed by its home.

A decision reads its run and the surroundings, changes the run through `apply` and `note` alone, and
leaves effects (`effects`). It sends nothing, writes nothing and waits for nothing.

Rules:
- Whatever is decided stands in an entry before it is told to anybody.
- The first result of a task that counts wins, whichever attempt it came from (`judge`).
- What can't be made out (a lost peer) does not count as the task's failure, up to a limit.
- What hangs on a result begins when that counts: another home might undo it before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from valence.workflow.model import Task

from ..strategies.base import Placed, Placement, Unit, reads_of
from ..wire.entries import (
    AttemptsFinished,
    AttemptsLost,
    AttemptsStarted,
    CancelAsked,
    Ended,
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
from ..wire.messages import AttemptKey, File, Outcome
from . import effects
from .alternatives import mend_branch
from .effects import CancelCounts, InputsCount, ResultsCount, WhenCommitted
from .gangs import Mending, mend
from .judge import LOSSES_MAX, WON, counts, judge
from .run import FINAL, AttemptState, Pending, Run, TaskState, WaitAgain
from .work import wire_needs

#: a larger workflow is placed in parts, so that others have their turn
AT_ONCE_TASKS_MAX = 2000
RETRY_S_MIN, RETRY_S_MAX = 0.2, 10.0


class Surroundings(Protocol):
    """What a decision may ask about the world."""

    def now(self) -> float:
        """On the wall clock."""

    def may_place(self) -> bool:
        """False: this peer leaves, or does not know the others yet."""

    def holds(self, hash: bytes) -> bool:
        """This very peer."""

    def is_me(self, peer: bytes) -> bool:
        """This very peer."""

    def boot(self, peer: bytes) -> int:
        """When that peer was started, as far as is known."""

    def is_held(self, file: File | None) -> bool:
        """Somebody who is here has it, or may be back with it in a moment."""

    def could_run(self, run: Run, task: TaskState) -> set[bytes]:
        """Whose capacity suffices."""

    def deadline_at(self, run: Run) -> float | None:
        """On the loop's clock."""

    @property
    def near_bytes_min(self) -> int:
        """Files from this size on are worth a way to who holds them."""


class Decision:
    def __init__(self, run: Run, around: Surroundings, epoch: int) -> None:
        self.run = run
        self.effects: list[effects.Effect] = []
        self._around = around
        self._epoch = epoch

    def write(self, said: Journaled, soon: bool = False, then: WhenCommitted | None = None) -> None:
        at = self._around.now()
        self.run.apply(said, at, self._epoch)
        self._do(effects.Append(said, at, soon, then))

    def _do(self, effect: effects.Effect) -> None:
        self.effects.append(effect)

    def _key(self, task: str, number: int) -> AttemptKey:
        return AttemptKey(self.run.id, task, number)

    def _next_key(self, task: str) -> AttemptKey:
        """Of the attempt for which room may be looked for now."""
        return self._key(task, self.run.tasks[task].number + 1)

    # ----------------------------------------------------------------- outcomes

    def take(self, peer: bytes, outcomes: Iterable[Outcome]) -> None:
        """Outcomes that a peer has reported: those that count, in one entry."""
        run = self.run
        rows: list[FinishedAttempt] = []
        memory: dict[str, int] = {}
        instead: list[str] = []
        rivals: set[str] = set()
        seen: set[str] = set()
        # a result first: beside a failure of another attempt it is what counts of the two
        for ended in sorted(outcomes, key=lambda ended: ended.kind != "ok"):
            task = run.tasks[ended.key.task]
            if task.id in seen or not counts(run, peer, ended):
                self._do(effects.Count("ignored_outcomes"))
                continue
            seen.add(task.id)
            if ended.enclosed:
                held = tuple((h, b"") for h, _ in ended.enclosed if self._around.holds(h))
                ended = ended._replace(enclosed=held)
            if task.state != "running" or len(task.attempts) > 1:
                rivals.add(task.id)
            verdict = judge(run, peer, ended, lambda task: self._around.could_run(run, task))
            if verdict.reason != ended.reason:
                ended = ended._replace(reason=verdict.reason)
            if verdict.memory_bytes:
                memory[task.id] = verdict.memory_bytes
            if verdict.instead:
                instead.append(task.id)  # for all of its branch, once: see `Run`
            rows.append(FinishedAttempt(ended, peer, verdict.state))
        if not rows:
            return
        if memory or instead:
            said = AttemptsFinished(outcomes=tuple(rows), memory=memory, instead=tuple(instead))
        else:
            said = AttemptsFinished(outcomes=tuple(rows))
        won = tuple((r.outcome.key.task, r.outcome.key.number) for r in rows if r.verdict == WON)
        self.write(said, then=ResultsCount(said, won, frozenset(rivals)))
        for row in rows:
            self._follow_up(row)
        self.mend_those([row.outcome.key.task for row in rows])
        self.conclude()

    def _follow_up(self, row: FinishedAttempt) -> None:
        ended, task = row.outcome, self.run.tasks[row.outcome.key.task]
        said_s = self.run.workflow.tasks[task.id].runtime_s
        if said_s is not None and ended.started_at:
            took_s = (ended.ended_at - ended.started_at) * ended.speed
            self._do(effects.Observe(said_s, max(0.0, took_s)))
        self._do(effects.Count(f"tasks_{row.verdict}"))
        if row.verdict == "failed":
            self._skip_behind(task.id)
        elif row.verdict != WON:
            self._place_later(task)

    def results_count(self, event: ResultsCount, mine: bool) -> None:
        """A majority has the entry. `mine`: this peer is still the home."""
        run = self.run
        level = run.level
        run.committed(event.said)
        for name, number in event.won:
            if name in event.rivals and run.tasks[name].state == WON:
                self._drop_others(run.tasks[name], number)
        if event.won:
            self._do(effects.KeepTwice(tuple(name for name, _ in event.won)))
        if not mine:
            return
        self._do(effects.Deliver())
        if run.level > level:  # all that waited for that
            self.place_ready()
            return
        ready = {
            child: run.tasks[child]
            for name, _ in event.won
            if run.tasks[name].state == WON
            for child in run.children[name]
            if not run.tasks[child].missing
        }
        self.place_ready([task for task in ready.values() if task.state == "waiting"])

    def _drop_others(self, task: TaskState, winner: int) -> None:
        """Other attempts of a task that is done are of no use any more."""
        self._do(effects.Withdraw((self._next_key(task.id),)))
        for attempt in task.attempts:
            if attempt.number != winner and attempt.state == "running":
                self._do(effects.AbortAttempts(attempt.peer, (self._key(task.id, attempt.number),)))

    # ----------------------------------------------------------------- what is lost

    def lose(self, rows: Iterable[tuple[AttemptKey, str]], begun: bool) -> None:
        """Attempts that will not report. Those that never began don't count against the task."""
        lost: list[LostAttempt] = []
        for key, reason in rows:
            task = self.run.tasks.get(key.task)
            attempt = task.attempt(key.number) if task is not None else None
            if task is None or attempt is None or attempt.state != "running":
                continue
            if task.state in FINAL or task.number != key.number:
                continue
            verdict = "failed" if begun and task.losses >= LOSSES_MAX else "retrying"
            lost.append(LostAttempt(key.task, key.number, reason, verdict, begun))
        if not lost:
            return
        self.write(AttemptsLost(attempts=tuple(lost)))
        self._do(effects.Count("attempts_lost", len(lost)))
        for row in lost:
            if row.verdict == "failed":
                self._skip_behind(row.task)
            else:
                self._place_later(self.run.tasks[row.task])
        self.mend_those([row.task for row in lost])
        self.conclude()

    def reopen(self, again: list[tuple[str, str]]) -> None:
        """Tasks whose results are gone, and needed: they run once more."""
        if again:
            rows = tuple(ReopenedTask(maker, why) for maker, why in again)
            self.write(TasksReopened(tasks=rows))
            self._do(effects.Count("reopened", len(again)))
            self.mend_those([maker for maker, _ in again])
            self.place_ready([self.run.tasks[maker] for maker, _ in again])

    def reopen_lost(self, peer: bytes) -> None:
        """That peer is gone. What only it had, and somebody will read, is made again now: not when
        its reader has found out."""
        run = self.run
        lost: dict[str, str] = {}
        for name, maker in run.workflow.producers.items():
            if run.tasks[maker].state != WON or maker in lost:
                continue
            file = run.file(name)
            if file is None or peer not in file.holders or self._around.is_held(file):
                continue
            if run.readers(name):
                lost[maker] = f"{name} was lost with the only peer that held it"
        for name in run.taken:
            value = run.value(name) if run.tasks[name].state == WON else None
            file = value.file if value is not None else None
            if file is None or peer not in file.holders or self._around.is_held(file):
                continue
            if run.takers(name):
                lost[name] = "its value was lost with the only peer that held it"
        self.reopen(list(lost.items()))

    def stage_again(self, names: Iterable[str]) -> bool:
        """Inputs that went with all who held them are brought in anew; True if there are any."""
        run = self.run
        gone = tuple(
            InputReason(name, "it was lost with the peers that held it, and is brought in again")
            for name in names
            if name in run.staged and not self._around.is_held(run.file(name))
        )
        if gone:
            self.write(InputsLost(files=gone))
            for gang in run.gangs:
                self._mend(gang)
            self._do(effects.BringInputs())
        return bool(gone)

    def staged(self, said: InputsStaged) -> None:
        self.write(said, then=InputsCount(said))
        for name, reason in said.failed:
            doomed = [task for task in self.run.workflow.tasks.values() if name in task.inputs]
            for task in doomed:
                self.fail(task.id, f"input {name}: {reason}")
        self.conclude()

    def inputs_count(self, event: InputsCount, mine: bool) -> None:
        self.run.committed(event.said)
        if mine:
            self.place_ready()

    # ----------------------------------------------------------------- placing

    def place_ready(self, among: Iterable[TaskState] | None = None) -> None:
        """Units of what is ready, of these or of all."""
        run = self.run
        if run.over or run.cancelling or not self._around.may_place():
            return
        units: list[Unit] = []
        gangs: list[Unit] = []
        seen: set[tuple[str, ...]] = set()
        deadline = self._around.deadline_at(run)
        listed = run.ready() if among is None else list(among)
        if len(listed) > AT_ONCE_TASKS_MAX:
            self._do(effects.PlaceRest(tuple(task.id for task in listed[AT_ONCE_TASKS_MAX:])))
        for task in listed[:AT_ONCE_TASKS_MAX]:
            gang = run.workflow.tasks[task.id].gang
            if gang in seen:
                continue
            if gang:
                seen.add(gang)
                self._mend(gang)
            tied = [run.tasks[name] for name in gang] or [task]
            if not all(run.is_ready(t) and self._inputs_held(t) for t in tied):
                continue
            parts = [self._unit(t, deadline) for t in tied]
            if gang:
                gangs.append(_gang(parts))
            else:
                units += parts
            run.note(Pending(tuple(t.id for t in tied)))
        if units or gangs:
            self._do(effects.Place(tuple(units), tuple(gangs)))

    def start(self, placed: list[Placed]) -> None:
        """Units for which room was found: who got what stands in the journal before they begin."""
        by_placement: dict[int, tuple[Placement, list[StartedAttempt]]] = {}
        for one in placed:
            peer, key = one.peer.id, one.unit.key
            entry = by_placement.setdefault(id(one.placement), (one.placement, []))
            entry[1].append(StartedAttempt(key.task, key.number, peer, self._around.boot(peer)))
        for placement, attempts in by_placement.values():
            here = all(self._around.is_me(attempt.peer) for attempt in attempts)
            said = AttemptsStarted(placement=placement.to_row(), attempts=tuple(attempts))
            self.write(said, soon=here)
        self._do(effects.Start(tuple(placed)))

    def _unit(self, task: TaskState, deadline: float | None) -> Unit:
        run = self.run
        avoid: frozenset[bytes] = frozenset()
        if task.attempts:
            avoid = frozenset(
                a.peer
                for a in task.attempts
                if a.state in ("failed", "lost") or (a.state == "returned" and _began(a))
            )
        spec = run.workflow.tasks[task.id]
        return Unit(
            self._next_key(task.id),
            wire_needs(run.needs(task.id)),
            run.ranks[task.id],
            spec.runtime_s,
            deadline,
            avoid,
            self._near(spec),
            reads_of(filter(None, map(run.file, spec.inputs))),
            run.workflow.rank,
            run.owner,
        )

    def _near(self, task: Task) -> frozenset[bytes]:
        """The peers that hold most of what it reads, if that is worth a thought."""
        held: Counter[bytes] = Counter()
        for name in task.inputs:
            file = self.run.file(name)
            if file is not None and file.size >= self._around.near_bytes_min:
                held.update(dict.fromkeys(file.holders, file.size))
        most = max(held.values(), default=0)
        return frozenset(peer for peer, size in held.items() if 2 * size > most)

    def _inputs_held(self, task: TaskState) -> bool:
        """True if some peer here holds each input; else their makers run again."""
        run = self.run
        spec = run.workflow.tasks[task.id]
        if not spec.inputs and not spec.references:
            return True
        if self.stage_again(spec.inputs):
            return False
        lost: dict[str, str] = {}
        files = [(run.workflow.producers.get(name), run.file(name)) for name in spec.inputs]
        for ref in spec.references.values():
            for name in ref.tasks:
                value = run.value(name)
                if value is not None and value.file is not None:
                    files.append((name, value.file))
        for maker, file in files:
            if file is not None and maker is not None and not self._around.is_held(file):
                lost[maker] = f"{file.name} was lost with the only peer that held it"
        if not lost:
            return True
        self.reopen([(m, why) for m, why in lost.items() if run.tasks[m].state == WON])
        return False

    def _place_later(self, task: TaskState) -> None:
        tries = task.failures + task.losses + task.returns
        wait_s = min(RETRY_S_MAX, RETRY_S_MIN * 2 ** min(10, max(0, tries - 1)))
        if not task.failures and tries <= 2:
            wait_s = 0.0  # it was nobody's fault
        self._do(effects.Retry(task.id, wait_s))

    def place_again(self, task: str) -> None:
        """A task that has failed, or was lost, has waited long enough."""
        if self.run.tasks[task].state == "retrying":
            self.run.note(WaitAgain((task,)))
            self.place_ready([self.run.tasks[task]])

    # ----------------------------------------------------------------- what belongs together

    def _mend(self, gang: tuple[str, ...]) -> None:
        """What runs at several peers at once runs at all of them, or at none."""
        self._mended(mend(self.run, gang), counting=True)
        if not any(self.run.tasks[name].state == "pending" for name in gang):
            self.withdraw_gang(gang)

    def _mend_branch(self, branch: str) -> None:
        run = self.run
        found = mend_branch(run, branch)
        self._mended(found, counting=False)
        keys = tuple(map(self._next_key, found.unplaced))
        if keys:
            self._do(effects.Withdraw(keys))
        again = [*found.unplaced, *(row.task for row in found.lost)]
        again += [row.task for row in found.reopened]
        run.note(WaitAgain(tuple(name for name in again if run.tasks[name].state == "retrying")))
        self.place_ready([run.tasks[name] for name in again])

    def _mended(self, found: Mending, counting: bool) -> None:
        """`counting`: what begins anew keeps its number of failures."""
        if found.skipped:
            self.write(TasksSkipped(tasks=tuple(found.skipped)))
            for row in found.skipped:
                self._skip_behind(row.task)
        if found.lost:
            self.write(AttemptsLost(attempts=tuple(found.lost)))
        if found.reopened:
            gang = True if counting else None
            self.write(TasksReopened(tasks=tuple(found.reopened), gang=gang))
        self.run.note(WaitAgain(tuple(found.unplaced)))
        for name, number, peer in found.running:
            self._do(effects.AbortAttempts(peer, (self._key(name, number),)))

    def withdraw_gang(self, gang: tuple[str, ...]) -> None:
        self._do(effects.Withdraw(tuple(map(self._next_key, gang))))

    def mend_those(self, names: Iterable[str]) -> None:
        tasks = self.run.workflow.tasks
        names = list(names)
        for gang in dict.fromkeys(tasks[name].gang for name in names):
            if gang:
                self._mend(gang)
        for branch in dict.fromkeys(tasks[name].branch for name in names):
            if branch:
                self._mend_branch(branch)

    # ----------------------------------------------------------------- ends

    def fail(self, task: str, reason: str) -> None:
        if self.run.tasks[task].state not in FINAL:
            self.write(TasksSkipped(tasks=(SkippedTask(task, "failed", reason),)))
            self._skip_behind(task)
            self.mend_those([task])

    def _skip_behind(self, failed: str) -> None:
        why = f"it depends on {failed}, which failed"
        if self.run.levels:
            why = f"levels are strict, and {failed}, in one above, failed"
        doomed = tuple(SkippedTask(t, "skipped", why) for t in self.run.doomed_by(failed))
        if doomed:
            self.write(TasksSkipped(tasks=doomed))

    def cancel(self, reason: str) -> None:
        running: dict[bytes, list[AttemptKey]] = defaultdict(list)
        pending: list[AttemptKey] = []
        for task in self.run.tasks.values():
            if task.state == "pending":
                pending.append(self._next_key(task.id))
            for attempt in task.attempts:
                if attempt.state == "running":
                    running[attempt.peer].append(self._key(task.id, attempt.number))
        aborts = tuple(effects.AbortAttempts(peer, tuple(keys)) for peer, keys in running.items())
        self._do(effects.Withdraw(tuple(pending)))
        self.write(CancelAsked(reason=reason), then=CancelCounts(aborts))
        self.conclude()

    def cancel_counts(self, event: CancelCounts) -> None:
        """What runs is ended when no other home can take the cancel for never said."""
        for abort in event.aborts:
            self._do(abort)

    def conclude(self) -> None:
        """If all is done."""
        found = None if self.run.over else self.run.conclusion()
        if found is None:
            return
        state, reason = found
        self.write(Ended(state=state, reason=reason))
        for gang in self.run.gangs:
            self.withdraw_gang(gang)
        self._do(effects.Conclude(state))


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
