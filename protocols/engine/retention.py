"""Retention of the files that this peer holds for workflows.

- A peer keeps the files that it made until the workflow's home says that they are consumed.
- When disk space gets short, it asks the homes of all workflows that it holds files for; while
  there is enough, it asks nobody.
- A peer that leaves tells the homes which files it has; they get those copied that nobody else has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from ..consensus.placement import is_queued
from ..membership.members import Members
from ..ports import Blobs
from ..wire.messages import File, HandedOn, HandOn, StillHeld, Unheld
from ..wire.rpc import CallFailed, Refused, Rpc

log = logging.getLogger("valence.holds")

ASK_S_MIN = 0.5  # between two rounds of questions
AT_ONCE = 16
HASHES_MAX = 2000
WORKFLOWS_MAX = 64  # asked about in one round
#: from this share of the quota on, space is freed before it is needed
HIGH_WATER = 0.8
LOOK_S = 5.0

HAND_ON_MAX = 500  # files in one message

FindHome = Callable[[str], Awaitable[bytes | None]]
#: the peer that leaves, a workflow, and its files there → those that the peer need not keep
HandOnHere = Callable[[bytes, str, tuple[File, ...]], Awaitable[list[bytes]]]


class Retention:
    def __init__(
        self,
        rpc: Rpc,
        members: Members,
        blobs: Blobs,
        find_home: FindHome,
        forget_home: Callable[[str, bytes], None],
        hand_on_here: HandOnHere,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._rpc = rpc
        self._members = members
        self._blobs = blobs
        self._find_home = find_home
        self._forget_home = forget_home
        self._hand_on_here = hand_on_here
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = -ASK_S_MIN
        self._asked: dict[str, int] = {}
        self._round = 0
        blobs.on_pressure = self.ask

    async def run(self) -> None:
        """Asks before space gets short; released files stay as long as there is space."""
        while True:
            await asyncio.sleep(LOOK_S)
            cache = self._blobs.cache
            if cache.quota_bytes - cache.free_bytes() > HIGH_WATER * cache.quota_bytes:
                await self.ask()

    async def ask(self) -> None:
        """One round at a time, and not too often; a call during a round waits for its end."""
        if self._asking is None or self._asking.done():
            loop = asyncio.get_running_loop()
            if loop.time() - self._asked_at < ASK_S_MIN:
                return
            self._asked_at = loop.time()
            self._asking = asyncio.ensure_future(self._ask_all())
        await asyncio.shield(self._asking)

    async def _ask_all(self) -> None:
        slots = asyncio.Semaphore(AT_ONCE)

        async def ask(workflow: str, hashes: list[bytes]) -> None:
            async with slots:
                await self._ask(workflow, hashes)

        held = list(self._blobs.cache.held_for().items())
        held.sort(key=lambda row: self._asked.get(row[0], 0))  # longest not asked about first
        for workflow, _ in held[:WORKFLOWS_MAX]:
            self._round += 1
            self._asked[workflow] = self._round
        for gone in self._asked.keys() - {workflow for workflow, _ in held}:
            del self._asked[gone]
        await asyncio.gather(*(ask(*row) for row in held[:WORKFLOWS_MAX]))

    async def _ask(self, workflow: str, hashes: list[bytes]) -> None:
        home = await self._find_home(workflow)
        contact = self._members.contact(home) if home else None
        if contact is None:
            return  # nobody can tell: keep the files
        for start in range(0, len(hashes), HASHES_MAX):
            some = tuple(hashes[start : start + HASHES_MAX])
            try:
                message = StillHeld(workflow=workflow, hashes=some)
                answer = await self._rpc.call(contact, message, Unheld)
            except CallFailed as error:
                log.debug("no answer which files of %s are still wanted: %s", workflow, error)
                return
            asked = set(some)
            unwanted = [digest for digest in answer.hashes if digest in asked]
            self._blobs.release(workflow, unwanted)
            self.counts["released"] += len(unwanted)

    # ----------------------------------------------------------------- leaving

    async def hand_on(self, limit_s: float, hurry: asyncio.Event) -> tuple[int, int]:
        """Returns how many files are safe elsewhere or not wanted, and how many no peer took in
        time. Files of a task queue's workflows are left out: it has fetched those that it wants."""
        safe: set[bytes] = set()
        held = {w: h for w, h in self._blobs.cache.held_for().items() if not is_queued(w)}
        slots = asyncio.Semaphore(AT_ONCE)

        async def hand_on(workflow: str, hashes: list[bytes]) -> None:
            async with slots:
                for start in range(0, len(hashes), HAND_ON_MAX):
                    some = hashes[start : start + HAND_ON_MAX]
                    safe.update(await self._hand_on(workflow, some, limit_s))

        async def hand_on_all() -> None:
            rows = held.items() if self._members.count > 1 else ()
            ends = await asyncio.gather(*(hand_on(*row) for row in rows), return_exceptions=True)
            for error in ends:
                if isinstance(error, Exception):
                    log.warning("files could not be handed on", exc_info=error)

        ends: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(hand_on_all()),
            asyncio.ensure_future(hurry.wait()),
        ]
        await asyncio.wait(ends, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        every_file = {digest for hashes in held.values() for digest in hashes}
        self.counts["handed_on"] += len(safe)
        return len(safe), len(every_file - safe)

    async def _hand_on(self, workflow: str, hashes: list[bytes], limit_s: float) -> list[bytes]:
        me = self._rpc.me.id
        files = tuple(
            File(digest.hex(), digest, self._blobs.size(digest) or 0, (me,))
            for digest in hashes
            if digest in self._blobs
        )
        with contextlib.suppress(Refused):  # this peer is its home, or has a replica of its end
            return await self._hand_on_here(me, workflow, files)
        return await self._hand_on_to_home(workflow, files, limit_s)

    async def _hand_on_to_home(
        self, workflow: str, files: tuple[File, ...], limit_s: float
    ) -> list[bytes]:
        for _ in range(2):
            home = await self._find_home(workflow)
            contact = self._members.contact(home) if home else None
            if home is None or contact is None or home == self._rpc.me.id:
                break
            try:
                message = HandOn(workflow=workflow, files=files)
                return list((await self._rpc.call(contact, message, HandedOn, limit_s)).hashes)
            except CallFailed as error:
                log.info("files of %s were not handed on: %s", workflow, error)
                if not isinstance(error, Refused):
                    break
                self._forget_home(workflow, home)  # it is elsewhere by now: try once more
        return []

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
