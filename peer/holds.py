"""Room, by asking: what of the results that are held here does nobody want any more?

A peer holds what it made until the workflow's home says that it is consumed. It asks when it gets
short of room, the homes of all that it holds something for: while there is room, nobody is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from protocols.members import Members
from protocols.messages import StillHeld, Unheld
from protocols.rpc import CallFailed, Rpc

from .blobs import Blobs

log = logging.getLogger("valence.holds")

ASK_S_MIN = 0.5  # between two rounds of questions
AT_ONCE = 16
HASHES_MAX = 2000
WORKFLOWS_MAX = 64  # that are asked about in one round
#: from so much of the quota on, room is made before it is needed
HIGH_WATER = 0.8
LOOK_S = 5.0

FindHome = Callable[[str], Awaitable[bytes | None]]


class Holds:
    def __init__(self, rpc: Rpc, members: Members, blobs: Blobs, find_home: FindHome) -> None:
        self.counts: Counter[str] = Counter()
        self._rpc = rpc
        self._members = members
        self._blobs = blobs
        self._find_home = find_home
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = -ASK_S_MIN
        self._asked: dict[str, int] = {}
        self._round = 0
        blobs.on_pressure = self.ask

    async def run(self) -> None:
        """Before it gets tight; what is let go of stays as long as there is room."""
        while True:
            await asyncio.sleep(LOOK_S)
            cache = self._blobs.cache
            if cache.quota_bytes - cache.free_bytes() > HIGH_WATER * cache.quota_bytes:
                await self.ask()

    async def ask(self) -> None:
        """One round at a time, and not too often; who comes meanwhile waits for its end."""
        if self._asking is None or self._asking.done():
            loop = asyncio.get_running_loop()
            if loop.time() - self._asked_at < ASK_S_MIN:
                return
            self._asked_at = loop.time()
            self._asking = asyncio.ensure_future(self._ask_all())
        await asyncio.shield(self._asking)

    async def _ask_all(self) -> None:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(workflow: str, hashes: list[bytes]) -> None:
            async with slots:
                await self._ask(workflow, hashes)

        held = list(self._blobs.cache.held_for().items())
        held.sort(key=lambda row: self._asked.get(row[0], 0))  # who was asked longest ago first
        for workflow, _ in held[:WORKFLOWS_MAX]:
            self._round += 1
            self._asked[workflow] = self._round
        for gone in self._asked.keys() - {workflow for workflow, _ in held}:
            del self._asked[gone]
        await asyncio.gather(*(one(*row) for row in held[:WORKFLOWS_MAX]))

    async def _ask(self, workflow: str, hashes: list[bytes]) -> None:
        home = await self._find_home(workflow)
        contact = self._members.contact(home) if home else None
        if contact is None:
            return  # nobody can say: what is held stays
        for start in range(0, len(hashes), HASHES_MAX):
            some = tuple(hashes[start : start + HASHES_MAX])
            try:
                message = StillHeld(workflow=workflow, hashes=some)
                answer = await self._rpc.call(contact, message, Unheld)
            except CallFailed as error:
                log.debug("nobody says what is wanted of %s: %s", workflow, error)
                return
            asked = set(some)
            gone = [hash for hash in answer.hashes if hash in asked]
            self._blobs.release(workflow, gone)
            self.counts["released"] += len(gone)

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
