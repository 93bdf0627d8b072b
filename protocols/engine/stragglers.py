"""Tells a workflow's policies of tasks that take far longer than their like."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from ..wire.messages import AttemptKey
from .run import Run

CHECK_S = 1.0

#: an attempt beside which another is to be begun, and why
Beside = Callable[[AttemptKey, str], None]


#: of a peer, by its id
SpeedOf = Callable[[bytes], float]


class Slow:
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
        self._some = asyncio.Event()

    def begun(self, run: Run) -> None:
        if run.policies is not None and run.policies.wants_slow:
            self._some.set()

    async def watch(self) -> None:
        told: dict[AttemptKey, int] = {}
        while True:
            watched = [r for r in self._active() if r.policies and r.policies.wants_slow]
            if not watched:
                self._some.clear()
            await self._some.wait()
            await asyncio.sleep(CHECK_S)
            before, told = told, {}
            for run in watched:
                told |= self._tell(run, before)

    def _tell(self, run: Run, before: dict[AttemptKey, int]) -> dict[AttemptKey, int]:
        """At two, four, eight … times as long as usual; how often it was doubled by now."""
        told: dict[AttemptKey, int] = {}
        now = self._clock()
        for task in [t for t in run.tasks.values() if t.state == "running"]:
            key, typical_s = AttemptKey(run.id, task.id, task.number), run.runtime_s(task.id)
            attempt = task.attempt(task.number)
            if attempt is None or typical_s is None or run.workflow.tasks[task.id].gang:
                continue
            seconds = now - attempt.at
            typical_s /= self._speed_of(attempt.peer)  # there it takes so long
            times = int(math.log2(max(1.0, seconds / max(CHECK_S, typical_s))))
            told[key] = max(times, before.get(key, 0))
            if times <= before.get(key, 0) or run.policies is None:
                continue
            if run.policies.slow(task.id, len(task.attempts), seconds, typical_s):
                why = f"it runs for {seconds:.0f} s, its like took {typical_s:.1f} s"
                self._beside(key, f"{why}: by a policy it runs a second time")
        return told
