"""The surroundings of a home's decisions: the time, the peers, the places of files.

Answers their questions (`decisions.Surroundings`) from the parts of this peer; changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..membership.members import Members
from ..ports import Blobs
from ..wire.messages import File
from .outstanding import Outstanding
from .run import Run, TaskState
from .targets import Targets
from .work import deadline_at


class HomeSurroundings:
    def __init__(
        self,
        me: bytes,
        members: Members,
        blobs: Blobs,
        outstanding: Outstanding,
        targets: Targets,
        clock: Callable[[], float],
        is_closed: Callable[[], bool],
    ) -> None:
        self._me = me
        self._members = members
        self._blobs = blobs
        self._outstanding = outstanding
        self._targets = targets
        self._clock = clock
        self._is_closed = is_closed

    @property
    def near_bytes_min(self) -> int:
        return self._targets.near_bytes_min

    def now(self) -> float:
        return self._clock()

    def may_place(self) -> bool:
        return not self._is_closed() and self._outstanding.settled

    def holds(self, digest: bytes) -> bool:
        return digest in self._blobs

    def boot(self, peer: bytes) -> int:
        member = self._members.get(peer)
        return member.boot if member is not None else 0

    def is_me(self, peer: bytes) -> bool:
        return peer == self._me

    def could_run(self, run: Run, task: TaskState) -> set[bytes]:
        return self._targets.could_run(run, task)

    def is_held(self, file: File | None) -> bool:
        return self._targets.is_held(file)

    def deadline_at(self, run: Run) -> float | None:
        at = deadline_at(run)
        if at is None:
            return None
        return asyncio.get_running_loop().time() + (at - self._clock())
