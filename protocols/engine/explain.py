"""Tells users what an unfinished task is waiting for.

Each text is a whole sentence in a user's words. It is shown behind the task's state, so it need not
repeat that.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..strategies.base import Strategy
from ..wire.messages import AttemptKey
from .journal import Journal
from .run import Run, TaskState

NAMED_MAX = 5
#: how a peer refuses a home if it has heard of one with a higher epoch. The text is part of the
#: protocol, as homes compare it
FENCED = "another peer is its workflow's home by now"


def waiting_for(run: Run, task: TaskState, journal: Journal, strategy: Strategy) -> str:
    if journal.trouble:
        return f"this workflow's journal can't be written: {journal.trouble}"
    unkept = journal.keeping.unkept(run.id)
    if unkept:
        return unkept
    if task.state == "running":
        attempt = task.attempt(task.number)
        return f"running on peer {attempt.peer.hex()[:8]}" if attempt else "running"
    if task.state == "retrying":
        return f"will be retried soon; the last attempt: {task.reason}"
    if task.state == "pending":
        key = AttemptKey(run.id, task.id, task.number + 1)
        return strategy.waiting_for(key) or "a peer has been found; about to start there"
    return _why_not_ready(run, task)


def _why_not_ready(run: Run, task: TaskState) -> str:
    reasons = _missing(run, task) or _missing_of_gang(run, task)
    if not reasons:
        return (
            "ready to start once a majority of the journal's replicas has committed "
            "everything that it depends on"
        )
    shown = "; ".join(reasons[:NAMED_MAX])
    more = len(reasons) - NAMED_MAX
    return f"{shown}; and {more} more" if more > 0 else shown


def _missing_of_gang(run: Run, task: TaskState) -> list[str]:
    """What the first unready task of its gang waits for."""
    for other in run.workflow.tasks[task.id].gang:
        reasons = [
            f"{other}, which must start at the same time: {reason}"
            for reason in _missing(run, run.tasks[other])
        ]
        if reasons:
            return reasons
    return []


def _missing(run: Run, task: TaskState) -> list[str]:
    reasons = [*_missing_inputs(run, task), *_unfinished_parents(run, task)]
    return reasons or list(_unfinished_level(run, task))


def _missing_inputs(run: Run, task: TaskState) -> Iterator[str]:
    for name in run.workflow.tasks[task.id].inputs:
        if name in run.unstaged:
            yield f"input {name}: {run.unstaged[name]}"


def _unfinished_parents(run: Run, task: TaskState) -> Iterator[str]:
    made_by = {run.workflow.producers.get(n): n for n in run.workflow.tasks[task.id].inputs}
    for parent in run.workflow.parents[task.id]:
        state = run.tasks[parent].state
        if state == "succeeded":
            continue
        made = made_by.get(parent)
        if made:
            yield f"input {made} comes from {parent}, which is {state}"
        else:
            yield f"{parent}, which is {state}, must finish first"


def _unfinished_level(run: Run, task: TaskState) -> Iterator[str]:
    if run.levels and run.levels[task.id] > run.level:
        left = run.left_in[run.level]
        tasks = "1 task" if left == 1 else f"{left} tasks"
        yield f"levels are strict, and level {run.level + 1} still has {tasks} to finish"
