"""A gang's tasks run at once, at different peers: all of them, or none. Pure.

Rules, kept by looking at the states of the whole gang whenever one of them has changed:
- If one is to be tried again, all are: what still runs is given up, what has succeeded counts no
  more. (Nothing hangs on it yet: who comes after a gang comes after all of it.)
- If one has failed for good, those that have not ended will never be of use.
- A result counts only for an attempt that was not given up; so all results of a gang are of
  attempts that were begun together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .run import FINAL, Run


@dataclass(slots=True)
class Mending:
    """What is to be written, and done, so that a gang is of one mind."""

    lost: list[tuple[str, int, str, str, bool]] = field(default_factory=list)
    reopened: list[tuple[str, str]] = field(default_factory=list)  # their failures still count
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)  # waiting for peers: they are to wait again
    running: list[tuple[str, int, bytes]] = field(default_factory=list)  # attempts to be ended


def mend(run: Run, gang: tuple[str, ...]) -> Mending:
    found = Mending()
    states = {task: run.tasks[task].state for task in gang}
    failed = [task for task, state in states.items() if state in ("failed", "skipped")]
    again = [task for task, state in states.items() if state in ("waiting", "retrying")]
    if failed:
        why = f"it runs at once with {failed[0]}, which failed"
        for task, state in states.items():
            if state not in FINAL:
                found.skipped.append((task, "skipped", why))
                found.running += _running(run, task)
    elif again and len(again) < len(gang):
        why = f"begins anew with {again[0]}: {run.tasks[again[0]].reason}"
        for task, state in states.items():
            if state == "running":
                found.lost.append((task, run.tasks[task].number, why, "retrying", False))
                found.running += _running(run, task)
            elif state == "succeeded":
                found.reopened.append((task, why))
            elif state == "pending":
                found.unplaced.append(task)
    return found


def _running(run: Run, task: str) -> list[tuple[str, int, bytes]]:
    return [(task, a.number, a.peer) for a in run.tasks[task].attempts if a.state == "running"]
