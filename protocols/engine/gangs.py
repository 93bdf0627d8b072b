"""Keeps a gang together: its tasks run at the same time on different peers, all of them or none.

Rules, applied to the whole gang whenever the state of one of its tasks has changed:
- If one task is retried, all are: running attempts are given up, and results are dropped. (Nothing
  depends on those yet: whatever comes after a gang comes after all of it.)
- If one task has failed for good, the tasks that have not ended are skipped.
- A result counts only if its attempt was not given up. So all results of a gang come from attempts
  that were started together.
- A task may fail because another one was lost with its peer: so the peers of the others are asked
  first. A lost peer is no failure of the task.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ..membership.members import Members
from ..strategies.base import Unit
from ..wire.entries import LostAttempt, ReopenedTask, SkippedTask
from ..wire.messages import AttemptKey, Inquire, Inquired, Outcome
from ..wire.rpc import CallFailed, Rpc
from .run import FINAL, AttemptState, Run

JUDGE_S = 2.0
REASON_MAX = 2000


@dataclass(slots=True)
class Mending:
    """What must be written and done to bring all tasks of a gang, or a branch, into agreement."""

    lost: list[LostAttempt] = field(default_factory=list)
    reopened: list[ReopenedTask] = field(default_factory=list)  # their failures still count
    skipped: list[SkippedTask] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)  # tasks that must wait for a peer again
    running: list[tuple[str, int, bytes]] = field(default_factory=list)  # attempts to abort


def mend(run: Run, gang: tuple[str, ...]) -> Mending:
    failed = [task for task in gang if run.tasks[task].state in ("failed", "skipped")]
    again = [task for task in gang if run.tasks[task].state in ("waiting", "retrying")]
    if failed:
        return _skip(run, gang, f"it runs together with {failed[0]}, which failed")
    if again and len(again) < len(gang):
        why = f"starting over together with {again[0]}: {run.tasks[again[0]].reason}"
        return _start_over(run, gang, why)
    return Mending()


def _skip(run: Run, gang: tuple[str, ...], why: str) -> Mending:
    mending = Mending()
    for task in gang:
        if run.tasks[task].state not in FINAL:
            mending.skipped.append(SkippedTask(task, "skipped", why))
            mending.running += running_of(run, task)
    return mending


def _start_over(run: Run, gang: tuple[str, ...], why: str) -> Mending:
    mending = Mending()
    for task in gang:
        state = run.tasks[task].state
        if state == "running":
            number = run.tasks[task].number
            mending.lost.append(LostAttempt(task, number, why, "retrying", False))
            mending.running += running_of(run, task)
        elif state == "succeeded":
            mending.reopened.append(ReopenedTask(task, why))
        elif state == "pending":
            mending.unplaced.append(task)
    return mending


def running_of(run: Run, task: str) -> list[tuple[str, int, bytes]]:
    return [(task, a.number, a.peer) for a in run.tasks[task].attempts if a.state == "running"]


def _running_beside(run: Run, task: str) -> list[tuple[str, AttemptState]]:
    """The other tasks of its gang that are running, and their latest attempts."""
    others = [run.tasks[name] for name in run.workflow.tasks[task].gang if name != task]
    return [(t.id, a) for t in others if (a := t.attempt(t.number)) and a.state == "running"]


class Company:
    """Tells a gang's task where the others run, and asks whether they are still running."""

    def __init__(self, rpc: Rpc, members: Members) -> None:
        self._rpc = rpc
        self._members = members

    def environment(self, run: Run, unit: Unit) -> list[tuple[str, str]]:
        attempts = [run.tasks[key.task].attempt(key.number) for key in unit.gang]
        contacts = [self._members.contact(a.peer) if a is not None else None for a in attempts]
        return [
            ("VALENCE_RANK", str(unit.gang.index(unit.key))),
            ("VALENCE_PEERS", str(len(unit.gang))),
            ("VALENCE_HOSTS", ",".join(c.host if c is not None else "" for c in contacts)),
        ]

    async def judged(self, run: Run, ended: Outcome) -> Outcome:
        """The outcome as it is; or handed back, if another task of the gang was lost."""
        gang = run.workflow.tasks[ended.key.task].gang
        if ended.kind != "failed" or not gang:
            return ended
        running = _running_beside(run, ended.key.task)
        asks = (self._runs_there(AttemptKey(run.id, n, a.number), a.peer, run) for n, a in running)
        for (name, _), there in zip(running, await asyncio.gather(*asks), strict=True):
            if not there:
                lost = f"{name} was lost with its peer, so all tasks of the gang start over"
                reason = f"{ended.reason}; {lost}"
                return ended._replace(kind="returned", reason=reason[:REASON_MAX])
        return ended

    async def _runs_there(self, key: AttemptKey, peer: bytes, run: Run) -> bool:
        contact = self._members.contact(peer)
        message = Inquire(keys=(key,), epochs=((run.id, run.epoch),))
        try:
            if contact is None or not self._members.is_here(peer):
                return False
            answer = await self._rpc.call(contact, message, Inquired, JUDGE_S)
        except CallFailed:
            return False
        return answer.states != ("unknown",)
