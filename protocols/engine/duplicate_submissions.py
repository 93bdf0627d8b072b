"""Resolves duplicate submissions: one Idempotency-Key, used at two peers that could not reach each
other, makes two workflows of one name.

Once the peers reach each other, executing peers follow the home with the higher epoch and refuse
the other one. That one then looks for its duplicate and makes way. Epochs only grow, and a home
makes way only for a higher one: so the two never both give up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ..consensus.keeping import Keeping
from .run import Run

FENCED_S = 2.0  # between two searches for the other home

#: workflow, birth and epoch of this one → the peer that goes on with its duplicate
FindDuplicate = Callable[[str, int, int], Awaitable[bytes | None]]


async def _nobody(workflow: str, birth: int, epoch: int) -> bytes | None:
    return None


class DuplicateSubmissions:
    def __init__(
        self,
        keeping: Keeping,
        is_active: Callable[[Run], bool],
        cancel: Callable[[Run, str], None],
    ) -> None:
        self.find: FindDuplicate = _nobody
        self._keeping = keeping
        self._is_active = is_active
        self._cancel = cancel
        self._looking: set[str] = set()

    async def look(self, run: Run) -> None:
        """Looks for the duplicate, as another home of that name was heard of. (If this home has
        been deposed, it will hear of that otherwise.)"""
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
                    "duplicate submission: the same Idempotency-Key was used at two peers that "
                    f"could not reach each other; peer {duplicate.hex()[:8]} runs the workflow",
                )
        finally:
            await asyncio.sleep(FENCED_S)
            self._looking.discard(run.id)
