"""Second holders of a workflow's files, so that a result outlives who made it.

Rules:
- What no task has asked for yet, that is, what the user came for, is at two peers: who made it and
  the home, or another keeper. What several tasks want is at two sites. Inputs that can't be brought
  again are at two keepers before they count.
- Who leaves has copied to others what nobody else has.
- A second holder holds the file for the workflow as the first does. The journal knows it; when the
  workflow is over, and has no more entries, the catalog does.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable

from ..data.transfer import Transfer
from ..membership.members import Members
from ..tasks import Tasks
from ..wire.entries import CopiedFile, StagedFile
from ..wire.messages import File
from ..wire.rpc import Rpc
from .run import Run, TaskState

AT_ONCE = 100  # files in one message
LEAVING_S = 60.0
TAKERS_MAX = 3  # that are asked to take over the files of one who leaves
NEAR_BYTES_MIN = 256 * 1024  # files smaller than this are anywhere in no time

#: name, hash, size
Staged = tuple[str, bytes, int]


class Copies:
    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        transfer: Transfer,
        rng: random.Random,
        keepers: Callable[[Run], tuple[bytes, ...]],
        on_copied: Callable[[Run, list[CopiedFile]], None],
    ) -> None:
        self._me = rpc.me.id
        self._members = members
        self._transfer = transfer
        self._rng = rng
        self._keepers = keepers
        self._on_copied = on_copied
        self._leaving: dict[bytes, float] = {}  # who has said so, and when
        self._tasks = Tasks()

    def keep_twice(self, run: Run, changed: list[TaskState]) -> None:
        """Of these tasks' files; where they did not come along with the outcome."""
        wanted: dict[bytes, list[File]] = defaultdict(list)
        for task in changed:
            for made in task.won.outputs if task.won else ():
                file = run.file(made.name)
                if file is None or len(file.holders) > 1:
                    continue
                other: bytes | None = None
                if made.name in run.final_files:
                    stays = task.holder != self._me and not self._transfer.closed
                    other = self._me if stays else self._another_keeper(run)
                elif made.size >= NEAR_BYTES_MIN and run.readers(made.name) > 1:
                    other = self._at_another_site(task.holder)
                if other is not None:
                    wanted[other].append(file)
        for peer, files in wanted.items():
            self._tasks.spawn(self._copy(run, peer, files))

    async def staged(self, run: Run, files: list[Staged]) -> list[StagedFile]:
        """Who holds each. What can't be made or fetched again has a second holder first."""
        sources = run.workflow.inputs
        unique = [
            File(name, hash, size, (self._me,))
            for name, hash, size in files
            if sources[name].kind == "blob"
        ]
        others = (k for k in self._keepers(run) if k != self._me and self._members.is_here(k))
        other = next(others, None)
        copied: set[bytes] = set()
        if unique and other:
            copied = await self._transfer.copy_to(other, unique, run.id)
        both = (self._me, other) if other else (self._me,)
        return [
            StagedFile(name, hash, size, both if hash in copied else (self._me,))
            for name, hash, size in files
        ]

    async def hand_on(self, peer: bytes, run: Run, files: list[File]) -> list[bytes]:
        """That peer leaves: what nobody else has is copied. Those that are elsewhere then."""
        holders = run.holders()
        now = asyncio.get_running_loop().time()
        self._leaving = {p: at for p, at in self._leaving.items() if now - at < LEAVING_S}
        self._leaving[peer] = now
        done, left = [], []
        for file in files:
            others = [p for p in holders.get(file.hash, ()) if p not in self._leaving]
            if any(map(self._members.is_alive, others)):
                done.append(file.hash)
            else:
                left.append(file._replace(holders=(peer,)))
        here = [member.contact.id for member in self._members.here()]
        takers = [p for p in here if p not in self._leaving and self._members.is_alive(p)]
        self._rng.shuffle(takers)
        for taker in takers[:TAKERS_MAX]:
            if left:
                held = await self._copy(run, taker, left)
                done += held
                left = [file for file in left if file.hash not in held]
        return done

    async def _copy(self, run: Run, peer: bytes, files: list[File]) -> set[bytes]:
        found: set[bytes] = set()
        for start in range(0, len(files), AT_ONCE):
            some = files[start : start + AT_ONCE]
            announced = run.over
            held = await self._transfer.copy_to(peer, some, run.id, announced)
            if run.over and not announced:  # it has come to its end meanwhile
                held = await self._transfer.copy_to(peer, some, run.id, announce=True)
            rows = [CopiedFile(file.hash, peer) for file in some if file.hash in held]
            if not rows:
                break  # it takes none
            found.update(hash for hash, _ in rows)
            self._on_copied(run, rows)
        return found

    def _at_another_site(self, holder: bytes) -> bytes | None:
        member = self._members.get(holder)
        site = member.traits.site if member is not None else ""
        others = [m for m in self._members.here() if m.traits.site != site]
        return bytes(self._rng.choice(others).contact.id) if others else None

    def _another_keeper(self, run: Run) -> bytes | None:
        """Or, if it has none, anybody else."""
        keepers = [p for p in self._keepers(run) if p != self._me and self._members.is_alive(p)]
        if keepers:
            return keepers[0]
        others = [m.contact.id for m in self._members.here() if m.contact.id != self._me]
        return bytes(self._rng.choice(others)) if others else None

    async def close(self) -> None:
        await self._tasks.close()
