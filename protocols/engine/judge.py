"""Decides what a reported outcome means for its task.

| outcome | meaning |
| --- | --- |
| of an attempt that was never started, that another home started, or that was given up | nothing |
| of a task that is over | nothing: the first result has won |
| a failure, or a return, of an attempt that is not the latest | nothing: another one is under way |
| ok | succeeded |
| failed, with retries left, or a policy that asks for another try | retrying |
| failed | failed |
| returned | returned: the peer could not run it, which does not count against the task … |
| returned after it had begun, for the thirty-first time | failed |
| returned, because every peer that could run it has too little disk space | failed |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..wire.messages import Outcome
from .outcomes import NO_ROOM
from .run import FINAL, Run, TaskState

LOSSES_MAX = 30
REASON_MAX = 2000
WON = "succeeded"


class Verdict(NamedTuple):
    state: str  # succeeded, failed, retrying or returned
    reason: str
    memory_bytes: int = 0  # that a policy gives the task from now on
    instead: bool = False  # the task goes on in its next alternative


def counts(run: Run, peer: bytes, ended: Outcome) -> bool:
    """False: the outcome is ignored."""
    task = run.tasks[ended.key.task]
    attempt = task.attempt(ended.key.number)
    if task.state in FINAL or attempt is None:
        return False
    if (attempt.peer, attempt.epoch) != (peer, ended.epoch):
        return False  # another home started an attempt with the same number by chance
    spec = run.workflow.tasks[task.id]
    if spec.branch and attempt.way != run.ways[task.id]:
        return False  # its branch is at another alternative by now
    if ended.kind == "ok":
        # a result counts even after its attempt was given up; not in a gang, which began again
        return attempt.state == "running" or not spec.gang
    return attempt.state == "running" and ended.key.number == task.number


def judge(
    run: Run, peer: bytes, ended: Outcome, could_run: Callable[[TaskState], set[bytes]]
) -> Verdict:
    """The verdict on an outcome that counts. `could_run`: the peers of the cluster whose capacity
    suffices for a task."""
    if ended.kind == "ok":
        return Verdict(WON, ended.reason)
    task = run.tasks[ended.key.task]
    state, reason = run.verdict(ended), ended.reason
    again = run.consider(ended)
    if again is not None:
        reason = f"{reason}; {again.why}"[:REASON_MAX]
        return Verdict("retrying", reason, again.memory_bytes, again.instead)
    if state == "returned" and ended.started_at and task.losses >= LOSSES_MAX:
        state = "failed"
    if state == "returned" and _no_peer_has_room(task, peer, ended, could_run):
        state = "failed"
    return Verdict(state, reason)


def _no_peer_has_room(
    task: TaskState, peer: bytes, ended: Outcome, could_run: Callable[[TaskState], set[bytes]]
) -> bool:
    """Every peer that could run it has returned it for want of disk space."""
    if ended.cause != NO_ROOM:
        return False
    refused = {a.peer for a in task.attempts if a.outcome and a.outcome.cause == NO_ROOM}
    return could_run(task) <= refused | {peer}
