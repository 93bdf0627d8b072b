"""The workflows that a peer has in memory: those whose home it is, and some that have ended."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from .journal import Journal, Recorded
from .run import Run
from .work import is_much, read_document

log = logging.getLogger("valence.home")

ENDED_MAX = 1000
ENDED_TASKS_MAX = 100_000  # of all that have ended: the others are read from the journal

#: a journal with more entries is read away from the loop
ENTRIES_AT_ONCE_MAX = 2000

T = TypeVar("T")

#: of a workflow: its id, its submission, its journal's entries
Material = tuple[str, tuple[bytes, dict[str, Any], float, str], list[Recorded]]


class Runs:
    def __init__(self, journal: Journal) -> None:
        self.active: dict[str, Run] = {}
        self._journal = journal
        self._ended: OrderedDict[str, Run] = OrderedDict()
        self._ended_tasks = 0

    def is_active(self, run: Run) -> bool:
        """This very object: after the home was lost and won again there is another."""
        return self.active.get(run.id) is run

    def begin(self, run: Run) -> None:
        self._drop_ended(run.id)
        self.active[run.id] = run

    def end(self, run: Run) -> None:
        """It is over, or was already when it was read."""
        self.active.pop(run.id, None)
        self._drop_ended(run.id)
        self._ended[run.id] = run
        self._ended_tasks += len(run.tasks)
        while len(self._ended) > 1 and (
            len(self._ended) > ENDED_MAX or self._ended_tasks > ENDED_TASKS_MAX
        ):
            self._drop_ended(next(iter(self._ended)))

    def forget(self, id: str) -> None:
        self.active.pop(id, None)
        self._drop_ended(id)

    def _drop_ended(self, id: str) -> None:
        run = self._ended.pop(id, None)
        self._ended_tasks -= len(run.tasks) if run is not None else 0

    # ----------------------------------------------------------------- questions

    def remembered(self, id: str) -> Run | None:
        """One whose home is here, or that ended here not long ago."""
        return self.active.get(id) or self._ended.get(id)

    def ended(self, id: str) -> Run | None:
        return self._ended.get(id)

    def knows(self, id: str) -> bool:
        return id in self.active or id in self._ended or self._journal.is_over(id)

    async def get(self, id: str) -> Run | None:
        """One whose home is here, or that has ended and of which a copy is here."""
        run = self.remembered(id)
        if run is not None or not self._journal.is_over(id):
            return run
        material = self.material(id)
        if material is not None:
            run = await made(partial(rebuilt, material), is_large(material))
        if run is not None and self.remembered(id) is None and self._journal.is_over(id):
            self.end(run)
        return self.remembered(id) or run

    def material(self, id: str) -> Material | None:
        """What its journal has of it, if all of its submission is there."""
        found = self._journal.document(id)
        return None if found is None else (id, found, self._journal.read(id))


async def made(make: Callable[[], T], much: bool) -> T:
    return await asyncio.to_thread(make) if much else make()


def is_large(material: Material) -> bool:
    _, (text, *_), entries = material
    return is_much(text) or len(entries) > ENTRIES_AT_ONCE_MAX


def rebuilt(material: Material) -> Run | None:
    """As its journal says; None if its document can't be read."""
    id, (text, options, submitted_at, owner), rows = material
    try:
        workflow = read_document(text, options)
    except Exception:
        log.exception("the document of %s can't be read any more", id)
        return None
    run = Run(id, workflow, submitted_at, b"", owner)
    for row in rows:
        run.apply(row.said, row.at, row.epoch)
        run.committed(row.said)
    return run
