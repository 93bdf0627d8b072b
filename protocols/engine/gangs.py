"""A gang's tasks run at once, at different peers: all of them, or none.

Rules, kept by looking at the states of the whole gang whenever one of them has changed:
- If one is to be tried again, all are: what still runs is given up, what has succeeded counts no
  more. (Nothing hangs on it yet: who comes after a gang comes after all of it.)
- If one has failed for good, those that have not ended will never be of use.
- A result counts only for an attempt that was not given up; so all results of a gang are of
  attempts that were begun together.
- One that fails may have failed because another was lost with its peer: those are asked first. A
  lost peer is no failure of the task.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ..membership.members import Members
from ..strategies.base import Unit
from ..wire.entries import LostAttempt, ReopenedTask, SkippedTask
from ..wire.messages import AttemptKey, Inquire, Inquired, Outcome
from ..wire.rpc import CallFailed, Rpc
from .run import FINAL, Run

JUDGE_S = 2.0
REASON_MAX = 2000


@dataclass(slots=True)
class Mending:
    """What is to be written, and done, so that a gang, or a branch, is of one mind."""

    lost: list[LostAttempt] = field(default_factory=list)
    reopened: list[ReopenedTask] = field(default_factory=list)  # their failures still count
    skipped: list[SkippedTask] = field(default_factory=list)
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
                found.skipped.append(SkippedTask(task, "skipped", why))
                found.running += running_of(run, task)
    elif again and len(again) < len(gang):
        why = f"begins anew with {again[0]}: {run.tasks[again[0]].reason}"
        for task, state in states.items():
            if state == "running":
                number = run.tasks[task].number
                found.lost.append(LostAttempt(task, number, why, "retrying", False))
                found.running += running_of(run, task)
            elif state == "succeeded":
                found.reopened.append(ReopenedTask(task, why))
            elif state == "pending":
                found.unplaced.append(task)
    return found


def running_of(run: Run, task: str) -> list[tuple[str, int, bytes]]:
    return [(task, a.number, a.peer) for a in run.tasks[task].attempts if a.state == "running"]


class Company:
    """Of those that run at once: what one is told of the others, and whether they are there."""

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
        """As it is, or handed back, if another was lost."""
        gang = run.workflow.tasks[ended.key.task].gang
        if ended.kind != "failed" or not gang:
            return ended
        others = [run.tasks[name] for name in gang if name != ended.key.task]
        running = [(t.id, a) for t in others if (a := t.attempt(t.number)) and a.state == "running"]
        keys = [AttemptKey(run.id, name, a.number) for name, a in running]
        asks = (self._runs_there(k, a.peer, run) for k, (_, a) in zip(keys, running, strict=True))
        for (name, _), there in zip(running, await asyncio.gather(*asks), strict=True):
            if not there:
                reason = f"{ended.reason}; {name} is lost with its peer, and all begin anew"
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
