"""Tells a workflow's policies about stragglers: tasks that run far longer than similar ones."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from ..wire.messages import AttemptKey
from .run import Run

CHECK_S = 1.0

#: begins a second attempt beside this one, for this reason
Beside = Callable[[AttemptKey, str], None]
#: the speed of a peer, by its id
SpeedOf = Callable[[bytes], float]


class Stragglers:
    def __init__(
        self,
        active: Callable[[], list[Run]],
        clock: Callable[[], float],
        speed_of: SpeedOf,
        beside: Beside,
    ) -> None:
        self._active = active
        self._speed_of = speed_of
        self._clock = clock
        self._beside = beside
        self._any = asyncio.Event()

    def begun(self, run: Run) -> None:
        if run.policies is not None and run.policies.wants_slow:
            self._any.set()

    async def watch(self) -> None:
        doublings: dict[AttemptKey, int] = {}
        while True:
            watched = [r for r in self._active() if r.policies and r.policies.wants_slow]
            if not watched:
                self._any.clear()
            await self._any.wait()
            await asyncio.sleep(CHECK_S)
            before, doublings = doublings, {}
            for run in watched:
                doublings |= self._tell(run, before)

    def _tell(self, run: Run, before: dict[AttemptKey, int]) -> dict[AttemptKey, int]:
        """Tells at two, four, eight … times the usual duration. Returns how often each running
        attempt has doubled it by now."""
        doublings: dict[AttemptKey, int] = {}
        now = self._clock()
        for task in [t for t in run.tasks.values() if t.state == "running"]:
            key, typical_s = AttemptKey(run.id, task.id, task.number), run.runtime_s(task.id)
            attempt = task.attempt(task.number)
            if attempt is None or typical_s is None or run.workflow.tasks[task.id].gang:
                continue
            seconds = now - _begun_at(run, task.id, attempt.at)
            typical_s /= self._speed_of(attempt.peer)
            doubled = int(math.log2(max(1.0, seconds / max(CHECK_S, typical_s))))
            doublings[key] = max(doubled, before.get(key, 0))
            if doubled <= before.get(key, 0) or run.policies is None:
                continue
            if run.policies.slow(task.id, len(task.attempts), seconds, typical_s):
                why = f"it has run for {seconds:.0f} s, similar tasks took {typical_s:.1f} s"
                self._beside(key, f"{why}: a policy starts a second attempt")
        return doublings


def _begun_at(run: Run, task: str, sent_at: float) -> float:
    """(A promised task may be sent to its peer long before its slot.)"""
    slot = run.promise.slots.get(task) if run.promise is not None else None
    return sent_at if slot is None else max(sent_at, slot.start_at)
