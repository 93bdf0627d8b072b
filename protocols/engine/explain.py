"""In words: what an unfinished task waits for."""

from __future__ import annotations

from ..strategies.base import Strategy
from ..wire.messages import AttemptKey
from .journal import Journal
from .run import Run, TaskState

NAMED_MAX = 5
#: by a peer that has heard of a home with a higher epoch
FENCED = "another peer is its workflow's home by now"


def waiting_for(run: Run, task: TaskState, journal: Journal, strategy: Strategy) -> str:
    if journal.trouble:
        return f"the home's journal can't be written: {journal.trouble}"
    unkept = journal.keeping.unkept(run.id)
    if unkept:
        return unkept
    if task.state == "running":
        attempt = task.attempt(task.number)
        return f"it runs on peer {attempt.peer.hex()[:8]}" if attempt else "it runs"
    if task.state == "retrying":
        return f"it is tried again soon, after: {task.reason}"
    if task.state == "pending":
        key = AttemptKey(run.id, task.id, task.number + 1)
        return strategy.waiting_for(key) or "a peer has been found for it"
    return _inputs(run, task)


def _inputs(run: Run, task: TaskState) -> str:
    reasons = _missing(run, task)
    for other in run.workflow.tasks[task.id].gang if not reasons else ():
        reasons = [
            f"{other}, which runs at once with it: {r}" for r in _missing(run, run.tasks[other])
        ]
        if reasons:
            break
    if not reasons:
        return "what it takes is there, and is being agreed on by the journal's keepers"
    shown = "; ".join(reasons[:NAMED_MAX])
    more = len(reasons) - NAMED_MAX
    return f"{shown}; and {more} more" if more > 0 else shown


def _missing(run: Run, task: TaskState) -> list[str]:
    spec = run.workflow.tasks[task.id]
    reasons = [f"input {n}: {run.unstaged[n]}" for n in spec.inputs if n in run.unstaged]
    makers = {run.workflow.producers.get(n): n for n in spec.inputs}
    for parent in run.workflow.parents[task.id]:
        above = run.tasks[parent]
        if above.state != "succeeded":
            made = makers.get(parent)
            what = f"input {made} is made by {parent}" if made else f"{parent} comes first"
            reasons.append(f"{what} ({above.state})")
    if not reasons and run.levels and run.levels[task.id] > run.level:
        left = run.left_in[run.level]
        tasks = "task of it is" if left == 1 else "tasks of it are"
        reasons.append(f"levels are strict, and {left} {tasks} not done: level {run.level + 1}")
    return reasons
