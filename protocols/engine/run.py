"""The state of one workflow, rebuilt from its journal entry by entry. Pure.

Three methods change it, and nothing else does:

- `apply`, with an entry: when the entry is new, and again when another home reads it. The state is
  exactly what is on disk. Decisions (retry, fail, skip) are made before an entry is written and are
  part of it (`decisions`).
- `committed`, when a majority has that entry: only then do the tasks that depend on it get ready.
- `note`, with facts that are not journaled, because another home finds them out by itself.

A task is `waiting` (for inputs), `pending` (ready, being placed), `running` (given to a peer),
`retrying` (failed, will be placed again), or for good `succeeded`, `failed`, `skipped` or
`cancelled`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from valence.workflow.model import Task, TaskNeeds, Workflow
from valence.workflow.plan import levels, upward_ranks
from valence.workflow.quantities import show_seconds

from ..capacity.bookings import length_here
from ..wire.entries import (
    AttemptsFinished,
    AttemptsLost,
    AttemptsStarted,
    CancelAsked,
    DocumentPart,
    Ended,
    FilesCopied,
    FilesDelivered,
    HomeElected,
    HomeForced,
    InputsLost,
    InputsStaged,
    Journaled,
    KeepersChosen,
    PromiseAtRisk,
    Promised,
    PromiseEnded,
    Submitted,
    TasksBooked,
    TasksReopened,
    TasksSkipped,
)
from ..wire.messages import File, Outcome, Value
from .outcomes import MADE_WAY_CAUSE
from .policies import Again, Policies
from .promise import (
    BROKEN,
    DATA_LATE,
    DETECTION_S,
    FAILED,
    KEPT,
    OVERRUN,
    PEER_LOST,
    WorkflowPromise,
)

FINAL = frozenset({"succeeded", "failed", "skipped", "cancelled"})
STATES = (
    "waiting",
    "pending",
    "running",
    "retrying",
    "succeeded",
    "failed",
    "skipped",
    "cancelled",
)
UNFINISHED = tuple(state for state in STATES if state not in FINAL)
ATTEMPTS_SHOWN_MAX = 50
COPIES_KNOWN_MAX = 8


# --------------------------------------------------------------------------- what is not journaled


@dataclass(frozen=True, slots=True)
class Pending:
    """The strategy has these tasks. After a restart they are simply given to it again."""

    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WaitAgain:
    """These tasks were taken back from the strategy, or have waited long enough for a retry."""

    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bringing:
    """The state of an input that is being brought in, in words."""

    input: str
    words: str


@dataclass(frozen=True, slots=True)
class Delivering:
    """The progress of a result's delivery, in words; empty when it is over."""

    output: str
    words: str


@dataclass(frozen=True, slots=True)
class NeverWritten:
    """The submission could not be written: the workflow is over before it began."""


@dataclass(frozen=True, slots=True)
class SlotsLost:
    """The peers of these tasks' slots are gone, or have them no more."""

    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SlotsConfirmed:
    """All slots are on their peers' disks; or not all of them."""

    all: bool


@dataclass(frozen=True, slots=True)
class Foreseen:
    """When the workflow will end, as things are now."""

    ends_at: float


Note = (
    Pending | WaitAgain | Bringing | Delivering | NeverWritten | SlotsLost | SlotsConfirmed
    | Foreseen
)  # fmt: skip


# --------------------------------------------------------------------------- the state


@dataclass(slots=True)
class AttemptState:
    number: int
    peer: bytes
    boot: int
    at: float
    placement: dict[str, Any]
    state: str = "running"  # then ok, failed, returned or lost
    reason: str = ""
    outcome: Outcome | None = None
    epoch: int = 0  # of the home that started it
    way: int = 0  # the alternative of its task that it runs; 0: the task as written

    @property
    def ran_at(self) -> bytes:
        """The peer it was sent to; or the pilot that ran it, if it was sent to a site."""
        return (self.outcome.by if self.outcome is not None else None) or self.peer


@dataclass(slots=True)
class TaskState:
    id: str
    state: str = "waiting"
    missing: int = 0  # parents whose success is not committed yet
    number: int = 0  # of the latest attempt
    failures: int = 0
    losses: int = 0  # attempts that were lost with their peer, or that it gave up
    returns: int = 0  # attempts that never began
    reason: str = ""
    attempts: list[AttemptState] = field(default_factory=list)
    won: Outcome | None = None
    holder: bytes = b""  # the peer that ran the winning attempt
    copied_to: bytes = b""  # the home at that time, which received the enclosed files
    won_way: int = 0  # the alternative that has won
    asked_way: int = 0  # the alternative for which a peer is looked for

    def attempt(self, number: int) -> AttemptState | None:
        for attempt in reversed(self.attempts):
            if attempt.number == number:
                return attempt
        return None


#: programs whose name says nothing about how long they run
_SHELLS = frozenset({"sh", "bash", "env", "python", "python3", "perl", "Rscript", "java"})


def kinds(spec: Task) -> tuple[str, ...]:
    """Groups of similar tasks, the most similar first: of its template, of its function."""
    if spec.call is not None:
        return (spec.template, f"call {spec.call}")
    program = spec.command[0].rpartition("/")[2] if spec.command else ""
    return (spec.template,) if program in _SHELLS else (spec.template, f"command {program}")


def _taken(workflow: Workflow) -> frozenset[str]:
    """Calls whose value another task takes."""
    return frozenset(
        name
        for task in workflow.tasks.values()
        for ref in task.references.values()
        for name in ref.tasks
    )


def _branches(workflow: Workflow) -> dict[str, tuple[str, ...]]:
    """The tasks of each branch."""
    branches: dict[str, tuple[str, ...]] = {}
    for task in workflow.tasks.values():
        if task.branch:
            branches[task.branch] = (*branches.get(task.branch, ()), task.id)
    return branches


class Run:
    def __init__(
        self,
        workflow_id: str,
        workflow: Workflow,
        submitted_at: float,
        home: bytes,
        owner: str = "",
    ) -> None:
        self.id = workflow_id
        self.owner = owner
        self.workflow = workflow
        self.submitted_at = submitted_at
        self.ended_at: float | None = None
        self.state = "pending"
        self.reason = ""
        self.home = home
        self.epoch = 0
        self.keepers: tuple[bytes, ...] = ()
        self.children = workflow.children()
        self.ranks = upward_ranks(workflow, self.children)
        self.final_files = frozenset(workflow.final_files())
        self.gangs = tuple(t.gang for t in workflow.tasks.values() if t.gang[:1] == (t.id,))
        self.taken = _taken(workflow)
        self.tasks: dict[str, TaskState] = {
            task: TaskState(task, missing=len(workflow.parents[task])) for task in workflow.tasks
        }
        self.counts: Counter[str] = Counter(waiting=len(self.tasks))
        self.levels = levels(workflow) if workflow.strict else {}
        # the results of each level that are not committed yet; the first level that lacks some
        self.left_in: Counter[int] = Counter(self.levels.values())
        self.level = 0
        self.staged: dict[str, File] = {}
        # name → what it waits for, in words
        self.unstaged: dict[str, str] = dict.fromkeys(workflow.inputs, "it is being fetched")
        self.stage_failures: dict[str, str] = {}
        self.copies: dict[bytes, tuple[bytes, ...]] = {}  # file → its second holders
        self.missing: set[bytes] = set()  # files that none of their holders has any more
        self.delivered: dict[str, str] = {}  # file → why its delivery failed; empty: it is done
        self.delivering: dict[str, str] = {}  # file → its progress, in words; not journaled
        self.moved: Counter[str] = Counter()  # bytes of inputs, by where they were
        self.runtimes: dict[str, float] = {}  # kind of task → seconds, as observed
        self._kinds: dict[str, tuple[str, ...]] = {}  # template → kinds of its tasks
        self.cancelling = ""
        self.policies = Policies(workflow.policies) if workflow.policies else None
        self.memory_bytes: dict[str, int] = {}  # task → memory that a policy gives it instead
        self.ways: Counter[str] = Counter()  # task → the alternative it is at
        self.branches = _branches(workflow)
        self._considered: set[tuple[str, int]] = set()
        self._all_levels: dict[str, int] | None = None
        self.promise: WorkflowPromise | None = None
        self.to_be_promised = False  # it was submitted with a promise, as its journal will say

    # ----------------------------------------------------------------- the journal

    def apply(self, entry: Journaled, at: float, epoch: int) -> None:
        self.epoch = epoch
        _APPLY[type(entry)](self, entry, at)

    def committed(self, entry: Journaled) -> None:
        """A majority has this entry and no other home can undo it: tasks that depend on it may
        begin."""
        if isinstance(entry, AttemptsFinished):
            for ended, _, verdict in entry.outcomes:
                if verdict == "succeeded":
                    name = ended.key.task
                    for child in self.children[name]:
                        self.tasks[child].missing -= 1
                    if self.levels:
                        self.left_in[self.levels[name]] -= 1
            while self.levels and self.left_in[self.level] <= 0 and self.level in self.left_in:
                self.level += 1
        elif isinstance(entry, InputsStaged):
            for file in entry.files:
                self.unstaged.pop(file.name, None)

    def note(self, note: Note) -> None:
        """A fact that this home alone knows."""
        match note:
            case Pending(tasks):
                for name in tasks:
                    self.tasks[name].asked_way = self.ways.get(name, 0)
                    self._set(self.tasks[name], "pending")
            case WaitAgain(tasks):
                for name in tasks:
                    self._set(self.tasks[name], "waiting")
            case Bringing(name, words):
                if name in self.unstaged:
                    self.unstaged[name] = words
            case Delivering(name, words):
                if words:
                    self.delivering[name] = words
                else:
                    self.delivering.pop(name, None)
            case NeverWritten():
                self.ended_at = self.submitted_at
            case SlotsLost(tasks):
                self._lose_slots(tasks)
            case SlotsConfirmed(are_all):
                if self.promise is not None:
                    self.promise.confirmed = are_all
            case Foreseen(ends_at):
                if self.promise is not None:
                    self.promise.ends_at = ends_at

    def _submitted(self, entry: Submitted, at: float) -> None:
        self.state, self.submitted_at = "running", at

    def _part_of_the_document(self, entry: DocumentPart, at: float) -> None:
        """This run was made from the document."""

    def _keepers_chosen(self, entry: KeepersChosen | HomeForced, at: float) -> None:
        self.keepers = entry.keepers
        self.home = self.home or self.keepers[0]  # the founder of a journal is its first keeper

    def _home_elected(self, entry: HomeElected | HomeForced, at: float) -> None:
        if self.promise is not None and self.home:
            gone = f"peer {self.home.hex()[:8]}, which ran the workflow, was lost"
            self.promise.trouble(PEER_LOST, gone, DETECTION_S)
        self.home = entry.home

    def _home_forced(self, entry: HomeForced, at: float) -> None:
        self._keepers_chosen(entry, at)
        self._home_elected(entry, at)

    def _inputs_lost(self, entry: InputsLost, at: float) -> None:
        for name, reason in entry.files:
            self.staged.pop(name, None)
            self.unstaged[name] = reason
            for task in self.workflow.tasks.values():
                if name in task.inputs and self.tasks[task.id].state in ("pending", "retrying"):
                    self._set(self.tasks[task.id], "waiting")

    def _inputs_staged(self, entry: InputsStaged, at: float) -> None:
        for name, digest, size, holders in entry.files:
            source = self.workflow.inputs.get(name)
            url = source.value if source is not None and source.kind == "url" else ""
            self.staged[name] = File(name, digest, size, holders, url)
            self.missing.discard(digest)
            if url:
                self.moved["origin"] += size
        for name, reason in entry.failed:
            self.unstaged.pop(name, None)
            self.stage_failures[name] = reason

    def _attempts_started(self, entry: AttemptsStarted, at: float) -> None:
        for name, number, peer, boot in entry.attempts:
            task = self.tasks[name]
            task.number = max(task.number, number)
            placement, way = entry.placement, self.ways.get(name, 0)
            attempt = AttemptState(number, peer, boot, at, placement, epoch=self.epoch, way=way)
            task.attempts.append(attempt)
            if len(task.attempts) > ATTEMPTS_SHOWN_MAX:
                del task.attempts[:-ATTEMPTS_SHOWN_MAX]
            if task.state not in FINAL:
                self._set(task, "running")

    def _attempts_finished(self, entry: AttemptsFinished, at: float) -> None:
        for ended, peer, verdict in entry.outcomes:
            self._attempt_finished(ended, peer, verdict, at)
        self.memory_bytes.update(entry.memory or {})
        self._go_on_instead(entry.instead or ())

    def _attempt_finished(self, ended: Outcome, peer: bytes, verdict: str, at: float) -> None:
        self.consider(ended)
        task = self.tasks[ended.key.task]
        attempt = task.attempt(ended.key.number)
        if attempt is not None:
            attempt.state, attempt.reason, attempt.outcome = ended.kind, ended.reason, ended
        task.reason = ended.reason
        if any(ended.moved):
            self.moved.update(ended.moved._asdict())
        if self.promise is not None:
            self._note_trouble(task, attempt, ended, verdict, at)
        if verdict == "succeeded":
            if ended.outputs:
                self.missing.difference_update(file.hash for file in ended.outputs)
            task.won, task.holder, task.copied_to = ended, peer, self.home
            task.won_way = attempt.way if attempt is not None else self.ways[task.id]
            self._observe(task, ended)
            self._set(task, verdict)
        elif verdict == "returned":
            if ended.started_at:
                task.losses += 1
            else:
                task.returns += 1  # it never began: nobody's fault, however often
            self.missing.update(ended.missing)
            self._set(task, "retrying")
        else:
            task.failures += 1
            self._set(task, verdict)

    def _go_on_instead(self, names: Iterable[str]) -> None:
        """These tasks go on in their next alternative, with all of their branch or gang."""
        together: set[str] = set()
        for name in names:
            spec = self.workflow.tasks[name]
            together.update(self.branches.get(spec.branch) or spec.gang or (name,))
        for name in together:  # once, even if several of them have failed
            self.ways[name] += 1
            self.memory_bytes.pop(name, None)
            self.tasks[name].failures = 0

    def _files_copied(self, entry: FilesCopied, at: float) -> None:
        for digest, peer in entry.files:
            before = self.copies.get(digest, ())
            self.copies[digest] = (*(p for p in before if p != peer), peer)[-COPIES_KNOWN_MAX:]

    def _files_delivered(self, entry: FilesDelivered, at: float) -> None:
        self.delivered.update(entry.files)

    def _attempts_lost(self, entry: AttemptsLost, at: float) -> None:
        for name, number, reason, verdict, begun in entry.attempts:
            task = self.tasks[name]
            attempt = task.attempt(number)
            if attempt is not None:
                attempt.state, attempt.reason = "lost", reason
            if begun:
                task.losses += 1
            else:
                task.returns += 1
            task.reason = reason
            self._set(task, verdict)
            if self.promise is not None:
                cost_s = at - attempt.at if attempt is not None else 0.0
                self.promise.trouble(PEER_LOST, f"{name}: {reason}", cost_s)
                self._lose_slots((name,))

    def _tasks_skipped(self, entry: TasksSkipped, at: float) -> None:
        for name, state, reason in entry.tasks:
            self.tasks[name].reason = reason
            self._set(self.tasks[name], state)

    def _tasks_reopened(self, entry: TasksReopened, at: float) -> None:
        for name, reason in entry.tasks:
            task = self.tasks[name]
            task.won, task.holder, task.reason = None, b"", reason
            if self.promise is not None:
                self.promise.trouble(PEER_LOST, f"{name}: {reason}", DETECTION_S)
            if not entry.gang:  # else another of its gang has failed, and `retries` limits both
                task.failures = 0
            self._set(task, "waiting")
            if self.levels:
                self.left_in[self.levels[name]] += 1
                self.level = min(self.level, self.levels[name])
            for child in self.children[name]:
                self.tasks[child].missing += 1
                if self.tasks[child].state in ("pending", "retrying"):
                    self._set(self.tasks[child], "waiting")

    # ----------------------------------------------------------------- promises

    def _promised(self, entry: Promised, at: float) -> None:
        self.promise = WorkflowPromise(entry.deadline_at, entry.survives)
        self.promise.book(entry.booked)
        self.promise.ends_at = max((row.end_at for row in entry.booked), default=at)

    def _tasks_booked(self, entry: TasksBooked, at: float) -> None:
        if self.promise is not None:
            self.promise.book(entry.booked)
            self.promise.rebooked += len(entry.booked)

    def _promise_at_risk(self, entry: PromiseAtRisk, at: float) -> None:
        if self.promise is not None:
            self.promise.risk, self.promise.ends_at = entry.why, entry.ends_at

    def _promise_ended(self, entry: PromiseEnded, at: float) -> None:
        if self.promise is not None:
            self.promise.state = KEPT if entry.kept else BROKEN
            self.promise.cause, self.promise.why = entry.cause, entry.why
            self.promise.risk = ""

    def _lose_slots(self, names: Iterable[str]) -> None:
        for name in names:
            if self.promise is not None:
                self.promise.slots.pop(name, None)

    def _note_trouble(
        self, task: TaskState, attempt: AttemptState | None, ended: Outcome, verdict: str, at: float
    ) -> None:
        """What this outcome has cost the promise. Its slot is used up."""
        promise = self.promise
        assert promise is not None
        row = promise.slots.pop(task.id, None)
        cost_s = 0.0 if attempt is None else at - attempt.at
        took_s = (ended.ended_at - ended.started_at) * ended.speed if ended.started_at else 0.0
        said_s = promise.lengths.get(task.id, took_s)
        longer_s = took_s - length_here(said_s, 1.0)
        if verdict == "succeeded" and longer_s > 0:
            said = f"{task.id} took {show_seconds(took_s)}, and was said to take"
            promise.trouble(OVERRUN, f"{said} {show_seconds(said_s)}", longer_s)
        elif verdict == "succeeded" and row is not None:
            late_s = at - row.end_at
            ended_late = f"{task.id} ended {show_seconds(max(0.0, late_s))} after its slot"
            promise.trouble(DATA_LATE, ended_late, late_s - promise.late_s)
            promise.late_s = max(promise.late_s, late_s)
        elif ended.cause == MADE_WAY_CAUSE:
            promise.trouble(OVERRUN, f"{task.id}: {ended.reason}", cost_s)
        elif verdict == "returned":
            promise.trouble(PEER_LOST, f"{task.id}: {ended.reason}", cost_s)
        elif verdict != "succeeded":
            promise.trouble(FAILED, f"{task.id} failed: {ended.reason}", cost_s)

    # ----------------------------------------------------------------- the end

    def _cancel_asked(self, entry: CancelAsked, at: float) -> None:
        self.cancelling = entry.reason
        for task in self.tasks.values():
            if task.state not in FINAL:
                task.reason = entry.reason
                self._set(task, "cancelled")

    def _ended(self, entry: Ended, at: float) -> None:
        self.state, self.reason, self.ended_at = entry.state, entry.reason, at

    def _set(self, task: TaskState, state: str) -> None:
        if task.state == "succeeded" and state != "waiting":
            return
        self.counts[task.state] -= 1
        self.counts[state] = self.counts.get(state, 0) + 1
        task.state = state

    def _observe(self, task: TaskState, ended: Outcome) -> None:
        if ended.started_at:
            # in seconds of a peer of speed 1
            took = max(1e-4, ended.ended_at - ended.started_at) * ended.speed
            for kind in self._kinds_of(self.workflow.tasks[task.id]):
                before = self.runtimes.get(kind)
                self.runtimes[kind] = took if before is None else before + (took - before) / 4

    # ----------------------------------------------------------------- questions

    @property
    def over(self) -> bool:
        return self.ended_at is not None

    def is_ready(self, task: TaskState) -> bool:
        if task.state not in ("waiting", "retrying") or task.missing or self.over:
            return False
        if self.levels and self.levels[task.id] > self.level:
            return False
        inputs = self.workflow.tasks[task.id].inputs
        return not self.unstaged or not any(name in self.unstaged for name in inputs)

    def level_of(self, task: str) -> int:
        if self._all_levels is None:  # computed once, for the whole graph
            self._all_levels = self.levels or levels(self.workflow)
        return self._all_levels[task]

    def ready(self) -> list[TaskState]:
        return [t for t in self.tasks.values() if t.state == "waiting" and self.is_ready(t)]

    def runtime_s(self, task: str) -> float | None:
        """As observed of similar tasks, else as its document says."""
        observed = self.observed_s(task)
        return self.workflow.tasks[task].runtime_s if observed is None else observed

    def observed_s(self, task: str) -> float | None:
        if self.runtimes:
            for kind in self._kinds_of(self.workflow.tasks[task]):
                if kind in self.runtimes:
                    return self.runtimes[kind]
        return None

    def _kinds_of(self, spec: Task) -> tuple[str, ...]:
        known = self._kinds.get(spec.template)
        if known is None:
            known = self._kinds[spec.template] = kinds(spec)
        return known

    def verdict(self, ended: Outcome) -> str:
        """What an outcome means for its task."""
        task = self.tasks[ended.key.task]
        if ended.kind == "ok":
            return "succeeded"
        if ended.kind == "returned":
            return "returned"
        retries = self.workflow.tasks[task.id].retries
        return "retrying" if task.failures < retries else "failed"

    def consider(self, ended: Outcome) -> Again | None:
        """What the workflow's policies ask for after a failure; they hear of each failure once."""
        if self.policies is None or ended.kind != "failed":
            return None
        key = (ended.key.task, ended.key.number)
        if key in self._considered:
            return None
        self._considered.add(key)
        failures = self.tasks[ended.key.task].failures + 1
        spec = self.workflow.tasks[ended.key.task]
        values = {
            "memory": self.needs(ended.key.task).memory_bytes,
            "timeout": int(self.spec(spec.id).timeout_s or 0),
            "exit": ended.exit_code or 0,
            "signal": -(ended.exit_code or 0),
        }
        value = values.get(ended.cause, 0)
        again = self.policies.ended(ended.key.task, failures, ended.cause, value)
        if again is None and self.verdict(ended) == "failed":
            left = len(spec.alternatives) - self.ways[spec.id]
            again = self.policies.failed(spec.id, left)
        return again

    def ways_made(self, task: str) -> int:
        """How often it has made way for promised tasks."""
        ended = [attempt.outcome for attempt in self.tasks[task].attempts if attempt.outcome]
        return sum(outcome.cause == MADE_WAY_CAUSE for outcome in ended) if ended else 0

    def spec(self, task: str) -> Task:
        """As its document says, or the alternative that it is at."""
        spec, way = self.workflow.tasks[task], self.ways.get(task, 0)
        if not way:
            return spec
        other = spec.alternatives[way - 1]
        return spec._replace(
            command=other.command,
            env=other.env,
            needs=other.needs,
            timeout_s=other.timeout_s,
        )

    def needs(self, task: str) -> TaskNeeds:
        """As its document says, with the memory that a policy gives it."""
        needs = self.spec(task).needs
        memory_bytes = self.memory_bytes.get(task)
        return needs if memory_bytes is None else needs._replace(memory_bytes=memory_bytes)

    def doomed_by(self, name: str) -> Iterator[str]:
        """All tasks that can't run any more because this one failed."""
        if self.levels:  # its level is never complete
            below = self.levels[name]
            later = [t for t, level in self.levels.items() if level > below]
            yield from (t for t in later if self.tasks[t].state not in FINAL)
            return
        seen = {name}
        stack = [name]
        while stack:
            for child in self.children[stack.pop()]:
                if child not in seen and self.tasks[child].state not in FINAL:
                    seen.add(child)
                    stack.append(child)
                    yield child

    def conclusion(self) -> tuple[str, str] | None:
        """How it ended, if it has."""
        if any(map(self.counts.get, UNFINISHED)):
            return None
        if self.cancelling:
            return "cancelled", self.cancelling
        if self.counts.get("failed") or self.counts.get("skipped"):
            return "failed", _first_of(self._failures())
        undelivered = self._undelivered()
        if undelivered:
            return "failed", _first_of(undelivered)
        if len(self.delivered) < len(self.workflow.deliver):
            return None
        return "succeeded", ""

    def _failures(self) -> list[str]:
        failed = [task for task in self.tasks.values() if task.state == "failed"]
        return [f"{task.id}: {task.reason}" for task in failed]

    def _undelivered(self) -> list[str]:
        failed = [(name, why) for name, why in self.delivered.items() if why]
        return [f"{name} could not be delivered: {why}" for name, why in failed]

    def to_deliver(self) -> list[str]:
        """Results that exist and have not been delivered yet."""
        producers = self.workflow.producers
        return [
            name
            for name in self.workflow.deliver
            if name not in self.delivered and self.tasks[producers[name]].won is not None
        ]

    def file(self, name: str) -> File | None:
        """A file of this workflow with its holders, if it exists."""
        if name in self.staged:
            return self._where(self.staged[name])
        maker = self.workflow.producers.get(name)
        task = self.tasks.get(maker) if maker else None
        if task is None or task.won is None:
            return None
        for file in task.won.outputs:
            if file.name == name:
                # (a task queue names the pilot that holds it: the site that ran it is no holder)
                holders = file.holders or self._holders(task, file.hash)
                return self._where(file._replace(holders=holders))
        return None

    def _where(self, file: File) -> File:
        """With all peers that are known to hold it."""
        if file.hash in self.missing:
            return file._replace(holders=())
        copies = self.copies.get(file.hash)
        if not copies:
            return file
        return file._replace(holders=tuple(dict.fromkeys((*file.holders, *copies)))[:16])

    def _holders(self, task: TaskState, digest: bytes) -> tuple[bytes, ...]:
        assert task.won is not None
        enclosed = any(other == digest for other, _ in task.won.enclosed)
        if enclosed and task.holder != task.copied_to:
            return (task.holder, task.copied_to)
        return (task.holder,)

    def holders(self) -> dict[bytes, tuple[bytes, ...]]:
        """The holders of every file that is known here."""
        names = [*self.staged, *self.workflow.producers]
        files = [file for name in names if (file := self.file(name)) is not None]
        return {file.hash: file.holders for file in files}

    def readers(self, name: str) -> int:
        """The number of unfinished tasks that read it."""
        maker = self.workflow.producers.get(name)
        children = self.children[maker] if maker is not None else ()
        tasks = self.workflow.tasks
        return sum(
            name in tasks[child].inputs and self.tasks[child].state not in FINAL
            for child in children
        )

    def takers(self, name: str) -> int:
        """The number of unfinished tasks that take its value."""
        tasks = self.workflow.tasks
        return sum(
            self.tasks[child].state not in FINAL
            and any(name in ref.tasks for ref in tasks[child].references.values())
            for child in self.children[name]
        )

    def unwanted(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Those of these blobs that no task of this workflow and no user will ask for. A blob that
        is not known here may come from an attempt that has not reported yet: it is wanted until
        the workflow is over."""
        known: set[bytes] = set()
        wanted = self._logs()
        for digest, is_wanted in self._blobs():
            known.add(digest)
            if is_wanted:
                wanted.add(digest)
        return [h for h in hashes if h not in wanted and (h in known or self.over)]

    def _logs(self) -> set[bytes]:
        attempts = (attempt for task in self.tasks.values() for attempt in task.attempts)
        outcomes = (a.outcome for a in attempts if a.outcome is not None)
        return {outcome.log.hash for outcome in outcomes if outcome.log is not None}

    def _blobs(self) -> Iterator[tuple[bytes, bool]]:
        """Inputs, outputs and values that exist; and whether a task or a user will ask for each."""
        unfinished = self._unfinished()
        read = {name for task in unfinished for name in task.inputs}
        taken = {n for t in unfinished for ref in t.references.values() for n in ref.tasks}
        for name, file in self.staged.items():
            yield file.hash, name in read
        for task in self.tasks.values():
            if task.won is not None:
                yield from self._results(task.won, read, taken)

    def _unfinished(self) -> list[Task]:
        tasks = self.workflow.tasks.values()
        return [task for task in tasks if self.tasks[task.id].state not in FINAL]

    def _results(
        self, won: Outcome, read: set[str], taken: set[str]
    ) -> Iterator[tuple[bytes, bool]]:
        for file in won.outputs:
            yield file.hash, file.name in read or file.name in self.final_files
        if won.value is not None and won.value.file is not None:
            task = won.key.task
            yield won.value.file.hash, task in taken or task not in self.taken

    def value(self, name: str) -> Value | None:
        task = self.tasks[name]
        value = task.won.value if task.won else None
        if value is not None and value.file is not None:
            file = self._where(value.file._replace(holders=(task.holder,)))
            return value._replace(file=file)
        return value


def _first_of(reasons: list[str]) -> str:
    if len(reasons) < 2:
        return "".join(reasons)
    return f"{reasons[0]}, and {len(reasons) - 1} more"


_APPLY: dict[type[Journaled], Callable[[Run, Any, float], None]] = {
    KeepersChosen: Run._keepers_chosen,
    HomeElected: Run._home_elected,
    HomeForced: Run._home_forced,
    Submitted: Run._submitted,
    DocumentPart: Run._part_of_the_document,
    InputsStaged: Run._inputs_staged,
    InputsLost: Run._inputs_lost,
    FilesCopied: Run._files_copied,
    FilesDelivered: Run._files_delivered,
    AttemptsStarted: Run._attempts_started,
    AttemptsFinished: Run._attempts_finished,
    AttemptsLost: Run._attempts_lost,
    TasksSkipped: Run._tasks_skipped,
    TasksReopened: Run._tasks_reopened,
    Promised: Run._promised,
    TasksBooked: Run._tasks_booked,
    PromiseAtRisk: Run._promise_at_risk,
    PromiseEnded: Run._promise_ended,
    CancelAsked: Run._cancel_asked,
    Ended: Run._ended,
}
