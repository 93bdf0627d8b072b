"""Moves all tasks of a branch from one alternative to the next together.

Rules, applied to the whole branch whenever one of its tasks, or the workflow's home, has changed:
- What an earlier alternative has made is dropped, its running attempts are given up, and tasks that
  wait for a peer wait again, with the needs of the new alternative.
- A result counts only if its attempt was started in the branch's present alternative (`judge`).
"""

from __future__ import annotations

from ..wire.entries import LostAttempt, ReopenedTask
from .gangs import Mending, running_of
from .run import Run


def mend_branch(run: Run, branch: str) -> Mending:
    mending = Mending()
    for name in run.branches[branch]:
        task, way = run.tasks[name], run.ways[name]
        why = f"branch {branch} has moved on to another alternative"
        if task.state == "succeeded" and task.won_way < way:
            mending.reopened.append(ReopenedTask(name, why))
        elif task.state == "running":
            attempt = task.attempt(task.number)
            if attempt is not None and attempt.way < way:
                mending.lost.append(LostAttempt(name, task.number, why, "retrying", False))
                mending.running += running_of(run, name)
        elif task.state == "pending" and task.asked_way < way:
            mending.unplaced.append(name)
    return mending
