"""The targets that a home sends attempts to: the peers of its cluster, or a task queue's sites.

A home does the same for a workflow with either. They differ in who is asked for capacity, how the
home hears of running attempts, where files are, and what users call a target.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from valence.workflow.model import Workflow

from ..capacity.matching import unmet
from ..data.transfer import Transfer
from ..membership.members import Members, State
from ..ports import Blobs
from ..strategies.base import Strategy
from ..tasks import Tasks
from ..wire.messages import AttemptKey, File
from .dispatch import Dispatch
from .outstanding import Outstanding
from .replication import NEAR_BYTES_MIN, Replication
from .run import Run, TaskState
from .work import wire_needs

RETURN_S = 8.0


class Targets(Protocol):
    #: tasks are placed near their inputs if these have at least this size
    near_bytes_min: int
    #: whether a workflow can be promised to be done by its deadline
    may_promise: bool

    def refusal(self, workflow: Workflow) -> str:
        """Why no target can run it; empty: some may."""

    def strategy(self, run: Run) -> Strategy | None:
        """The strategy that places it; None: the one that its document names."""

    def settle(self) -> None:
        """The other peers are known, or none answered for a while."""

    def resume(self, run: Run) -> None:
        """Ask about the attempts that run somewhere, as the journal says."""

    def is_held(self, file: File | None) -> bool:
        """A present peer has it, or one that may be back with it in a moment."""

    def could_run(self, run: Run, task: TaskState) -> set[bytes]:
        """The targets whose capacity suffices."""

    def abort(self, run: Run, peer: bytes, keys: list[AttemptKey]) -> None:
        """End these attempts: they are of no use any more."""

    def keep_twice(self, run: Run, changed: list[TaskState]) -> None:
        """Give the files of these tasks a second holder."""

    def called(self, peer: bytes) -> str:
        """The name of a target, for users."""

    def waiting_for(self, run: Run, task: TaskState) -> str:
        """In words, if the targets know more than the home; else empty."""

    def held_too(self, file: File) -> File:
        """The file with the holders that only the home knows of."""

    async def close(self) -> None:
        """End their background work."""


class Enacting(Protocol):
    """The home, as far as its targets need it."""

    outstanding: Outstanding
    dispatch: Dispatch
    replication: Replication
    members: Members
    blobs: Blobs
    transfer: Transfer

    def run_elsewhere(self, peer: bytes) -> None:
        """This peer may be dead, or just slow: begin its young attempts elsewhere, too."""


class Peers:
    """The peers of this home's cluster."""

    near_bytes_min = NEAR_BYTES_MIN
    may_promise = True

    def __init__(self, home: Enacting) -> None:
        self._home = home
        self._waits_until = 0.0
        self._tasks = Tasks()

    def refusal(self, workflow: Workflow) -> str:
        return ""

    def strategy(self, run: Run) -> Strategy | None:
        return None

    def settle(self) -> None:
        self._waits_until = asyncio.get_running_loop().time() + RETURN_S

    def resume(self, run: Run) -> None:
        outstanding, members = self._home.outstanding, self._home.members
        for task in run.tasks.values():
            for attempt in task.attempts:
                if attempt.state == "running" and task.state == "running":
                    outstanding.add(attempt.peer, AttemptKey(run.id, task.id, attempt.number))
                    outstanding.doubt(attempt.peer)
        for peer in [p for p in outstanding.peers() if not members.is_alive(p)]:
            self._home.run_elsewhere(peer)

    def is_held(self, file: File | None) -> bool:
        if file is None:
            return False
        if file.hash in self._home.blobs or any(map(self._home.members.is_here, file.holders)):
            return True
        # after a start: others that were stopped with this peer may be back in a moment
        young = asyncio.get_running_loop().time() < self._waits_until
        return young and any(map(self._may_return, file.holders))

    def _may_return(self, peer: bytes) -> bool:
        member = self._home.members.get(peer)
        return member is None or member.state != State.DEAD

    def could_run(self, run: Run, task: TaskState) -> set[bytes]:
        needs = wire_needs(run.needs(task.id))
        here = self._home.members.here()
        return {m.contact.id for m in here if not unmet(m.capacity, m.traits, needs)}

    def abort(self, run: Run, peer: bytes, keys: list[AttemptKey]) -> None:
        self._home.outstanding.drop(peer, keys)
        contact = self._home.members.contact(peer)
        if contact is not None:
            self._tasks.spawn(self._home.dispatch.abort(contact, keys, (run.id, run.epoch)))

    def keep_twice(self, run: Run, changed: list[TaskState]) -> None:
        self._home.replication.keep_twice(run, changed)

    def called(self, peer: bytes) -> str:
        return peer.hex()

    def waiting_for(self, run: Run, task: TaskState) -> str:
        return ""

    def held_too(self, file: File) -> File:
        me = self._home.members.me.contact.id
        if file.hash in self._home.blobs and me not in file.holders:
            return file._replace(holders=(*file.holders, me))
        return file

    async def close(self) -> None:
        await self._tasks.close()
