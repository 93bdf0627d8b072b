"""The engine's decisions as text: what happens to a workflow, and the effects that follow.

Each file in `scenarios/` is a story of one workflow. A step is a line with a command, perhaps with
more lines below; after `----` come its effects. `python -m tests.test_scenarios` rewrites the effects
as they are now: read the difference before you commit it.

Commands (a unit is `task/attempt`; a peer is one letter):

    workflow                     the document below, submitted
    place [tasks]                ready tasks are placed
    start unit peer …            units have got a lease
    take peer [stale] / rows     outcomes: `unit ok [file …]`, `unit failed [cause=…]`,
                                 `unit returned [begun] [cause=…] [missing=file]`
    commit [count]               pending entries are committed, the oldest first
    lose [unbegun] unit …        attempts that will not report
    gone peer                    a peer that may hold files is gone
    back peer                    it is back
    staged file peer …           an input has been fetched
    unstaged file why            an input can't be fetched
    again task                   a task has waited long enough to be retried
    cancel why                   the user cancels the workflow
    tasks                        shows the states of all tasks
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from valence.protocols.engine import effects
from valence.protocols.engine.decisions import Decision
from valence.protocols.engine.run import Run, TaskState
from valence.protocols.engine.work import read_document
from valence.protocols.strategies.base import Placed, Placement, Unit
from valence.protocols.wire.entries import (
    AttemptsFinished,
    InputReason,
    InputsStaged,
    StagedFile,
    Submitted,
)
from valence.protocols.wire.messages import AttemptKey, Contact, File, Outcome

STORIES = Path(__file__).parent / "scenarios"
SIZE = 1 << 20
ME = "h"


def peer(letter: str) -> bytes:
    return letter.encode() * 20


def letter(peer: bytes) -> str:
    return peer[:1].decode()


def hash_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


class Story:
    """A workflow, its surroundings, and the entries that are not committed yet."""

    near_bytes_min = SIZE

    def __init__(self) -> None:
        self.run: Run | None = None
        self.clock = 100.0
        self.absent: set[bytes] = set()
        self.able = {peer(name) for name in "abc"}
        self.pending: deque[effects.WhenCommitted | None] = deque()
        self.units: dict[str, Unit] = {}

    # ----------------------------------------------------------------- what a decision asks

    def now(self) -> float:
        self.clock += 1
        return self.clock

    def may_place(self) -> bool:
        return True

    def holds(self, hash: bytes) -> bool:
        return False

    def is_me(self, peer: bytes) -> bool:
        return letter(peer) == ME

    def boot(self, peer: bytes) -> int:
        return 1

    def is_held(self, file: File | None) -> bool:
        return file is not None and any(peer not in self.absent for peer in file.holders)

    def could_run(self, run: Run, task: TaskState) -> set[bytes]:
        return self.able - self.absent

    def deadline_at(self, run: Run) -> float | None:
        return None

    # ----------------------------------------------------------------- steps

    def do(self, line: str, rows: list[str]) -> list[str]:
        command, *words = shlex.split(line)
        if command == "workflow":
            return self._workflow("\n".join(rows))
        assert self.run is not None, "a story begins with its workflow"
        if command == "tasks":
            return [self._task(task) for task in self.run.tasks.values()]
        if command in ("gone", "back"):
            change = self.absent.add if command == "gone" else self.absent.discard
            change(peer(words[0]))
            if command == "back":
                return []
        decide = Decision(self.run, self, 1)
        getattr(self, f"_{command}")(decide, words, rows)
        return [line for effect in decide.effects for line in self._shown(effect)]

    def _workflow(self, text: str) -> list[str]:
        self.run = Run("w", read_document(text.encode(), {}), self.clock, peer(ME), "ada")
        first = Submitted(
            name="w", owner="ada", tasks=len(self.run.tasks), options="{}", parts=1, zipped=False,
            document=b"",
        )  # fmt: skip
        self.run.apply(first, self.clock, 1)
        return [f"{len(self.run.tasks)} tasks"]

    def _place(self, decide: Decision, words: list[str], rows: list[str]) -> None:
        decide.place_ready([decide.run.tasks[name] for name in words] or None)

    def _start(self, decide: Decision, words: list[str], rows: list[str]) -> None:
        record = Placement("probe")
        pairs = zip(words[::2], words[1::2], strict=True)
        units = [(self.units[unit]._replace(key=self._key(unit)), where) for unit, where in pairs]
        decide.start([Placed(u, Contact(peer(where), "", 0), 0, record) for u, where in units])

    def _take(self, decide: Decision, words: list[str], rows: list[str]) -> None:
        epoch = 0 if "stale" in words else 1
        decide.take(peer(words[0]), [self._outcome(row, epoch) for row in rows])

    def _outcome(self, row: str, epoch: int) -> Outcome:
        unit, kind, *more = shlex.split(row)
        said = dict(word.split("=") for word in more if "=" in word)
        files = [word for word in more if "=" not in word and word != "begun"]
        begun = 0.0 if kind == "returned" and "begun" not in more else 10.0
        return Outcome(
            self._key(unit), kind, said.get("reason", "" if kind == "ok" else f"it {kind}"),
            outputs=tuple(File(name, hash_of(name), SIZE, ()) for name in files),
            started_at=begun, ended_at=begun and begun + 2.0,
            epoch=epoch, cause=said.get("cause", ""),
            missing=(hash_of(said["missing"]),) if "missing" in said else (),
        )  # fmt: skip

    def _commit(self, decide: Decision, words: list[str], rows: list[str]) -> None:
        for _ in range(int(words[0]) if words else len(self.pending)):
            match self.pending.popleft():
                case effects.ResultsCount() as event:
                    decide.results_count(event, not decide.run.over)
                case effects.InputsCount() as event:
                    decide.inputs_count(event, not decide.run.over)
                case effects.CancelCounts() as event:
                    decide.cancel_counts(event)

    def _lose(self, decide: Decision, words: list[str], rows: list[str]) -> None:
        begun = "unbegun" not in words
        keys = [self._key(word) for word in words if word != "unbegun"]
        decide.lose([(key, "its peer died") for key in keys], begun)

    def _gone(self, decide: Decision, words: list[str], rows: list[str]) -> None:
        decide.reopen_lost(peer(words[0]))

    def _staged(self, decide: Decision, words: list[str], rows: list[str]) -> None:
        file = StagedFile(words[0], hash_of(words[0]), SIZE, tuple(map(peer, words[1:])))
        decide.staged(InputsStaged(files=(file,), failed=()))

    def _unstaged(self, decide: Decision, words: list[str], rows: list[str]) -> None:
        decide.staged(InputsStaged(files=(), failed=(InputReason(words[0], words[1]),)))

    def _again(self, decide: Decision, words: list[str], rows: list[str]) -> None:
        decide.place_again(words[0])

    def _cancel(self, decide: Decision, words: list[str], rows: list[str]) -> None:
        decide.cancel(" ".join(words))

    @staticmethod
    def _key(unit: str) -> AttemptKey:
        task, _, number = unit.rpartition("/")
        return AttemptKey("w", task, int(number))

    # ----------------------------------------------------------------- what is shown

    def _task(self, task: TaskState) -> str:
        attempts = [f"{a.number} at {letter(a.peer)} {a.state}" for a in task.attempts]
        told = f" ({task.reason})" if task.reason else ""
        return f"{task.id} {task.state}{told}" + "".join(f", {words}" for words in attempts)

    def _shown(self, effect: effects.Effect) -> Iterator[str]:
        match effect:
            case effects.Append(said, _, soon, then):
                self.pending.append(then)
                yield f"append {self._entry(said)}" + (" (soon)" if soon else "")
            case effects.Place(units, gangs):
                for unit in (*units, *gangs):
                    names = [self._unit(key) for key in unit.gang or (unit.key,)]
                    self.units.update(dict.fromkeys(names, unit))
                    yield f"place {' + '.join(names)}" + self._wishes(unit)
            case effects.Start(placed):
                for one in placed:
                    yield f"start {self._unit(one.unit.key)} at {letter(one.peer.id)}"
            case effects.Withdraw(keys):
                if keys:
                    yield f"withdraw {' '.join(map(self._unit, keys))}"
            case effects.AbortAttempts(peer, keys):
                yield f"abort {' '.join(map(self._unit, keys))} at {letter(peer)}"
            case effects.Retry(task, wait_s):
                yield f"try {task} again after {wait_s:g} s"
            case effects.KeepTwice(tasks):
                yield f"keep twice what {' '.join(tasks)} made"
            case effects.Count() | effects.Observe() | effects.Deliver():
                pass  # figures; and a delivery is asked for with every result
            case effects.Conclude(state):
                yield f"conclude {state}"
            case _:
                yield type(effect).__name__

    @staticmethod
    def _unit(key: AttemptKey) -> str:
        return f"{key.task}/{key.number}"

    @staticmethod
    def _wishes(unit: Unit) -> str:
        near, avoid = ("".join(sorted(map(letter, peers))) for peers in (unit.near, unit.avoid))
        return (f" near {near}" if near else "") + (f" but not at {avoid}" if avoid else "")

    def _entry(self, said: Any) -> str:
        if isinstance(said, AttemptsFinished):
            rows = [
                f"{self._unit(r.outcome.key)} {r.verdict}"
                + (f" ({r.outcome.reason})" if r.outcome.reason else "")
                for r in said.outcomes
            ]
            rows += [f"{task} gets {size} bytes" for task, size in (said.memory or {}).items()]
            rows += [f"{task} goes on in another way" for task in said.instead or ()]
            return f"{said.kind}: {', '.join(rows)}"
        rows = []
        for name, value in said.__dict__.items():
            if isinstance(value, tuple) and name not in ("failed",):
                rows += [" ".join(self._word(word) for word in row) for row in value]
            elif isinstance(value, tuple):
                rows += [f"{name} {' '.join(self._word(word) for word in row)}" for row in value]
            elif isinstance(value, str):
                rows.append(value)
        return f"{said.kind}: {', '.join(filter(None, rows))}"

    @staticmethod
    def _word(word: Any) -> str:
        if isinstance(word, bytes):
            return letter(word) if len(word) == 20 else word.hex()[:4]
        if isinstance(word, tuple):
            return "".join(map(letter, word))
        return f"({word})" if isinstance(word, str) and " " in word else str(word)


# --------------------------------------------------------------------------- the files


def steps(text: str) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Of a story: the comment before a step, the step, and what it led to."""
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        comment = [line for line in lines if line.startswith("#")]
        rest = [line for line in lines if not line.startswith("#")]
        if not rest:
            yield comment, [], []
            continue
        at = rest.index("----") if "----" in rest else len(rest)
        yield comment, rest[:at], rest[at + 1 :]


def played(text: str) -> str:
    story, blocks = Story(), []
    for comment, step, _ in steps(text):
        led_to = ["----", *(story.do(step[0], step[1:]) or ["nothing"])] if step else []
        blocks.append("\n".join([*comment, *step, *led_to]))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", sorted(STORIES.glob("*.txt")), ids=lambda path: path.stem)
def test_what_happens_leads_to_what_is_written_there(path: Path) -> None:
    text = path.read_text()
    assert played(text) == text


def test_a_story_that_leads_elsewhere_is_noticed() -> None:
    text = (STORIES / "retries.txt").read_text()
    assert played(text.replace("after 0.2 s", "after 9 s")) != text.replace("0.2 s", "9 s")


if __name__ == "__main__":
    for path in sorted(STORIES.glob("*.txt")):
        text = path.read_text()
        now = played(text)
        if now != text:
            path.write_text(now)
            sys.stdout.write(f"{path.name} was rewritten\n")
