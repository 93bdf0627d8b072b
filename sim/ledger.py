"""What must hold, whatever happens: a look over every peer's shoulder.

The ledger is told of every entry that a home counts as agreed, of every attempt that begins, of
every outcome that an executing peer lets go of, and of all that users are told. From that it says
at once when something is wrong, and in the end whether all has come right.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    KeepersChosen,
    StartedAttempt,
    Submitted,
    TasksReopened,
    TasksSkipped,
    read,
)
from valence.protocols.wire.messages import AttemptKey, Entry, Outcome, Work

if TYPE_CHECKING:
    from .host import Host

FINAL = ("succeeded", "failed", "cancelled")
RANK = "rank="


def maker_of(file: str) -> str | None:
    """In the workflows of this world: the task that makes a file; None for an input."""
    _, _, place = file.partition(".")
    return f"t{place}" if place else None


def layer_of(task: str) -> int:
    return int(task[1:].partition(".")[0])


def _strict_layers(said: Submitted) -> Counter[int]:
    """Of a workflow whose levels are strict: the tasks of each; else nothing."""
    found: Counter[int] = Counter()
    if said.parts == 1:
        text = zlib.decompress(said.document) if said.zipped else said.document
        document = json.loads(text)
        if document.get("levels") == "strict":
            for name, task in document["tasks"].items():
                found[layer_of(name)] += task["peers"]
    return found


Files = dict[str, str | None]  # name → hash, as a peer serves them


class Violation(AssertionError):
    """A rule that must never be broken was."""


@dataclass(slots=True)
class _Story:
    """One workflow, by the entries that were agreed on."""

    entries: list[tuple[int, int]] = field(default_factory=list)  # epoch, check sum
    won: set[str] = field(default_factory=set)  # tasks that have succeeded
    ever_won: set[str] = field(default_factory=set)  # and those whose results were lost since
    made: set[tuple[str, bytes]] = field(default_factory=set)  # files that counted once
    given_up: set[str] = field(default_factory=set)  # tasks that ended otherwise
    cancelled: bool = False
    commits: Counter[str] = field(default_factory=Counter)
    started: set[tuple[str, int, bytes, int]] = field(default_factory=set)
    begun_with: dict[tuple[str, int], int] = field(
        default_factory=dict
    )  # attempt of a gang → entry
    given_back: set[tuple[str, int]] = field(default_factory=set)  # and those begun anew
    winners: dict[str, int] = field(default_factory=dict)  # task → its attempt
    staged: set[bytes] = field(default_factory=set)
    layers: Counter[int] = field(default_factory=Counter)
    ended: str = ""
    ended_at: float = 0.0


class Ledger:
    def __init__(self) -> None:
        self.acknowledged: dict[str, int] = {}  # workflow → its tasks
        self.cancelled: set[str] = set()  # cancels that were acknowledged
        self.counts: Counter[str] = Counter()
        self.stories: dict[tuple[str, int], _Story] = defaultdict(_Story)  # by name and era
        self.keys: dict[str, str] = {}  # of submissions that were acknowledged → workflow
        self.births: dict[str, int] = {}
        self.duplicates: set[str] = set()
        self.ran: Counter[tuple[AttemptKey, bytes, int]] = Counter()
        self.served: dict[str, Files] = {}
        self.lax = False  # a majority may be lost for good: what only it knew may be

    # ----------------------------------------------------------------- at once

    def agreed(self, host: Host, workflow: str) -> None:
        """A home says that more of its journal counts."""
        keeping = host.enactment.keeping
        replica, lead = keeping.replicas[workflow], keeping.leads[workflow]
        story = self._story(workflow, replica.birth, forced(lead.epoch))
        start = len(story.entries)
        if replica.committed <= start:
            start = max(0, replica.committed - 1)  # at least look at the last
        else:
            start = max(0, start - 1)
        for entry in self._entries(host, workflow, start, replica.committed):
            mark = (entry.epoch, zlib.crc32(entry.body + entry.kind.encode()))
            if entry.seq < len(story.entries):
                if story.entries[entry.seq] != mark:
                    raise Violation(
                        f"{workflow}: two homes count different entries {entry.seq}, "
                        f"{entry.kind} the second in epoch {shown(lead.epoch)} at peer {host.index}"
                    )
                continue
            story.entries.append(mark)
            self._read(workflow, story, entry)
        self.counts["entries"] = sum(len(s.entries) for s in self.stories.values())

    def _story(self, workflow: str, birth: int, era: int) -> _Story:
        """One key submitted at two places that do not hear of each other makes two of one name:
        each has its own journal, and only that is looked at. A home that goes on without a
        majority begins a line of its own, too: what its copy does not have is gone there."""
        if self.births.setdefault(workflow, birth) != birth:
            self.duplicates.add(workflow)
            self.counts["duplicates"] = len(self.duplicates)
            return self.stories[f"{workflow}@{birth}", era]
        if era and (workflow, era) not in self.stories:
            self.counts["forced"] += 1
        return self.stories[workflow, era]

    def lines(self, workflow: str) -> list[_Story]:
        """In the order in which they hold, see `protocols.consensus.lines`: the first one does."""
        found = [(era, s) for (name, era), s in self.stories.items() if name == workflow]
        ended = [s for era, s in sorted(found, key=lambda row: row[0]) if s.ended]
        others = [s for era, s in sorted(found, key=lambda row: -row[0]) if not s.ended]
        return [*ended, *others]

    def over(self, workflow: str) -> bool:
        names = [(n, s) for (n, _), s in self.stories.items()]
        return any(s.ended for name, s in names if name.partition("@")[0] == workflow)

    def _entries(self, host: Host, workflow: str, start: int, end: int) -> list[Entry]:
        lead = host.enactment.keeping.leads[workflow]
        found = {e.seq: e for e in lead.tail if start <= e.seq < end}
        missing = [seq for seq in range(start, end) if seq not in found]
        if missing:
            storage = host.enactment.keeping.storage
            at = missing[0]
            while at <= missing[-1]:
                rows = storage.entries(workflow, at, missing[-1] + 1, 2**30)
                if not rows:
                    break
                for entry in rows:
                    found.setdefault(entry.seq, entry)
                at = rows[-1].seq + 1
        if len(found) < end - start:
            raise Violation(f"{workflow}: peer {host.index} counts entries it does not have")
        return [found[seq] for seq in range(start, end)]

    def _read(self, workflow: str, story: _Story, entry: Entry) -> None:
        if story.ended and entry.kind not in ("home", "keepers", "forced"):
            raise Violation(f"{workflow}: {entry.kind} after its end")
        match read(entry.kind, entry.body):
            case AttemptsFinished(outcomes=outcomes):
                for ended, peer, verdict in outcomes:
                    if verdict == "succeeded":
                        self._won(workflow, story, ended, peer)
                    elif verdict == "failed":
                        story.given_up.add(ended.key.task)
            case AttemptsLost(attempts=lost):
                story.given_up.update(one.task for one in lost if one.verdict == "failed")
                story.given_back.update((one.task, one.number) for one in lost)
            case TasksSkipped(tasks=skipped):
                story.given_up.update(one.task for one in skipped)
            case CancelAsked():
                story.cancelled = True
            case TasksReopened(tasks=reopened):
                for task, _ in reopened:
                    story.won.discard(task)
                    story.winners.pop(task, None)
                    story.commits[task] -= 1
                    self.counts["reopened"] += 1
            case AttemptsStarted(attempts=started):
                for one in started:
                    story.started.add((one.task, one.number, one.peer, entry.epoch))
                self._begun(workflow, story, entry.seq, started)
            case Submitted() as said:
                story.layers = _strict_layers(said)
            case InputsStaged(files=files):
                story.staged.update(file.hash for file in files)
            case Ended(state=state):
                story.ended, story.ended_at = state, entry.at
                if story.ended == "succeeded":
                    self._check_gangs(workflow, story)
            case HomeElected():
                self.counts["homes"] += 1
            case KeepersChosen():
                self.counts["keeper_sets"] += 1

    def _begun(
        self, workflow: str, story: _Story, seq: int, attempts: tuple[StartedAttempt, ...]
    ) -> None:
        """Of a gang all begin in one entry, each at a peer of its own."""
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
            raise Violation(f"{key}: a result counts that nobody was asked for")
        story.commits[task] += 1
        self.counts["tasks"] += 1
        if story.commits[task] > 1:
            raise Violation(f"{workflow}: {task} has two results that count")
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
            maker = maker_of(file.name)
            if maker is None:
                if not any(file.hash in line.staged for line in lines):
                    raise Violation(f"{key} runs with an input that was never agreed on")
            elif not any((file.name, file.hash) in line.made for line in lines):
                raise Violation(f"{key} runs with {file.name}, which {maker} is not agreed to have")
        if story.layers and not self.lax:
            self._in_turn(key, story)
        own = work.epoch % 2**TAG_BITS == zlib.crc32(host.id)  # this very peer's, as its home
        by = site_id(host.site) if is_queued(key.workflow) else host.id
        given = (key.task, key.number, by, work.epoch)
        if not own and given not in story.started:
            raise Violation(f"{key} was given away before that was agreed on")
        if host.workshop.running >= host.slots:
            raise Violation(f"peer {host.index} runs more than it has room for")

    def _in_turn(self, key: AttemptKey, story: _Story) -> None:
        """Where levels are strict: all of those above are done."""
        mine = layer_of(key.task)
        above = sum(count for layer, count in story.layers.items() if layer < mine)
        done = sum(layer_of(task) < mine for task in story.ever_won)
        if done < above:
            raise Violation(f"{key} runs when {above - done} tasks of strict levels above do not")
        self.counts["in_turn"] += 1

    def ends(self, host: Host, work: Work) -> None:
        """An attempt has run to its end; what it made is not told to anybody yet."""
        self.ran[work.key, host.id, work.epoch] += 1
        if self.ran[work.key, host.id, work.epoch] > 1:
            raise Violation(f"{work.key} ran twice at peer {host.index}")

    def lets_go(self, host: Host, ended: Outcome) -> None:
        """An executing peer forgets an outcome, as its home has it."""
        if ended.key.workflow in self.duplicates:
            return
        by = site_id(host.site) if is_queued(ended.key.workflow) else host.id
        given = (ended.key.task, ended.key.number, by, ended.epoch)
        lines = self.lines(ended.key.workflow)
        known = [line for line in lines if given in line.started]
        if len(known) < len(lines):
            return  # a home that went on without a majority knows nothing of it
        if ended.kind == "ok" and lines and not any(_settled(line, ended) for line in lines):
            raise Violation(f"{ended.key}: its result was let go, and does not count")

    def accepts(self, workflow: str, tasks: int, key: str | None) -> None:
        """A user is told that a submission will not be lost."""
        self.acknowledged[workflow] = tasks
        if key is None:
            return
        first = self.keys.setdefault(key, workflow)
        if first != workflow and not {first, workflow} & self.duplicates:
            raise Violation(f"{key} was submitted twice, and is {first} and {workflow}")

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
            lines = self.lines(workflow)  # (that they came to an end the world has seen to)
            story = lines[0]
            if story.ended == VOID:
                raise Violation(f"{workflow} was acknowledged, and is void")
            if story.ended == "succeeded" and len(story.won) != tasks:
                raise Violation(f"{workflow} succeeded with {len(story.won)} of {tasks} results")
            ignored = workflow in self.cancelled and story.ended != "cancelled"
            if ignored and len(lines) == 1:  # (one of several was told to another line)
                raise Violation(f"{workflow}: a cancel that was acknowledged had no effect")

    def serves(self, workflow: str, index: int, view: dict[str, Any], files: Files) -> None:
        """In the end: what one peer tells of a workflow is what holds, and the same everywhere.

        So what users were told stays true: an end that a majority agreed on holds against all that
        a home without one may have made of it."""
        if workflow in self.duplicates:
            return
        story = self.lines(workflow)[0]
        if (view["state"], view["ended_at"]) != (story.ended, story.ended_at):
            said = f"{view['state']} at {view['ended_at']}"
            holds = f"{story.ended} at {story.ended_at}"
            raise Violation(f"{workflow}: peer {index} says {said}, and {holds} holds")
        if files != self.served.setdefault(workflow, files):
            raise Violation(f"{workflow}: peer {index} has other files of it than others have")


def _settled(story: _Story, ended: Outcome) -> bool:
    """This result counts in that line, or is of no use to it any more."""
    task = ended.key.task
    anew = RANK in task and (task, ended.key.number) in story.given_back  # with its gang
    needless = bool(story.ended) or story.cancelled or task in story.given_up
    return needless or anew or task in story.ever_won
