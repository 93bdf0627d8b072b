"""What an outcome means for its task: one decision, from what the run knows and what was reported.

| what was reported | what it means |
| --- | --- |
| of an attempt that nobody gave out, that another home gave out, or that was given up | nothing |
| of a task that is over | nothing: the first result that counts has won |
| a failure, or a return, of an attempt that is not the latest | nothing: another one is under way |
| ok | succeeded |
| failed, with retries left, or with a policy that wants another try | retrying |
| failed | failed |
| returned | returned: the peer could not run it, which does not count against the task … |
| returned, for the thirty-first time after it had begun | failed |
| returned, as every peer that could run it has too little room | failed |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..wire.messages import Outcome
from .outcomes import NO_ROOM
from .run import FINAL, Run, TaskState

LOSSES_MAX = 30
REASON_MAX = 2000
WON = "succeeded"


@dataclass(frozen=True, slots=True)
class Verdict:
    state: str  # succeeded, failed, retrying or returned
    reason: str
    memory_bytes: int = 0  # what a policy gives the task from now on
    instead: bool = False  # it goes on in its next alternative


def counts(run: Run, peer: bytes, ended: Outcome) -> bool:
    """False: it is ignored."""
    task = run.tasks[ended.key.task]
    attempt = task.attempt(ended.key.number)
    if task.state in FINAL or attempt is None:
        return False
    if (attempt.peer, attempt.epoch) != (peer, ended.epoch):
        return False  # of an attempt that has its number by chance: another home gave it out
    spec = run.workflow.tasks[task.id]
    if spec.branch and attempt.way != run.ways[task.id]:
        return False  # its branch is done in another way by now
    if ended.kind == "ok":
        # a result counts after its attempt was given up, too; not so in a gang, which began anew
        return attempt.state == "running" or not spec.gang
    return attempt.state == "running" and ended.key.number == task.number


def judge(
    run: Run, peer: bytes, ended: Outcome, could_run: Callable[[TaskState], set[bytes]]
) -> Verdict:
    """Of an outcome that counts. `could_run`: peers whose capacity suffices, and that are here."""
    task = run.tasks[ended.key.task]
    state, reason = run.verdict(ended), ended.reason
    again = run.consider(ended)
    if again is not None:
        reason = f"{reason}; {again.why}"[:REASON_MAX]
        return Verdict("retrying", reason, again.memory_bytes, again.instead)
    if state == "returned" and ended.started_at and task.losses >= LOSSES_MAX:
        state = "failed"
    if state == "returned" and ended.cause == NO_ROOM:
        refused = {a.peer for a in task.attempts if a.outcome and a.outcome.cause == NO_ROOM}
        if could_run(task) <= refused | {peer}:
            state = "failed"
    return Verdict(state, reason)
