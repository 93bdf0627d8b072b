"""Turns the leases that strategies obtained into attempts: journaled, then sent to their peers.

Rules:
- A lease for a task that needs none any more is returned at once.
- Every attempt is journaled with its peer before another peer is told to run it; this very peer's
  attempts wait for nothing (`dispatch`).
- An attempt whose inputs have been lost meanwhile is given up, and its task is placed again.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from ..strategies.base import Estimate, Placed
from ..wire.messages import CHECKED_WORK, AttemptKey, Contact, ReturnLeases, Work
from ..wire.rpc import Rpc
from .dispatch import Dispatch
from .gangs import Company
from .journal import Journal
from .losses import Losses
from .outstanding import Outstanding
from .performer import Decide
from .run import FINAL, Run
from .runs import Runs
from .targets import Targets
from .work import make_work

log = logging.getLogger("valence.home")

CANT_SEND_MAX = 1000  # characters of the reason


class Placements:
    def __init__(
        self,
        *,
        rpc: Rpc,
        runs: Runs,
        journal: Journal,
        outstanding: Outstanding,
        losses: Losses,
        company: Company,
        targets: Targets,
        estimate: Estimate,
        deciding: Decide,
        on_fenced: Callable[[Run], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.dispatch = Dispatch(rpc, outstanding, journal.kept, self.make_work, self._is_wanted)
        self.dispatch.on_refused = partial(losses.lost, begun=False)
        self.dispatch.on_too_large = self._fail
        self.dispatch.on_fenced = on_fenced
        self._rpc = rpc
        self._runs = runs
        self._outstanding = outstanding
        self._losses = losses
        self._company = company
        self._targets = targets
        self._estimate = estimate
        self._deciding = deciding
        self._spawn = spawn

    def placed(self, batch: list[Placed]) -> None:
        """From a strategy: leases for units. Journal which peer got which, then tell the peers."""
        by_run: dict[str, list[Placed]] = defaultdict(list)
        stale: dict[bytes, tuple[Contact, list[int]]] = {}
        for row in batch:
            if all(map(self.is_pending, row.unit.gang or (row.unit.key,))):
                by_run[row.unit.key.workflow].append(row)
            else:
                stale.setdefault(row.peer.id, (row.peer, []))[1].append(row.lease)
        for contact, leases in stale.values():
            self._rpc.tell(contact, ReturnLeases(leases=tuple(leases)))
        for workflow_id, rows in by_run.items():
            with self._deciding(self._runs.active[workflow_id]) as decide:
                decide.start(rows)

    def is_pending(self, key: AttemptKey) -> bool:
        run = self._runs.active.get(key.workflow)
        task = run.tasks.get(key.task) if run else None
        return task is not None and task.state == "pending" and key.number > task.number

    def start(self, run: Run, placed: tuple[Placed, ...]) -> None:
        """The entry about these has been appended."""
        me = self._rpc.me.id
        for row in placed:
            self._outstanding.add(row.peer.id, row.unit.key)
        local = [row for row in placed if row.peer.id == me]
        remote = [row for row in placed if row.peer.id != me]
        if local:
            self.dispatch.here(run, local)
        if remote:
            self._outstanding.on_the_way.update(row.unit.key for row in remote)
            self._spawn(self.dispatch.away(run, remote))

    def make_work(self, run: Run, row: Placed) -> Work | None:
        """None if it is not wanted any more, or does not fit into a message."""
        key = row.unit.key
        if not self._is_wanted(run, key):
            return None
        if run.tasks[key.task].missing:
            # While `started` was on its way to the keepers, a peer died with one of the inputs: the
            # result of its maker's next attempt is not committed yet, and may be another file.
            self._losses.lost([(key, "one of its inputs is being made again")], begun=False)
            return None
        try:
            return self._work(run, row)
        except LookupError as error:  # an input was lost this very moment
            self._losses.lost([(key, str(error))], begun=False)
        except Exception as error:
            log.exception("attempt %s can't be sent to a peer", key)
            self._fail(run, [key.task], f"it can't be sent to a peer: {error}"[:CANT_SEND_MAX])
        return None

    def _work(self, run: Run, row: Placed) -> Work:
        work = make_work(run, row, self._estimate(row.unit), self._targets.held_too)
        if row.unit.gang:
            others = self._company.environment(run, row.unit)
            work = work._replace(env=(*work.env, *others), gang=True)
        # another peer must be able to read the message; this peer takes the object as it is
        return work if row.peer.id == self._rpc.me.id else CHECKED_WORK.validate_python(work)

    def _is_wanted(self, run: Run, key: AttemptKey) -> bool:
        task = run.tasks[key.task]
        attempt = task.attempt(key.number)
        alive = attempt is not None and attempt.state == "running"
        return self._runs.is_active(run) and alive and task.state not in FINAL and not run.over

    def _fail(self, run: Run, tasks: Iterable[str], reason: str) -> None:
        with self._deciding(run) as decide:
            for task in tasks:
                decide.fail(task, reason)
            decide.conclude()
