"""Replicates a workflow's files, so that a result outlives the peer that made it.

Rules:
- A final result, which no task reads, is at two peers: the one that made it and the home, or
  another keeper. A file that several tasks read is at two sites. An input that can't be fetched
  again is at two keepers before it is journaled as staged.
- When a peer leaves, the files that nobody else has are copied to others.
- A second holder keeps the file for the workflow as the first one does. The journal names it; once
  the workflow is over, and its journal has no more entries, the catalog does.
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
TAKERS_MAX = 3  # peers that are asked to take over the files of a leaving peer
NEAR_BYTES_MIN = 256 * 1024  # smaller files are fetched from anywhere in no time

#: name, hash, size
Staged = tuple[str, bytes, int]


class Replication:
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
        self._leaving: dict[bytes, float] = {}  # peers that are leaving, and since when
        self._tasks = Tasks()

    def keep_twice(self, run: Run, changed: list[TaskState]) -> None:
        """Give the files of these tasks a second holder, unless the outcome has brought them."""
        wanted: dict[bytes, list[File]] = defaultdict(list)
        for task in changed:
            for output in task.won.outputs if task.won else ():
                file = run.file(output.name)
                if file is None or len(file.holders) > 1:
                    continue
                other = self._second_holder(run, task.holder, output)
                if other is not None:
                    wanted[other].append(file)
        for peer, files in wanted.items():
            self._tasks.spawn(self._copy(run, peer, files))

    def _second_holder(self, run: Run, holder: bytes, output: File) -> bytes | None:
        """None: it needs no second holder, or there is none."""
        if output.name in run.final_files:
            stays = holder != self._me and not self._transfer.closed
            return self._me if stays else self._another_keeper(run)
        if output.size >= NEAR_BYTES_MIN and run.readers(output.name) > 1:
            return self._at_another_site(holder)
        return None

    async def staged(self, run: Run, files: list[Staged]) -> list[StagedFile]:
        """These inputs with their holders. Uploads, which can't be made or fetched again, get a
        second holder first."""
        sources = run.workflow.inputs
        uploads = [
            File(name, digest, size, (self._me,))
            for name, digest, size in files
            if sources[name].kind == "blob"
        ]
        other = self._present_keeper(run)
        copied: set[bytes] = set()
        if uploads and other:
            copied = await self._transfer.copy_to(other, uploads, run.id)
        both = (self._me, other) if other else (self._me,)
        return [
            StagedFile(name, digest, size, both if digest in copied else (self._me,))
            for name, digest, size in files
        ]

    def _present_keeper(self, run: Run) -> bytes | None:
        others = (k for k in self._keepers(run) if k != self._me and self._members.is_here(k))
        return next(others, None)

    async def hand_on(self, peer: bytes, run: Run, files: list[File]) -> list[bytes]:
        """That peer leaves: the files that nobody else has are copied. Returns the files that other
        peers have then."""
        self._note_leaving(peer)
        held_elsewhere = self._held_elsewhere(run)
        done = [file.hash for file in files if file.hash in held_elsewhere]
        left = [f._replace(holders=(peer,)) for f in files if f.hash not in held_elsewhere]
        for taker in self._takers():
            if left:
                copied = await self._copy(run, taker, left)
                done += copied
                left = [file for file in left if file.hash not in copied]
        return done

    def _note_leaving(self, peer: bytes) -> None:
        now = asyncio.get_running_loop().time()
        self._leaving = {p: at for p, at in self._leaving.items() if now - at < LEAVING_S}
        self._leaving[peer] = now

    def _held_elsewhere(self, run: Run) -> set[bytes]:
        """The files that some other peer has, which is alive and does not leave."""
        return {digest for digest, peers in run.holders().items() if any(map(self._stays, peers))}

    def _takers(self) -> list[bytes]:
        here = [member.contact.id for member in self._members.here()]
        takers = list(filter(self._stays, here))
        self._rng.shuffle(takers)
        return takers[:TAKERS_MAX]

    def _stays(self, peer: bytes) -> bool:
        return peer not in self._leaving and self._members.is_alive(peer)

    async def _copy(self, run: Run, peer: bytes, files: list[File]) -> set[bytes]:
        """Copies these files to that peer; returns those that it has then."""
        copied: set[bytes] = set()
        for start in range(0, len(files), AT_ONCE):
            some = files[start : start + AT_ONCE]
            announced = run.over
            held = await self._transfer.copy_to(peer, some, run.id, announced)
            if run.over and not announced:  # the workflow has ended meanwhile
                held = await self._transfer.copy_to(peer, some, run.id, announce=True)
            rows = [CopiedFile(file.hash, peer) for file in some if file.hash in held]
            if not rows:
                break  # that peer takes no more
            copied.update(row.hash for row in rows)
            self._on_copied(run, rows)
        return copied

    def _at_another_site(self, holder: bytes) -> bytes | None:
        member = self._members.get(holder)
        site = member.traits.site if member is not None else ""
        others = [m for m in self._members.here() if m.traits.site != site]
        return bytes(self._rng.choice(others).contact.id) if others else None

    def _another_keeper(self, run: Run) -> bytes | None:
        """Or, if it has none, any other peer."""
        keepers = [p for p in self._keepers(run) if p != self._me and self._members.is_alive(p)]
        if keepers:
            return keepers[0]
        others = [m.contact.id for m in self._members.here() if m.contact.id != self._me]
        return bytes(self._rng.choice(others)) if others else None

    async def close(self) -> None:
        await self._tasks.close()
