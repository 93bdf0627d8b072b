"""The tasks of a branch go from one of their alternatives to the next together.

Rules, kept by looking at the whole branch whenever one of its tasks has changed, or its home has:
- What has succeeded in an earlier way counts no more, what runs in one is given up, what waits for
  a peer waits anew: with the needs of the new way.
- A result counts only if its attempt was begun in the way that the branch is at (`judge`).
"""

from __future__ import annotations

from ..wire.entries import LostAttempt, ReopenedTask
from .gangs import Mending, running_of
from .run import Run


def mend_branch(run: Run, branch: str) -> Mending:
    found = Mending()
    for name in run.branches[branch]:
        task, way = run.tasks[name], run.ways[name]
        why = f"its branch {branch} is done in another way"
        if task.state == "succeeded" and task.won_way < way:
            found.reopened.append(ReopenedTask(name, why))
        elif task.state == "running":
            attempt = task.attempt(task.number)
            if attempt is not None and attempt.way < way:
                found.lost.append(LostAttempt(name, task.number, why, "retrying", False))
                found.running += running_of(run, name)
        elif task.state == "pending" and task.asked_way < way:
            found.unplaced.append(name)
    return found
