"""One workflow's state: what its journal says, entry by entry. Pure.

Three things change it, and nothing else does:

- `apply`, by an entry: both when that is new and when another home reads it again. What is on disk
  is what is known. Decisions (retry, fail, skip) are made before an entry is written and stand in
  it (`decisions`).
- `committed`, when a majority has that entry: only then does what hangs on it get ready.
- `note`, by what is not journaled, as another home finds it again by itself.

A task is `waiting` (for inputs), `pending` (ready, being placed), `running` (given to a peer),
`retrying` (failed, will be placed again), or for good `succeeded`, `failed`, `skipped` or
`cancelled`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from valence.workflow.model import Task, TaskNeeds, Workflow
from valence.workflow.plan import levels, upward_ranks

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
    Submitted,
    TasksReopened,
    TasksSkipped,
)
from ..wire.messages import File, Outcome, Value
from .policies import Again, Policies

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
ATTEMPTS_SHOWN_MAX = 50
COPIES_KNOWN_MAX = 8


# --------------------------------------------------------------------------- what is not journaled


@dataclass(frozen=True, slots=True)
class Pending:
    """These tasks were given to the strategy. After a restart they simply are once more."""

    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WaitAgain:
    """These were taken back from the strategy, or have waited long enough to be tried again."""

    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bringing:
    """What an input waits for, in words."""

    input: str
    words: str


@dataclass(frozen=True, slots=True)
class Delivering:
    """How far the delivery of a result is, in words; empty when it is over."""

    output: str
    words: str


@dataclass(frozen=True, slots=True)
class NeverWritten:
    """Its submission could not be written: it is over before it began."""


Note = Pending | WaitAgain | Bringing | Delivering | NeverWritten


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
    epoch: int = 0  # of the home that gave it
    way: int = 0  # which of the task's alternatives it is

    @property
    def ran_at(self) -> bytes:
        """The peer it was given to; or the pilot, where that was a site."""
        return (self.outcome.by if self.outcome is not None else None) or self.peer


@dataclass(slots=True)
class TaskState:
    id: str
    state: str = "waiting"
    missing: int = 0  # parents whose success does not count yet
    number: int = 0  # of the latest attempt
    failures: int = 0
    losses: int = 0  # attempts that vanished with their peer, or were given up by it
    returns: int = 0  # attempts that never began
    reason: str = ""
    attempts: list[AttemptState] = field(default_factory=list)
    won: Outcome | None = None
    holder: bytes = b""  # the peer that ran the winning attempt
    copied_to: bytes = b""  # the home of that time, which got what was enclosed
    won_way: int = 0
    asked_way: int = 0  # in which a peer is looked for

    def attempt(self, number: int) -> AttemptState | None:
        return next((a for a in reversed(self.attempts) if a.number == number), None)


#: programs that say nothing about how long they take
_SHELLS = frozenset({"sh", "bash", "env", "python", "python3", "perl", "Rscript", "java"})


def _kinds(spec: Task) -> tuple[str, ...]:
    """Tasks it is like, the most like first: of the same template, of the same function."""
    if spec.call is not None:
        return (spec.template, f"call {spec.call}")
    program = spec.command[0].rpartition("/")[2] if spec.command else ""
    return (spec.template,) if program in _SHELLS else (spec.template, f"command {program}")


class Run:
    def __init__(
        self, id: str, workflow: Workflow, submitted_at: float, home: bytes, owner: str = ""
    ) -> None:
        self.id = id
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
        self.taken = frozenset(  # calls whose value another task takes
            name
            for task in workflow.tasks.values()
            for ref in task.references.values()
            for name in ref.tasks
        )
        self.tasks: dict[str, TaskState] = {
            task: TaskState(task, missing=len(workflow.parents[task])) for task in workflow.tasks
        }
        self.counts: Counter[str] = Counter(waiting=len(self.tasks))
        self.levels = levels(workflow) if workflow.strict else {}
        # of each level, how many results do not count yet; and the first level that lacks some
        self.left_in: Counter[int] = Counter(self.levels.values())
        self.level = 0
        self.staged: dict[str, File] = {}
        # name → what it waits for
        self.unstaged: dict[str, str] = dict.fromkeys(workflow.inputs, "it is being brought in")
        self.stage_failures: dict[str, str] = {}
        self.copies: dict[bytes, tuple[bytes, ...]] = {}  # second holders of files
        self.missing: set[bytes] = set()  # files that none of their holders has any more
        self.delivered: dict[str, str] = {}  # file → why it could not be, if so
        self.delivering: dict[str, str] = {}  # what is on its way, in words; not journaled
        self.moved: Counter[str] = Counter()  # bytes of inputs, by where they were
        self.runtimes: dict[str, float] = {}  # kind of task → seconds, as observed
        self._kinds: dict[str, tuple[str, ...]] = {}  # template → what its tasks are like
        self.cancelling = ""
        self.policies = Policies(workflow.policies) if workflow.policies else None
        self.memory_bytes: dict[str, int] = {}  # what a policy gives a task, in place of its need
        self.ways: Counter[str] = Counter()  # which of its alternatives a task is at
        self.branches: dict[str, tuple[str, ...]] = {}
        for spec in workflow.tasks.values():
            if spec.branch:
                self.branches[spec.branch] = (*self.branches.get(spec.branch, ()), spec.id)
        self._considered: set[tuple[str, int]] = set()
        self._all_levels: dict[str, int] | None = None

    # ----------------------------------------------------------------- the journal

    def apply(self, said: Journaled, at: float, epoch: int) -> None:
        self.epoch = epoch
        _APPLY[type(said)](self, said, at)

    def committed(self, said: Journaled) -> None:
        """A majority has this entry: what hangs on it may begin, as no other home undoes it."""
        if isinstance(said, AttemptsFinished):
            for ended, _, verdict in said.outcomes:
                if verdict == "succeeded":
                    for child in self.children[ended.key.task]:
                        self.tasks[child].missing -= 1
                    if self.levels:
                        self.left_in[self.levels[ended.key.task]] -= 1
            while self.levels and self.left_in[self.level] <= 0 and self.level in self.left_in:
                self.level += 1
        elif isinstance(said, InputsStaged):
            for file in said.files:
                self.unstaged.pop(file.name, None)

    def note(self, note: Note) -> None:
        """What is known to this home alone."""
        match note:
            case Pending(tasks):
                for name in tasks:
                    self.tasks[name].asked_way = self.ways[name]
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

    def _submitted(self, said: Submitted, at: float) -> None:
        self.state, self.submitted_at = "running", at

    def _part_of_the_document(self, said: DocumentPart, at: float) -> None:
        """This was made from it."""

    def _keepers_chosen(self, said: KeepersChosen | HomeForced, at: float) -> None:
        self.keepers = said.keepers
        self.home = self.home or self.keepers[0]  # who founds a journal stands first in it

    def _home_elected(self, said: HomeElected | HomeForced, at: float) -> None:
        self.home = said.home

    def _home_forced(self, said: HomeForced, at: float) -> None:
        self._keepers_chosen(said, at)
        self._home_elected(said, at)

    def _inputs_lost(self, said: InputsLost, at: float) -> None:
        for name, reason in said.files:
            self.staged.pop(name, None)
            self.unstaged[name] = reason
            for task in self.workflow.tasks.values():
                if name in task.inputs and self.tasks[task.id].state in ("pending", "retrying"):
                    self._set(self.tasks[task.id], "waiting")

    def _inputs_staged(self, said: InputsStaged, at: float) -> None:
        for name, hash, size, holders in said.files:
            source = self.workflow.inputs.get(name)
            url = source.value if source is not None and source.kind == "url" else ""
            self.staged[name] = File(name, hash, size, holders, url)
            self.missing.discard(hash)
            if url:
                self.moved["origin"] += size
        for name, reason in said.failed:
            self.unstaged.pop(name, None)
            self.stage_failures[name] = reason

    def _attempts_started(self, said: AttemptsStarted, at: float) -> None:
        for name, number, peer, boot in said.attempts:
            task = self.tasks[name]
            task.number = max(task.number, number)
            placement, way = said.placement, self.ways[name]
            attempt = AttemptState(number, peer, boot, at, placement, epoch=self.epoch, way=way)
            task.attempts.append(attempt)
            del task.attempts[:-ATTEMPTS_SHOWN_MAX]
            if task.state not in FINAL:
                self._set(task, "running")

    def _attempts_finished(self, said: AttemptsFinished, at: float) -> None:
        for ended, peer, verdict in said.outcomes:
            self.consider(ended)
            task = self.tasks[ended.key.task]
            attempt = task.attempt(ended.key.number)
            if attempt is not None:
                attempt.state, attempt.reason, attempt.outcome = ended.kind, ended.reason, ended
            task.reason = ended.reason
            self.moved.update(ended.moved._asdict())
            if verdict == "succeeded":
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
        self.memory_bytes.update(said.memory or {})
        together: set[str] = set()
        for name in said.instead or ():
            spec = self.workflow.tasks[name]
            together.update(self.branches.get(spec.branch) or spec.gang or (name,))
        for one in together:  # once, also if several of them have failed
            self.ways[one] += 1
            self.memory_bytes.pop(one, None)
            self.tasks[one].failures = 0

    def _files_copied(self, said: FilesCopied, at: float) -> None:
        for hash, peer in said.files:
            before = self.copies.get(hash, ())
            self.copies[hash] = (*(p for p in before if p != peer), peer)[-COPIES_KNOWN_MAX:]

    def _files_delivered(self, said: FilesDelivered, at: float) -> None:
        self.delivered.update(said.files)

    def _attempts_lost(self, said: AttemptsLost, at: float) -> None:
        for name, number, reason, verdict, begun in said.attempts:
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

    def _tasks_skipped(self, said: TasksSkipped, at: float) -> None:
        for name, state, reason in said.tasks:
            self.tasks[name].reason = reason
            self._set(self.tasks[name], state)

    def _tasks_reopened(self, said: TasksReopened, at: float) -> None:
        for name, reason in said.tasks:
            task = self.tasks[name]
            task.won, task.holder, task.reason = None, b"", reason
            if not said.gang:  # else another of its gang has failed, and `retries` bound both
                task.failures = 0
            self._set(task, "waiting")
            if self.levels:
                self.left_in[self.levels[name]] += 1
                self.level = min(self.level, self.levels[name])
            for child in self.children[name]:
                self.tasks[child].missing += 1
                if self.tasks[child].state in ("pending", "retrying"):
                    self._set(self.tasks[child], "waiting")

    def _cancel_asked(self, said: CancelAsked, at: float) -> None:
        self.cancelling = said.reason
        for task in self.tasks.values():
            if task.state not in FINAL:
                task.reason = said.reason
                self._set(task, "cancelled")

    def _ended(self, said: Ended, at: float) -> None:
        self.state, self.reason, self.ended_at = said.state, said.reason, at

    def _set(self, task: TaskState, state: str) -> None:
        if task.state == "succeeded" and state != "waiting":
            return
        self.counts[task.state] -= 1
        self.counts[state] += 1
        task.state = state

    def _observe(self, task: TaskState, ended: Outcome) -> None:
        if ended.started_at:
            # as long as it would take on a peer of speed 1
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
        if self._all_levels is None:  # of the whole graph: once
            self._all_levels = self.levels or levels(self.workflow)
        return self._all_levels[task]

    def ready(self) -> list[TaskState]:
        return [t for t in self.tasks.values() if t.state == "waiting" and self.is_ready(t)]

    def runtime_s(self, task: str) -> float | None:
        """As observed of its like, else as its document says."""
        observed = self.observed_s(task)
        return self.workflow.tasks[task].runtime_s if observed is None else observed

    def observed_s(self, task: str) -> float | None:
        if self.runtimes:
            for kind in self._kinds_of(self.workflow.tasks[task]):
                if kind in self.runtimes:
                    return self.runtimes[kind]
        return None

    def _kinds_of(self, spec: Task) -> tuple[str, ...]:
        found = self._kinds.get(spec.template)
        if found is None:
            found = self._kinds[spec.template] = _kinds(spec)
        return found

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
        """What the workflow's policies make of a failure; each is told to them once."""
        key = (ended.key.task, ended.key.number)
        if self.policies is None or ended.kind != "failed" or key in self._considered:
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

    def spec(self, task: str) -> Task:
        """As its document says, or one of its alternatives."""
        found, way = self.workflow.tasks[task], self.ways.get(task, 0)
        if not way:
            return found
        other = found.alternatives[way - 1]
        return replace(
            found,
            command=other.command,
            env=other.env,
            needs=other.needs,
            timeout_s=other.timeout_s,
        )

    def needs(self, task: str) -> TaskNeeds:
        """As its document says, or as a policy has made of it."""
        found = self.spec(task).needs
        more = self.memory_bytes.get(task)
        return found if more is None else replace(found, memory_bytes=more)

    def doomed_by(self, name: str) -> Iterator[str]:
        """All that can't run any more because this one failed."""
        if self.levels:  # its level is never done
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
        if any(self.counts[s] for s in STATES if s not in FINAL):
            return None
        if self.cancelling:
            return "cancelled", self.cancelling
        if self.counts["failed"] or self.counts["skipped"]:
            failed = [t for t in self.tasks.values() if t.state == "failed"]
            first = f"{failed[0].id}: {failed[0].reason}" if failed else ""
            more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
            return "failed", f"{first}{more}"
        undelivered = [(name, why) for name, why in self.delivered.items() if why]
        if undelivered:
            name, why = undelivered[0]
            more = f", and {len(undelivered) - 1} more" if len(undelivered) > 1 else ""
            return "failed", f"{name} could not be delivered: {why}{more}"
        if len(self.delivered) < len(self.workflow.deliver):
            return None
        return "succeeded", ""

    def to_deliver(self) -> list[str]:
        """Files that are made, and not yet where they are to go."""
        producers = self.workflow.producers
        return [
            name
            for name in self.workflow.deliver
            if name not in self.delivered and self.tasks[producers[name]].won is not None
        ]

    def file(self, name: str) -> File | None:
        """Where a file of this workflow is, if it is."""
        if name in self.staged:
            return self._where(self.staged[name])
        maker = self.workflow.producers.get(name)
        task = self.tasks.get(maker) if maker else None
        if task is None or task.won is None:
            return None
        for file in task.won.outputs:
            if file.name == name:
                # (who made it for a task queue has said where it is: its site is no holder)
                holders = file.holders or self._holders(task, file.hash)
                return self._where(file._replace(holders=holders))
        return None

    def _where(self, file: File) -> File:
        """With all who are known to hold it."""
        if file.hash in self.missing:
            return file._replace(holders=())
        copies = self.copies.get(file.hash)
        if not copies:
            return file
        return file._replace(holders=tuple(dict.fromkeys((*file.holders, *copies)))[:16])

    def _holders(self, task: TaskState, hash: bytes) -> tuple[bytes, ...]:
        assert task.won is not None
        enclosed = any(found == hash for found, _ in task.won.enclosed)
        if enclosed and task.holder != task.copied_to:
            return (task.holder, task.copied_to)
        return (task.holder,)

    def holders(self) -> dict[bytes, tuple[bytes, ...]]:
        """Of all files that are known here: who has each of them."""
        names = [*self.staged, *self.workflow.producers]
        files = [file for name in names if (file := self.file(name)) is not None]
        return {file.hash: file.holders for file in files}

    def readers(self, name: str) -> int:
        """Tasks that read it, and are not over."""
        maker = self.workflow.producers.get(name)
        children = self.children[maker] if maker is not None else ()
        tasks = self.workflow.tasks
        return sum(
            name in tasks[child].inputs and self.tasks[child].state not in FINAL
            for child in children
        )

    def takers(self, name: str) -> int:
        """Tasks that take its value, and are not over."""
        tasks = self.workflow.tasks
        return sum(
            self.tasks[child].state not in FINAL
            and any(name in ref.tasks for ref in tasks[child].references.values())
            for child in self.children[name]
        )

    def unwanted(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Of these blobs, the ones that no task and no user of it will ask for. What is not known
        here may be of an attempt that has not reported yet: it is wanted until all is over."""
        known: set[bytes] = set()
        wanted: set[bytes] = set()
        unfinished = [
            t for t in self.workflow.tasks.values() if self.tasks[t.id].state not in FINAL
        ]
        read = {name for task in unfinished for name in task.inputs}
        taken = {n for t in unfinished for ref in t.references.values() for n in ref.tasks}
        for name, file in self.staged.items():
            known.add(file.hash)
            if name in read:
                wanted.add(file.hash)
        for task in self.tasks.values():
            if task.won is None:
                continue
            for file in task.won.outputs:
                known.add(file.hash)
                if file.name in read or file.name in self.final_files:
                    wanted.add(file.hash)
            value = task.won.value.file if task.won.value is not None else None
            if value is not None:
                known.add(value.hash)
                if task.id in taken or task.id not in self.taken:
                    wanted.add(value.hash)
        for attempt in (a for task in self.tasks.values() for a in task.attempts):
            if attempt.outcome is not None and attempt.outcome.log is not None:
                wanted.add(attempt.outcome.log.hash)
        return [h for h in hashes if h not in wanted and (h in known or self.over)]

    def value(self, name: str) -> Value | None:
        task = self.tasks[name]
        value = task.won.value if task.won else None
        if value is not None and value.file is not None:
            file = self._where(value.file._replace(holders=(task.holder,)))
            return value._replace(file=file)
        return value


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
    CancelAsked: Run._cancel_asked,
    Ended: Run._ended,
}
