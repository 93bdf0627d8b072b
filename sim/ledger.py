"""The ledger: it sees everything that peers agree on, run and tell, and checks the rules at once.

It is told of every entry that a home counts as committed, of every attempt that begins, of every
outcome that an executing peer lets go of, and of everything that users are told. A broken rule is
reported at once, as a `Violation`; in the end the ledger checks that everything has come right.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from valence.master.queue import site_id
from valence.protocols.consensus.placement import is_queued
from valence.protocols.consensus.replica import TAG_BITS, forced, shown
from valence.protocols.wire.entries import (
    VOID,
    AttemptsFinished,
    AttemptsLost,
    AttemptsStarted,
    CancelAsked,
    Ended,
    HomeElected,
    InputsStaged,
    Journaled,
    KeepersChosen,
    Promised,
    PromiseEnded,
    StartedAttempt,
    Submitted,
    TasksReopened,
    TasksSkipped,
    read,
)
from valence.protocols.wire.messages import AttemptKey, Entry, File, Outcome, Work

if TYPE_CHECKING:
    from .host import Host

FINAL = ("succeeded", "failed", "cancelled")
RANK = "rank="
#: of a broken promise
CAUSES = ("peer-lost", "overrun", "failed", "data-late", "cancelled")


def maker_of(file: str) -> str | None:
    """The task that makes a file, in the workflows of `users`; None for an input."""
    _, _, place = file.partition(".")
    return f"t{place}" if place else None


def layer_of(task: str) -> int:
    return int(task[1:].partition(".")[0])


def _strict_layers(submitted: Submitted) -> Counter[int]:
    """How many tasks each layer has, if the workflow's levels are strict; else nothing."""
    layers: Counter[int] = Counter()
    document = _document(submitted)
    if document.get("levels") == "strict":
        for name, task in document["tasks"].items():
            layers[layer_of(name)] += task["peers"]
    return layers


def _document(submitted: Submitted) -> dict[str, Any]:
    """The document, if it is in one part."""
    if submitted.parts != 1:
        return {}
    text = zlib.decompress(submitted.document) if submitted.zipped else submitted.document
    document: dict[str, Any] = json.loads(text)
    return document


Files = dict[str, str | None]  # name → hash, as a peer serves them


class Violation(AssertionError):
    """A rule that must never be broken was."""


@dataclass(slots=True)
class _Story:
    """One line of a workflow's journal, by its committed entries."""

    entries: list[tuple[int, int]] = field(default_factory=list)  # epoch, checksum
    won: set[str] = field(default_factory=set)  # tasks that have succeeded
    ever_won: set[str] = field(default_factory=set)  # and those whose results were lost since then
    made: set[tuple[str, bytes]] = field(default_factory=set)  # files that were once committed
    given_up: set[str] = field(default_factory=set)  # tasks that ended without success
    cancelled: bool = False
    commits: Counter[str] = field(default_factory=Counter)
    started: set[tuple[str, int, bytes, int]] = field(default_factory=set)
    begun_with: dict[tuple[str, int], int] = field(default_factory=dict)  # gang's attempt → entry
    lost: set[tuple[str, int]] = field(default_factory=set)  # attempts
    winners: dict[str, int] = field(default_factory=dict)  # task → its attempt
    staged: set[bytes] = field(default_factory=set)
    layers: Counter[int] = field(default_factory=Counter)
    ended: str = ""
    ended_at: float = 0.0
    document: dict[str, Any] = field(default_factory=dict)
    promised_by: float | None = None  # the deadline of its promise
    promise: str = ""  # how that stands: made, kept, broken


class Ledger:
    def __init__(self) -> None:
        self.acknowledged: dict[str, int] = {}  # workflow → its tasks
        self.cancelled: set[str] = set()  # cancels that were acknowledged
        self.counts: Counter[str] = Counter()
        self.stories: dict[tuple[str, int], _Story] = defaultdict(_Story)  # by name and era
        self.keys: dict[str, str] = {}  # Idempotency-Key of an acknowledged submission → workflow
        self.births: dict[str, int] = {}
        self.duplicates: set[str] = set()
        self.ran: Counter[tuple[AttemptKey, bytes, int]] = Counter()
        self.served: dict[str, Files] = {}
        self.lax = False  # a majority may be lost for good, with everything that only it knew

    # ----------------------------------------------------------------- at once

    def agreed(self, host: Host, workflow: str) -> None:
        """A home counts more entries of its journal as committed."""
        keeping = host.enactment.keeping
        replica, lead = keeping.replicas[workflow], keeping.leads[workflow]
        story = self._story(workflow, replica.birth, forced(lead.epoch))
        start = len(story.entries)
        if replica.committed <= start:
            start = max(0, replica.committed - 1)  # look at the last one at least
        else:
            start = max(0, start - 1)
        for entry in self._entries(host, workflow, start, replica.committed):
            mark = (entry.epoch, zlib.crc32(entry.body + entry.kind.encode()))
            if entry.seq < len(story.entries):
                if story.entries[entry.seq] != mark:
                    raise Violation(
                        f"{workflow}: two homes committed different entries {entry.seq}, "
                        f"{entry.kind} the second in epoch {shown(lead.epoch)} at peer {host.index}"
                    )
                continue
            story.entries.append(mark)
            self._record(workflow, story, entry)
        self.counts["entries"] = sum(len(s.entries) for s in self.stories.values())

    def _story(self, workflow: str, birth: int, era: int) -> _Story:
        """The story of one journal. One key that is submitted at two peers that do not hear of
        each other makes two workflows of one name: each has its own journal, and its own story. A
        home that goes on without a majority begins a line of its own, too, in which the entries
        that its copy lacks are gone."""
        if self.births.setdefault(workflow, birth) != birth:
            self.duplicates.add(workflow)
            self.counts["duplicates"] = len(self.duplicates)
            return self.stories[f"{workflow}@{birth}", era]
        if era and (workflow, era) not in self.stories:
            self.counts["forced"] += 1
        return self.stories[workflow, era]

    def lines(self, workflow: str) -> list[_Story]:
        """A workflow's lines, the one that prevails first: see `protocols.consensus.lines`. (A void
        one never does: what is acknowledged later is of a line with the whole submission.)"""
        lines = [(era, story) for (name, era), story in self.stories.items() if name == workflow]
        rising = [story for _, story in sorted(lines, key=lambda row: row[0])]
        ended = [story for story in rising if story.ended and story.ended != VOID]
        running = [story for story in reversed(rising) if not story.ended]
        return [*ended, *running, *(story for story in rising if story.ended == VOID)]

    def over(self, workflow: str) -> bool:
        names = [(n, s) for (n, _), s in self.stories.items()]
        return any(s.ended for name, s in names if name.partition("@")[0] == workflow)

    def _entries(self, host: Host, workflow: str, start: int, end: int) -> list[Entry]:
        """Entries of a home's journal: from its memory, the rest from its disk."""
        lead = host.enactment.keeping.leads[workflow]
        entries = {e.seq: e for e in lead.tail if start <= e.seq < end}
        at = next((seq for seq in range(start, end) if seq not in entries), end)
        while at < end:
            rows = host.enactment.keeping.storage.entries(workflow, at, end, 2**30)
            if not rows:
                break
            for entry in rows:
                entries.setdefault(entry.seq, entry)
            at = rows[-1].seq + 1
        if len(entries) < end - start:
            raise Violation(f"{workflow}: peer {host.index} counts entries it does not have")
        return [entries[seq] for seq in range(start, end)]

    def _record(self, workflow: str, story: _Story, entry: Entry) -> None:
        """Take a committed entry into its workflow's story."""
        if story.ended and entry.kind not in ("home", "keepers", "forced"):
            raise Violation(f"{workflow}: {entry.kind} after its end")
        content = read(entry.kind, entry.body)
        if type(content) in self._COUNTED:
            self.counts[self._COUNTED[type(content)]] += 1
        record = self._RECORDS.get(type(content))
        if record is not None:
            record(self, workflow, story, entry, content)

    def _submitted(self, _: str, story: _Story, entry: Entry, content: Submitted) -> None:
        story.layers = _strict_layers(content)
        story.document = _document(content)

    def _promised(self, workflow: str, story: _Story, entry: Entry, content: Promised) -> None:
        """Every task has a slot, behind those of the tasks that it waits for."""
        self.counts["promises"] += 1
        story.promise, story.promised_by = "made", content.deadline_at
        slots = {row.task: row for row in content.booked}
        tasks = story.document.get("tasks", {})
        if set(tasks) - set(slots):
            raise Violation(f"{workflow} is promised, and not all of its tasks are booked")
        for name, task in tasks.items():
            for maker in filter(None, map(maker_of, task["inputs"])):
                if slots[maker].end_at > slots[name].start_at:
                    raise Violation(f"{workflow}: {name} is booked before {maker} ends")
        if max(row.end_at for row in slots.values()) > content.deadline_at:
            raise Violation(f"{workflow} is promised by a time before its last slot ends")

    def _promise_ended(
        self, workflow: str, story: _Story, entry: Entry, content: PromiseEnded
    ) -> None:
        if story.promise != "made" or story.promised_by is None:
            raise Violation(f"{workflow}: the end of a promise that is {story.promise or 'none'}")
        story.promise = "kept" if content.kept else "broken"
        self.counts[f"promises_{story.promise}"] += 1
        if content.kept and entry.at > story.promised_by:
            raise Violation(f"{workflow}: its promise is called kept, and it was late")
        if not content.kept:
            self.counts[f"broken_by_{content.cause}"] += 1
            if content.cause not in CAUSES or not content.why:
                raise Violation(f"{workflow}: its promise was broken, and nobody says why")

    def _staged(self, _: str, story: _Story, entry: Entry, content: InputsStaged) -> None:
        story.staged.update(file.hash for file in content.files)

    def _started(
        self, workflow: str, story: _Story, entry: Entry, content: AttemptsStarted
    ) -> None:
        for attempt in content.attempts:
            story.started.add((attempt.task, attempt.number, attempt.peer, entry.epoch))
        self._check_start(workflow, story, entry.seq, content.attempts)

    def _finished(
        self, workflow: str, story: _Story, entry: Entry, content: AttemptsFinished
    ) -> None:
        for ended, peer, verdict in content.outcomes:
            if verdict == "succeeded":
                self._won(workflow, story, ended, peer)
            elif verdict == "failed":
                story.given_up.add(ended.key.task)

    def _lost(self, _: str, story: _Story, entry: Entry, content: AttemptsLost) -> None:
        story.given_up.update(a.task for a in content.attempts if a.verdict == "failed")
        story.lost.update((attempt.task, attempt.number) for attempt in content.attempts)

    def _skipped(self, _: str, story: _Story, entry: Entry, content: TasksSkipped) -> None:
        story.given_up.update(skipped.task for skipped in content.tasks)

    def _reopened(self, _: str, story: _Story, entry: Entry, content: TasksReopened) -> None:
        for task, _reason in content.tasks:
            story.won.discard(task)
            story.winners.pop(task, None)
            story.commits[task] -= 1
            self.counts["reopened"] += 1

    def _cancelled(self, _: str, story: _Story, entry: Entry, content: CancelAsked) -> None:
        story.cancelled = True

    def _ended(self, workflow: str, story: _Story, entry: Entry, content: Ended) -> None:
        story.ended, story.ended_at = content.state, entry.at
        if story.promise == "made":
            raise Violation(f"{workflow} is over, and its promise is neither kept nor broken")
        if story.ended == "succeeded":
            self._check_gangs(workflow, story)

    _COUNTED: ClassVar[dict[type[Journaled], str]] = {
        HomeElected: "homes",
        KeepersChosen: "keeper_sets",
    }
    _RECORDS: ClassVar[dict[type[Journaled], Callable[[Ledger, str, _Story, Entry, Any], None]]] = {
        Submitted: _submitted,
        InputsStaged: _staged,
        AttemptsStarted: _started,
        AttemptsFinished: _finished,
        AttemptsLost: _lost,
        TasksSkipped: _skipped,
        TasksReopened: _reopened,
        Promised: _promised,
        PromiseEnded: _promise_ended,
        CancelAsked: _cancelled,
        Ended: _ended,
    }

    def _check_start(
        self, workflow: str, story: _Story, seq: int, attempts: tuple[StartedAttempt, ...]
    ) -> None:
        """All attempts of a gang begin in one entry, each at a peer of its own."""
        gangs: dict[str, list[bytes]] = defaultdict(list)
        for task, number, peer, _ in attempts:
            if RANK in task:
                story.begun_with[task, number] = seq
                gangs[task.partition(RANK)[0]].append(peer)
        for gang, peers in gangs.items():
            self.counts["gangs"] += 1
            size = int(gang.partition("-")[2].partition("[")[0])
            if len(peers) != size or len(set(peers)) != size:
                raise Violation(f"{workflow}: of {gang}…] {len(set(peers))} of {size} begin")

    def _check_gangs(self, workflow: str, story: _Story) -> None:
        """The results of a gang are those of one round."""
        rounds: dict[str, set[int]] = defaultdict(set)
        for task, number in story.winners.items():
            if RANK in task:
                rounds[task.partition(RANK)[0]].add(story.begun_with[task, number])
        for gang, seqs in rounds.items():
            if len(seqs) > 1:
                raise Violation(f"{workflow}: {gang}…] has results that did not run together")

    def _won(self, workflow: str, story: _Story, ended: Outcome, peer: bytes) -> None:
        key, task = ended.key, ended.key.task
        if (task, key.number, peer, ended.epoch) not in story.started:
            raise Violation(f"{key}: a result was committed whose attempt was never started")
        story.commits[task] += 1
        self.counts["tasks"] += 1
        if story.commits[task] > 1:
            raise Violation(f"{workflow}: {task} has two committed results")
        story.won.add(task)
        story.winners[task] = key.number
        story.ever_won.add(task)
        story.made.update((file.name, file.hash) for file in ended.outputs)

    def begins(self, host: Host, work: Work) -> None:
        """An attempt has its inputs and begins to run."""
        self.counts["attempts"] += 1
        if work.key.workflow in self.duplicates:
            return
        key = work.key
        story = self.stories[key.workflow, forced(work.epoch)]
        lines = self.lines(key.workflow)
        for file in work.inputs:
            self._check_input(key, file, lines)
        if story.layers and not self.lax:
            self._check_levels(key, story)
        own = work.epoch % 2**TAG_BITS == zlib.crc32(host.id)  # its home is this very peer
        if not own and _attempt_at(host, key, work.epoch) not in story.started:
            raise Violation(f"{key} was started at another peer before that was agreed on")
        if host.workshop.millicores + work.needs.capacity.millicores > 1000 * host.slots:
            raise Violation(f"peer {host.index} runs more than it has capacity for")

    def _check_input(self, key: AttemptKey, file: File, lines: list[_Story]) -> None:
        """Every input of an attempt is committed, in one of the lines."""
        maker = maker_of(file.name)
        if maker is None:
            if not any(file.hash in line.staged for line in lines):
                raise Violation(f"{key} runs with an input that was never agreed on")
        elif not any((file.name, file.hash) in line.made for line in lines):
            raise Violation(f"{key} runs with {file.name}, which {maker} is not agreed to have")

    def _check_levels(self, key: AttemptKey, story: _Story) -> None:
        """Where levels are strict, all tasks of the levels above are done."""
        own = layer_of(key.task)
        above = sum(count for layer, count in story.layers.items() if layer < own)
        done = sum(layer_of(task) < own for task in story.ever_won)
        if done < above:
            raise Violation(
                f"{key} runs before {above - done} tasks of strict levels above are done"
            )
        self.counts["in_turn"] += 1

    def ends(self, host: Host, work: Work) -> None:
        """An attempt has run to its end; nobody has been told of its result yet."""
        self.ran[work.key, host.id, work.epoch] += 1
        if self.ran[work.key, host.id, work.epoch] > 1:
            raise Violation(f"{work.key} ran twice at peer {host.index}")

    def lets_go(self, host: Host, ended: Outcome) -> None:
        """An executing peer forgets an outcome, because its home has it."""
        if ended.key.workflow in self.duplicates:
            return
        attempt = _attempt_at(host, ended.key, ended.epoch)
        lines = self.lines(ended.key.workflow)
        known = [line for line in lines if attempt in line.started]
        if len(known) < len(lines):
            return  # a home that went on without a majority knows nothing of it
        if ended.kind == "ok" and lines and not any(_settled(line, ended) for line in lines):
            raise Violation(f"{ended.key}: its result was let go before it was committed")

    def accepts(self, workflow: str, tasks: int, key: str | None, promised: bool = False) -> None:
        """A user is told that a submission will not be lost, and perhaps when it will be done."""
        self.acknowledged[workflow] = tasks
        lines = self.lines(workflow)
        if promised and lines and not any(line.promise for line in lines):
            raise Violation(
                f"{workflow} was promised to its user, and its journal says nothing of it"
            )
        if key is None:
            return
        first = self.keys.setdefault(key, workflow)
        if first != workflow and not {first, workflow} & self.duplicates:
            raise Violation(f"{key} was submitted twice: as {first} and as {workflow}")

    def tells(self, workflow: str, state: str) -> None:
        """A user is told how a workflow ended."""
        if state not in FINAL or workflow in self.duplicates:
            return
        if not any(line.ended == state for line in self.lines(workflow)):
            raise Violation(f"{workflow}: its user is told {state}, which was not agreed on")

    # ----------------------------------------------------------------- in the end

    def close(self) -> None:
        for workflow, tasks in self.acknowledged.items():
            if workflow in self.duplicates:
                continue
            lines = self.lines(workflow)  # (the world has checked that they are over)
            story = lines[0]
            if story.ended == VOID:
                raise Violation(f"{workflow} was acknowledged, and is void")
            if story.ended == "succeeded" and len(story.won) != tasks:
                raise Violation(f"{workflow} succeeded with {len(story.won)} of {tasks} results")
            ignored = workflow in self.cancelled and story.ended != "cancelled"
            if ignored and len(lines) == 1:  # (of several lines, another one was told of it)
                raise Violation(f"{workflow}: a cancel that was acknowledged had no effect")

    def serves(self, workflow: str, index: int, view: dict[str, Any], files: Files) -> None:
        """In the end, every peer tells the same of a workflow: the state that was agreed on.

        So what users were told stays true: an end that a majority agreed on prevails over
        everything that a home without a majority may have made of the workflow."""
        if workflow in self.duplicates:
            return
        story = self.lines(workflow)[0]
        if (view["state"], view["ended_at"]) != (story.ended, story.ended_at):
            told = f"{view['state']} at {view['ended_at']}"
            agreed = f"{story.ended} at {story.ended_at}"
            raise Violation(f"{workflow}: peer {index} says {told}, but {agreed} was agreed on")
        if files != self.served.setdefault(workflow, files):
            raise Violation(f"{workflow}: peer {index} has other files of it than others have")


def _attempt_at(host: Host, key: AttemptKey, epoch: int) -> tuple[str, int, bytes, int]:
    """An attempt as `started` entries name it: a queue starts it at a site, not at a peer."""
    peer = site_id(host.site) if is_queued(key.workflow) else host.id
    return key.task, key.number, peer, epoch


def _settled(story: _Story, ended: Outcome) -> bool:
    """Whether this result is committed in that line, or is of no use to it any more."""
    task = ended.key.task
    anew = RANK in task and (task, ended.key.number) in story.lost  # with its gang
    needless = bool(story.ended) or story.cancelled or task in story.given_up
    return needless or anew or task in story.ever_won
