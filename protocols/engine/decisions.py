"""Decides what a workflow does next; its home performs that.

A decision reads its run and its surroundings, changes the run through `apply` and `note` alone, and
leaves effects (`effects`). It sends nothing, writes nothing and waits for nothing.

Rules:
- Every decision is in a journal entry before anybody is told of it.
- The first valid result of a task wins, whichever attempt it came from (`judge`).
- An attempt that was lost with its peer is no failure of its task, up to a limit.
- Whatever depends on a result begins once the result is committed: before that, another home might
  undo it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
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
    PromiseEnded,
    ReopenedTask,
    SkippedTask,
    StartedAttempt,
    TasksBooked,
    TasksReopened,
    TasksSkipped,
)
from ..wire.messages import AttemptKey, File, Outcome
from . import effects
from .alternatives import mend_branch
from .effects import CancelCounts, InputsCount, ResultsCount, WhenCommitted
from .gangs import Mending, mend
from .judge import LOSSES_MAX, WON, counts, judge
from .promise import CANCELLED, FAILED, Trouble
from .run import FINAL, AttemptState, Pending, Run, TaskState, WaitAgain
from .work import wire_needs

#: larger workflows are placed in parts, so that others have their turn
AT_ONCE_TASKS_MAX = 2000
RETRY_S_MIN, RETRY_S_MAX = 0.2, 10.0


class Surroundings(Protocol):
    """What a decision may ask about the world around its run."""

    def now(self) -> float:
        """The time of the wall clock."""

    def may_place(self) -> bool:
        """False if this peer is leaving, or does not know the other peers yet."""

    def holds(self, digest: bytes) -> bool:
        """True if this peer has that blob."""

    def is_me(self, peer: bytes) -> bool:
        """True if that is this peer."""

    def boot(self, peer: bytes) -> int:
        """When that peer was started, as far as this one knows."""

    def is_held(self, file: File | None) -> bool:
        """True if a reachable peer has the file, or one that may be back with it in a moment."""

    def could_run(self, run: Run, task: TaskState) -> set[bytes]:
        """The peers whose capacity suffices for the task."""

    def deadline_at(self, run: Run) -> float | None:
        """The workflow's deadline on the event loop's clock."""

    @property
    def near_bytes_min(self) -> int:
        """From this size on it is worth running a task where its file is."""


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
        """The key of the next attempt, for which a peer may be looked for now."""
        return self._key(task, self.run.tasks[task].number + 1)

    # ----------------------------------------------------------------- outcomes

    def take(self, peer: bytes, outcomes: Iterable[Outcome]) -> None:
        """Judges the outcomes that a peer has reported; those that count go into one entry."""
        run = self.run
        rows: list[FinishedAttempt] = []
        memory: dict[str, int] = {}
        instead: list[str] = []
        rivals: set[str] = set()
        for task, ended in self._that_count(peer, outcomes):
            if task.state != "running" or len(task.attempts) > 1:
                rivals.add(task.id)
            verdict = judge(run, peer, ended, lambda task: self._around.could_run(run, task))
            if verdict.reason != ended.reason:
                ended = ended._replace(reason=verdict.reason)
            if verdict.memory_bytes:
                memory[task.id] = verdict.memory_bytes
            if verdict.instead:
                instead.append(task.id)  # `Run` applies it to the whole branch, once
            rows.append(FinishedAttempt(ended, peer, verdict.state))
        if not rows:
            return
        said = _finished(rows, memory, instead)
        self.write(said, then=ResultsCount(said, _won(rows), frozenset(rivals)))
        for state, count in Counter(row.verdict for row in rows).items():
            self._do(effects.Count(f"tasks_{state}", count))
        for row in rows:
            self._follow_up(row)
        self.mend_those([row.outcome.key.task for row in rows])
        self.conclude()

    def _that_count(
        self, peer: bytes, outcomes: Iterable[Outcome]
    ) -> Iterator[tuple[TaskState, Outcome]]:
        """The first outcome that counts of each task. Results come before failures: if two attempts
        of a task have ended, its result counts."""
        seen: set[str] = set()
        for ended in sorted(outcomes, key=lambda ended: ended.kind != "ok"):
            task = self.run.tasks[ended.key.task]
            if task.id in seen or not counts(self.run, peer, ended):
                self._do(effects.Count("ignored_outcomes"))
                continue
            seen.add(task.id)
            if ended.enclosed:
                held = tuple((h, b"") for h, _ in ended.enclosed if self._around.holds(h))
                ended = ended._replace(enclosed=held)
            yield task, ended

    def _follow_up(self, row: FinishedAttempt) -> None:
        ended, task = row.outcome, self.run.tasks[row.outcome.key.task]
        said_s = self.run.workflow.tasks[task.id].runtime_s
        if said_s is not None and ended.started_at:
            took_s = (ended.ended_at - ended.started_at) * ended.speed
            self._do(effects.Observe(said_s, max(0.0, took_s)))
        if row.verdict == "failed":
            self._skip_behind(task.id)
        elif row.verdict != WON:
            self._place_later(task)

    def results_count(self, event: ResultsCount, is_home: bool) -> None:
        """A majority has the entry. `is_home`: this peer is still the home."""
        run = self.run
        level = run.level
        run.committed(event.said)
        for name, number in event.won:
            if name in event.rivals and run.tasks[name].state == WON:
                self._drop_others(run.tasks[name], number)
        if event.won:
            self._do(effects.KeepTwice(tuple(name for name, _ in event.won)))
        if not is_home:
            return
        self._do(effects.Deliver())
        if run.level > level:  # a level is done: everything of the next one may begin
            self.place_ready()
        else:
            self.place_ready(self._ready_after([name for name, _ in event.won]))

    def _ready_after(self, won: list[str]) -> list[TaskState]:
        """The tasks that wait for nothing any more, now that these have succeeded."""
        run = self.run
        complete = {
            child: run.tasks[child]
            for name in won
            if run.tasks[name].state == WON
            for child in run.children[name]
            if not run.tasks[child].missing
        }
        return [task for task in complete.values() if task.state == "waiting"]

    def _drop_others(self, task: TaskState, winner: int) -> None:
        """Ends the other attempts of a task that is done."""
        self._do(effects.Withdraw((self._next_key(task.id),)))
        for attempt in task.attempts:
            if attempt.number != winner and attempt.state == "running":
                self._do(effects.AbortAttempts(attempt.peer, (self._key(task.id, attempt.number),)))

    # ----------------------------------------------------------------- losses

    def lose(self, rows: Iterable[tuple[AttemptKey, str]], begun: bool) -> None:
        """Gives up attempts that will not report. Those that never began don't count against the
        task."""
        lost: list[LostAttempt] = []
        for key, reason in rows:
            task = self._running(key)
            if task is not None:
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

    def _running(self, key: AttemptKey) -> TaskState | None:
        """The task of this attempt, if it is the latest one and still running."""
        task = self.run.tasks.get(key.task)
        attempt = task.attempt(key.number) if task is not None else None
        if task is None or attempt is None or attempt.state != "running":
            return None
        return None if task.state in FINAL or task.number != key.number else task

    def reopen(self, again: list[tuple[str, str]]) -> None:
        """Runs tasks once more whose results are lost and still needed."""
        if again:
            rows = tuple(ReopenedTask(maker, why) for maker, why in again)
            self.write(TasksReopened(tasks=rows))
            self._do(effects.Count("reopened", len(again)))
            self.mend_those([maker for maker, _ in again])
            self.place_ready([self.run.tasks[maker] for maker, _ in again])

    def reopen_lost(self, peer: bytes) -> None:
        """That peer is gone. Files and values that only it had, and that a task will read, are made
        again now and not only when the task finds them missing."""
        run = self.run
        lost: dict[str, str] = {}
        for name, maker in run.workflow.producers.items():
            if run.tasks[maker].state != WON or maker in lost:
                continue
            if self._is_lost_with(peer, run.file(name)) and run.readers(name):
                lost[maker] = _lost_file(name)
        for name in run.taken:
            if self._is_lost_with(peer, self._value_file(name)) and run.takers(name):
                lost[name] = "every peer that held its value is gone; computing it again"
        self.reopen(list(lost.items()))

    def _value_file(self, task: str) -> File | None:
        value = self.run.value(task) if self.run.tasks[task].state == WON else None
        return value.file if value is not None else None

    def _is_lost_with(self, peer: bytes, file: File | None) -> bool:
        return file is not None and peer in file.holders and not self._around.is_held(file)

    def stage_again(self, names: Iterable[str]) -> bool:
        """Fetches inputs again that are lost with all their holders; True if there are any."""
        run = self.run
        gone = tuple(
            InputReason(name, "every peer that held it is gone; fetching it again")
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

    def inputs_count(self, event: InputsCount, is_home: bool) -> None:
        self.run.committed(event.said)
        if is_home:
            self.place_ready()

    # ----------------------------------------------------------------- placing

    def place_ready(self, among: Iterable[TaskState] | None = None) -> None:
        """Places the tasks that are ready, of these or of all."""
        if not self._may_place():
            return
        units: list[Unit] = []
        gangs: list[Unit] = []
        listed = self.run.ready() if among is None else list(among)
        if len(listed) > AT_ONCE_TASKS_MAX:
            self._do(effects.PlaceRest(tuple(task.id for task in listed[AT_ONCE_TASKS_MAX:])))
        for unit in self._units(listed[:AT_ONCE_TASKS_MAX]):
            (gangs if unit.gang else units).append(unit)
        if units or gangs:
            self._do(effects.Place(tuple(units), tuple(gangs)))

    def _may_place(self) -> bool:
        return not self.run.over and not self.run.cancelling and self._around.may_place()

    def _units(self, tasks: list[TaskState]) -> Iterator[Unit]:
        run = self.run
        deadline = self._around.deadline_at(run)
        for gang, together in self._together(tasks):
            if self._lacks_slot(together[0]):
                self._do(effects.BookMissing())
                continue
            if not all(map(self._may_begin, together)):
                continue
            parts = [self._unit(t, deadline) for t in together]
            run.note(Pending(gang or (parts[0].key.task,)))
            yield _gang(parts) if gang else parts[0]

    def _lacks_slot(self, task: TaskState) -> bool:
        """It was promised a slot and has lost it: it gets another one first."""
        promise = self.run.promise
        return promise is not None and promise.is_open and task.id not in promise.slots

    def _may_begin(self, task: TaskState) -> bool:
        return self.run.is_ready(task) and self._inputs_held(task)

    def _together(
        self, tasks: list[TaskState]
    ) -> Iterator[tuple[tuple[str, ...], list[TaskState]]]:
        """Each task with the rest of its gang, and each gang once. A gang is mended first."""
        seen: set[tuple[str, ...]] = set()
        for task in tasks:
            gang = self.run.workflow.tasks[task.id].gang
            if gang in seen:
                continue
            if gang:
                seen.add(gang)
                self._mend(gang)
            yield gang, [self.run.tasks[name] for name in gang] if gang else [task]

    def start(self, placed: list[Placed]) -> None:
        """Starts units that have a lease. Before they begin, the journal says where each runs."""
        by_placement: dict[int, tuple[Placement, list[StartedAttempt]]] = {}
        boots = {peer: self._around.boot(peer) for peer in {one.peer.id for one in placed}}
        for unit, peer, _, placement in placed:
            entry = by_placement.setdefault(id(placement), (placement, []))
            key = unit.key
            entry[1].append(StartedAttempt(key.task, key.number, peer.id, boots[peer.id]))
        for placement, attempts in by_placement.values():
            all_here = all(map(self._around.is_me, {attempt.peer for attempt in attempts}))
            said = AttemptsStarted(placement=placement.to_row(), attempts=tuple(attempts))
            self.write(said, soon=all_here)
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
        slot = run.promise.slots.get(task.id) if run.promise is not None else None
        return Unit(
            self._next_key(task.id),
            wire_needs(run.needs(task.id)),
            run.ranks[task.id],
            spec.runtime_s,
            deadline,
            avoid,
            self._near(spec) if spec.inputs else frozenset(),
            reads_of(filter(None, map(run.file, spec.inputs))) if spec.inputs else (),
            run.workflow.rank,
            run.owner,
            booked=None if slot is None else (slot.peer, slot.lease),
        )

    def _near(self, task: Task) -> frozenset[bytes]:
        """The peers that hold most of the bytes that it reads, if the files are large enough."""
        held: Counter[bytes] = Counter()
        for name in task.inputs:
            file = self.run.file(name)
            if file is not None and file.size >= self._around.near_bytes_min:
                held.update(dict.fromkeys(file.holders, file.size))
        most = max(held.values(), default=0)
        return frozenset(peer for peer, size in held.items() if 2 * size > most)

    def _inputs_held(self, task: TaskState) -> bool:
        """True if each input is held by a reachable peer; else the tasks that made the lost ones
        run again."""
        run = self.run
        spec = run.workflow.tasks[task.id]
        if not spec.inputs and not spec.references:
            return True
        if self.stage_again(spec.inputs):
            return False
        lost = {
            maker: _lost_file(file.name)
            for maker, file in self._files_made_for(spec)
            if not self._around.is_held(file)
        }
        if not lost:
            return True
        self.reopen([(m, why) for m, why in lost.items() if run.tasks[m].state == WON])
        return False

    def _files_made_for(self, spec: Task) -> Iterator[tuple[str, File]]:
        """The files and values that other tasks have made for this one, each with its maker."""
        run = self.run
        for name in spec.inputs:
            maker, file = run.workflow.producers.get(name), run.file(name)
            if maker is not None and file is not None:
                yield maker, file
        for ref in spec.references.values():
            for name in ref.tasks:
                value = run.value(name)
                if value is not None and value.file is not None:
                    yield name, value.file

    def _place_later(self, task: TaskState) -> None:
        tries = task.failures + task.losses + task.returns
        wait_s = min(RETRY_S_MAX, RETRY_S_MIN * 2 ** min(10, max(0, tries - 1)))
        if not task.failures and tries <= 2:
            wait_s = 0.0  # the task is not to blame
        self._do(effects.Retry(task.id, wait_s))

    def place_again(self, task: str) -> None:
        """Places a task again that has failed or was lost, and has waited long enough."""
        if self.run.tasks[task].state == "retrying":
            self.run.note(WaitAgain((task,)))
            self.place_ready([self.run.tasks[task]])

    # ----------------------------------------------------------------- promises

    def book(self, entry: TasksBooked) -> None:
        """Tasks have other slots; those that were about to be sent elsewhere are taken back."""
        run = self.run
        self.write(entry)
        tasks = [run.tasks[row.task] for row in entry.booked]
        pending = [task for task in tasks if task.state == "pending"]
        if pending:
            self._do(effects.Withdraw(tuple(self._next_key(task.id) for task in pending)))
            run.note(WaitAgain(tuple(task.id for task in pending)))
        self.place_ready([task for task in tasks if task.state == "waiting"])

    def break_promise(self, worst: Trouble) -> None:
        """The deadline has passed. What is left runs like any other work, or is given up."""
        promise = self.run.promise
        if promise is None or not promise.is_open:
            return
        self.write(PromiseEnded(kept=False, cause=worst.cause, why=worst.why))
        self._do(effects.Count("promises_broken"))
        if self.run.workflow.promise.on_broken == "cancel":
            self.cancel(f"its promise was broken: {worst.why}")
        else:
            self.place_ready()

    def _end_promise(self, state: str, reason: str) -> None:
        """The workflow is over: was its promise kept?"""
        promise = self.run.promise
        if promise is None or not promise.is_open:
            return
        if state == "succeeded" and self._around.now() <= promise.deadline_at:
            self.write(PromiseEnded(kept=True, cause="", why=""))
            self._do(effects.Count("promises_kept"))
            return
        cause, why = promise.worst().cause, promise.worst().why
        if state == "cancelled":
            cause, why = CANCELLED, reason
        elif state == "failed":
            cause, why = FAILED, reason
        self.write(PromiseEnded(kept=False, cause=cause, why=why))
        self._do(effects.Count("promises_broken"))

    # ----------------------------------------------------------------- gangs and branches

    def _mend(self, gang: tuple[str, ...]) -> None:
        """Sees to it that a gang runs at all its peers, or at none."""
        self._mended(mend(self.run, gang), counting=True)
        if not any(self.run.tasks[name].state == "pending" for name in gang):
            self.withdraw_gang(gang)

    def _mend_branch(self, branch: str) -> None:
        run = self.run
        mending = mend_branch(run, branch)
        self._mended(mending, counting=False)
        keys = tuple(map(self._next_key, mending.unplaced))
        if keys:
            self._do(effects.Withdraw(keys))
        again = [*mending.unplaced, *(row.task for row in mending.lost)]
        again += [row.task for row in mending.reopened]
        run.note(WaitAgain(tuple(name for name in again if run.tasks[name].state == "retrying")))
        self.place_ready([run.tasks[name] for name in again])

    def _mended(self, mending: Mending, counting: bool) -> None:
        """`counting`: tasks that start over keep their number of failures."""
        if mending.skipped:
            self.write(TasksSkipped(tasks=tuple(mending.skipped)))
            for row in mending.skipped:
                self._skip_behind(row.task)
        if mending.lost:
            self.write(AttemptsLost(attempts=tuple(mending.lost)))
        if mending.reopened:
            gang = True if counting else None
            self.write(TasksReopened(tasks=tuple(mending.reopened), gang=gang))
        self.run.note(WaitAgain(tuple(mending.unplaced)))
        for name, number, peer in mending.running:
            self._do(effects.AbortAttempts(peer, (self._key(name, number),)))

    def withdraw_gang(self, gang: tuple[str, ...]) -> None:
        self._do(effects.Withdraw(tuple(map(self._next_key, gang))))

    def mend_those(self, names: Iterable[str]) -> None:
        if not (self.run.gangs or self.run.branches):
            return
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
            why = f"levels are strict, and {failed}, of an earlier level, failed"
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
        """Attempts are ended once the cancel is committed: then no other home can miss it."""
        for abort in event.aborts:
            self._do(abort)

    def conclude(self) -> None:
        """Ends the workflow if everything is done."""
        conclusion = None if self.run.over else self.run.conclusion()
        if conclusion is None:
            return
        state, reason = conclusion
        self._end_promise(state, reason)
        self.write(Ended(state=state, reason=reason))
        for gang in self.run.gangs:
            self.withdraw_gang(gang)
        self._do(effects.Conclude(state))


def _finished(
    rows: list[FinishedAttempt], memory: dict[str, int], instead: list[str]
) -> AttemptsFinished:
    if memory or instead:
        return AttemptsFinished(outcomes=tuple(rows), memory=memory, instead=tuple(instead))
    return AttemptsFinished(outcomes=tuple(rows))


def _won(rows: list[FinishedAttempt]) -> tuple[tuple[str, int], ...]:
    return tuple((r.outcome.key.task, r.outcome.key.number) for r in rows if r.verdict == WON)


def _lost_file(name: str) -> str:
    return f"every peer that held {name} is gone; making it again"


def _began(attempt: AttemptState) -> bool:
    """True if it ran or fetched its inputs, and was not handed back before."""
    return attempt.outcome is not None and attempt.outcome.started_at > 0


def _gang(parts: list[Unit]) -> Unit:
    """Units that must run at the same time, as one unit."""
    return parts[0]._replace(
        needs=max((part.needs for part in parts), key=lambda n: n.capacity.memory_bytes),
        avoid=frozenset().union(*(part.avoid for part in parts)),
        near=frozenset().union(*(part.near for part in parts)),
        gang=tuple(part.key for part in parts),
    )
