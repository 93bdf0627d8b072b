"""The workflows that a peer has in memory: those it is the home of, and some that have ended."""

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
ENDED_TASKS_MAX = 100_000  # of all ended workflows in memory: others are read from the journal

#: a journal with more entries is replayed in a thread, not on the event loop
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
        """This very object: when this peer is elected again, it makes another one."""
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

    def forget(self, workflow_id: str) -> None:
        self.active.pop(workflow_id, None)
        self._drop_ended(workflow_id)

    def _drop_ended(self, workflow_id: str) -> None:
        run = self._ended.pop(workflow_id, None)
        self._ended_tasks -= len(run.tasks) if run is not None else 0

    # ----------------------------------------------------------------- questions

    def remembered(self, workflow_id: str) -> Run | None:
        """A workflow whose home is here, or that ended here not long ago."""
        return self.active.get(workflow_id) or self._ended.get(workflow_id)

    def ended(self, workflow_id: str) -> Run | None:
        return self._ended.get(workflow_id)

    def knows(self, workflow_id: str) -> bool:
        return (
            workflow_id in self.active
            or workflow_id in self._ended
            or self._journal.is_over(workflow_id)
        )

    async def get(self, workflow_id: str) -> Run | None:
        """A workflow whose home is here, or that has ended and has a replica here."""
        run = self.remembered(workflow_id)
        if run is not None or not self._journal.is_over(workflow_id):
            return run
        material = self.material(workflow_id)
        if material is not None:
            run = await made(partial(rebuilt, material), is_large(material))
        if (
            run is not None
            and self.remembered(workflow_id) is None
            and self._journal.is_over(workflow_id)
        ):
            self.end(run)
        return self.remembered(workflow_id) or run

    def material(self, workflow_id: str) -> Material | None:
        """What a `Run` is rebuilt from; None if a part of its submission is missing here."""
        submission = self._journal.document(workflow_id)
        if submission is None:
            return None
        return workflow_id, submission, self._journal.read(workflow_id)


async def made(make: Callable[[], T], is_slow: bool) -> T:
    """Calls `make`; in a thread if that may take long."""
    return await asyncio.to_thread(make) if is_slow else make()


def is_large(material: Material) -> bool:
    _, (text, *_), entries = material
    return is_much(text) or len(entries) > ENTRIES_AT_ONCE_MAX


def rebuilt(material: Material) -> Run | None:
    """The run as its journal says; None if its document can't be read."""
    workflow_id, (text, options, submitted_at, owner), rows = material
    try:
        workflow = read_document(text, options)
    except Exception:
        log.exception("the document of %s can't be read any more", workflow_id)
        return None
    run = Run(workflow_id, workflow, submitted_at, b"", owner)
    run.to_be_promised = bool(options.get("promised"))
    for row in rows:
        run.apply(row.said, row.at, row.epoch)
        run.committed(row.said)
    return run
