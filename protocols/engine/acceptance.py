"""Checks whether this peer may accept a workflow now. A refusal comes before it is written."""

from __future__ import annotations

from collections.abc import Callable

from valence.workflow.model import Workflow

from ..wire.rpc import Refused
from .journal import Journal
from .runs import Runs

ACTIVE_MAX = 1000
OWNER_ACTIVE_MAX, OWNER_TASKS_MAX = 500, 500_000


class AlreadyHere(Exception):
    """A workflow with this id, which follows from its Idempotency-Key, is here already."""


class Acceptance:
    def __init__(self, runs: Runs, journal: Journal, is_closed: Callable[[], bool]) -> None:
        self._runs = runs
        self._journal = journal
        self._is_closed = is_closed

    def check(self, workflow_id: str, workflow: Workflow, owner: str, named: bool) -> None:
        """Raises `Refused` or `AlreadyHere`. `named`: its id follows from an Idempotency-Key."""
        if self._is_closed():
            raise Refused("leaving", "this peer is leaving the cluster; submit to another peer")
        if len(self._runs.active) >= ACTIVE_MAX:
            text = f"this peer already runs {ACTIVE_MAX:,} workflows; submit to another peer"
            raise Refused("overload", text)
        if self._runs.active:
            self._check_owner(owner, len(workflow.tasks))
            self._check_tasks(len(workflow.tasks))
        if named and self._is_known(workflow_id):
            raise AlreadyHere(f"workflow {workflow_id} is at this peer already")
        if self._journal.keeping.is_closing(workflow_id):
            text = "an earlier submission with this key is still being removed"
            raise Refused("busy", f"{text}; submit it again in a moment")

    def _check_owner(self, owner: str, tasks_new: int) -> None:
        owned = [run for run in self._runs.active.values() if run.owner == owner]
        tasks = sum(len(run.tasks) for run in owned)
        if len(owned) >= OWNER_ACTIVE_MAX or (owned and tasks + tasks_new > OWNER_TASKS_MAX):
            raise Refused(
                "overload",
                f"this peer already runs {len(owned)} workflows of yours with {tasks:,} tasks; "
                "wait until some of them are over, or submit to another peer",
            )

    def _check_tasks(self, tasks_new: int) -> None:
        tasks = sum(len(run.tasks) for run in self._runs.active.values()) + tasks_new
        tasks_max = self._journal.keeping.config.tasks_max
        if tasks > tasks_max:
            raise Refused(
                "overload",
                f"with this workflow the peer would have {tasks:,} tasks, more than its limit of "
                f"{tasks_max:,}; submit to another peer",
            )

    def _is_known(self, workflow_id: str) -> bool:
        kept = self._journal.keeping.follows(workflow_id) is not None
        return kept or self._runs.knows(workflow_id) or self._journal.is_void(workflow_id)
