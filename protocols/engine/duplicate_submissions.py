"""Two workflows of one name: one Idempotency-Key, submitted at two peers that did not hear of each
other. Once they do, executing peers follow the higher epoch and refuse the other home; that one
then looks for its duplicate and makes way. Epochs only grow, and only to the higher one is made
way: never do both give up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ..consensus.keeping import Keeping
from .run import Run

FENCED_S = 2.0  # between two looks for the other home

#: workflow, birth and epoch of this one → the peer that goes on with another of that name
FindTwin = Callable[[str, int, int], Awaitable[bytes | None]]


async def _nobody(workflow: str, birth: int, epoch: int) -> bytes | None:
    return None


class DuplicateSubmissions:
    def __init__(
        self,
        keeping: Keeping,
        is_active: Callable[[Run], bool],
        cancel: Callable[[Run, str], None],
    ) -> None:
        self.find: FindTwin = _nobody
        self._keeping = keeping
        self._is_active = is_active
        self._cancel = cancel
        self._looking: set[str] = set()

    async def look(self, run: Run) -> None:
        """Another home of that name was heard of. (If this one is deposed, it will hear so.)"""
        if run.id in self._looking or not self._is_active(run):
            return
        self._looking.add(run.id)
        try:
            replica, epoch = self._keeping.replicas.get(run.id), self._keeping.epoch(run.id)
            duplicate = await self.find(run.id, replica.birth, epoch) if replica else None
            same = self._is_active(run) and self._keeping.epoch(run.id) == epoch
            if duplicate is not None and same and not run.over and not run.cancelling:
                self._cancel(
                    run,
                    "one Idempotency-Key was submitted at two peers that did not hear of each "
                    f"other: peer {duplicate.hex()[:8]} goes on with it",
                )
        finally:
            await asyncio.sleep(FENCED_S)
            self._looking.discard(run.id)
