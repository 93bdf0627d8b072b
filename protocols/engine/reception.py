"""What other peers tell a home, and ask it: outcomes, what they still run, what they still hold.

Rules:
- An outcome is acknowledged when it counts: until then its peer keeps it, and tells it again.
- Whether a file is wanted only the home can say, and only of what counts: another home might undo
  the rest.
- An error in one workflow keeps no other's outcomes from being taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from ..consensus.keeping import Deposed
from ..consensus.placement import is_queued
from ..data.cache import BlobError
from ..ports import Blobs
from ..wire.messages import (
    AttemptKey,
    Capacity,
    Contact,
    File,
    HandedOn,
    HandOn,
    Outcome,
    Report,
    Reported,
    StillHeld,
    StillWanted,
    Unheld,
    Vacancy,
    Wanted,
)
from ..wire.rpc import Refused, Rpc
from .gangs import Company
from .journal import Journal
from .outstanding import Given
from .replication import Copies
from .run import Run
from .runs import Runs

log = logging.getLogger("valence.home")

COUNT_S_MAX = 10.0
ELSEWHERE = "its home is elsewhere"

#: outcomes of a peer, and what becomes of them
Relay = Callable[[bytes, list[Outcome]], Awaitable[Reported]]


class Enacts(Protocol):
    """The home itself."""

    def take(self, run: Run, peer: bytes, outcomes: list[Outcome]) -> None:
        """Those that count; what follows from them is decided, and done."""

    def heard_of_room(self, peer: bytes, free: Capacity) -> None:
        """What a peer has free now."""


async def _nowhere(peer: bytes, outcomes: list[Outcome]) -> Reported:
    return Reported(kept=(), unknown=tuple(ended.key for ended in outcomes))


class Reception:
    def __init__(
        self,
        *,
        home: Enacts,
        runs: Runs,
        journal: Journal,
        blobs: Blobs,
        given: Given,
        company: Company,
        copies: Copies,
        counts: Counter[str],
    ) -> None:
        self.relay: Relay = _nowhere  # outcomes of workflows that are a task queue's
        self.still_held_elsewhere: Callable[[StillHeld], Awaitable[Unheld]] | None = None
        self._home = home
        self._runs = runs
        self._journal = journal
        self._blobs = blobs
        self._given = given
        self._company = company
        self._copies = copies
        self._counts = counts

    def serve(self, rpc: Rpc) -> None:
        rpc.on(Report, self.report)
        rpc.on(StillWanted, self.still_wanted)
        rpc.on(StillHeld, self.still_held)
        rpc.on(HandOn, self._hand_on)
        rpc.on(Vacancy, self._vacancy)

    # ----------------------------------------------------------------- outcomes

    async def report(self, sender: Contact, message: Report) -> Reported:
        by_run: dict[str, list[Outcome]] = defaultdict(list)
        unknown: list[AttemptKey] = []
        moved: dict[str, bytes] = {}
        relayed: list[Outcome] = []
        for ended in message.outcomes:
            id = ended.key.workflow
            if is_queued(id):
                relayed.append(ended)
                continue
            self._heard_of(sender.id, ended)
            if self._runs.knows(id):  # elected, but not in office yet, is not enough
                by_run[id].append(ended)
            elif (home := self._journal.keeping.follows(id)) is not None:
                moved[id] = home
            else:
                unknown.append(ended.key)
        for outcomes in by_run.values():
            for ended in outcomes:
                await self.keep_enclosed(ended)
        taken = {
            id: outcomes
            for id, outcomes in by_run.items()
            if await self._take_some(id, sender.id, outcomes)
        }
        self._home.heard_of_room(sender.id, message.free)
        kept = await self.counted(taken)
        if relayed:
            found = await self.relay(sender.id, relayed)
            kept += found.kept
            unknown += found.unknown
            moved.update(found.moved)
        return Reported(kept=tuple(kept), unknown=tuple(unknown), moved=tuple(moved.items()))

    async def _take_some(self, id: str, peer: bytes, outcomes: list[Outcome]) -> bool:
        """False: they can't be taken, and are not acknowledged."""
        run = self._runs.active.get(id)
        if run is None:
            return True
        known = [ended for ended in outcomes if ended.key.task in run.tasks]
        if run.gangs:
            known = await asyncio.gather(*(self._company.judged(run, e) for e in known))
        return not self._runs.is_active(run) or self._take(run, peer, known)

    def _take(self, run: Run, peer: bytes, outcomes: list[Outcome]) -> bool:
        try:
            self._home.take(run, peer, outcomes)
        except Deposed:
            raise
        except Exception:
            self._counts["errors"] += 1
            log.exception("outcomes of %s can't be taken", run.id)
            return False
        return True

    async def counted(self, by_run: dict[str, list[Outcome]]) -> list[AttemptKey]:
        """Of these outcomes, those of workflows of which all that was written counts by now."""
        counted = await asyncio.gather(*map(self.is_committed, by_run))
        return [
            ended.key
            for counts, outcomes in zip(counted, by_run.values(), strict=True)
            if counts
            for ended in outcomes
        ]

    async def is_committed(self, id: str) -> bool:
        """All that was written of it so far counts; False if that can't be said soon."""
        try:
            async with asyncio.timeout(COUNT_S_MAX):
                await self._journal.kept(id)
        except (TimeoutError, Deposed):
            return False
        return True

    def take_own(self, me: bytes, ended: Outcome) -> Coroutine[Any, Any, None] | bool:
        """From this very peer, on the spot: there is nobody to acknowledge it to.

        False: its home is elsewhere by now. Of a gang's failure the others are asked first: what
        is returned then is to be awaited."""
        id = ended.key.workflow
        self._heard_of(me, ended)
        run = self._runs.active.get(id)
        if run is not None and ended.key.task in run.tasks:
            if ended.kind == "failed" and run.workflow.tasks[ended.key.task].gang:
                return self._take_judged(run, me, ended)
            return self._take(run, me, [ended])
        return run is not None or self._runs.knows(id)

    async def _take_judged(self, run: Run, me: bytes, ended: Outcome) -> None:
        judged = await self._company.judged(run, ended)
        if self._runs.is_active(run):
            self._take(run, me, [judged])

    def _heard_of(self, peer: bytes, ended: Outcome) -> None:
        """It need not be asked about any more; unless this is of an attempt that has its number by
        chance, as another home gave it: of its own the peer may know nothing."""
        run = self._runs.active.get(ended.key.workflow)
        task = run.tasks.get(ended.key.task) if run else None
        attempt = task.attempt(ended.key.number) if task else None
        if attempt is None or attempt.epoch == ended.epoch:
            self._given.drop(peer, [ended.key])

    async def keep_enclosed(self, ended: Outcome) -> None:
        """Small files come along with the outcome: they have a second holder then."""
        for hash, data in ended.enclosed:
            if hash not in self._blobs:
                try:
                    await self._blobs.put(data, ended.key.workflow)
                except BlobError as error:
                    log.warning("no room for a second copy of an output: %s", error)

    # ----------------------------------------------------------------- questions

    def still_wanted(self, sender: Contact, message: StillWanted) -> Wanted:
        unwanted: list[AttemptKey] = []
        unknown: list[AttemptKey] = []
        for key, epoch in message.attempts:
            run = self._runs.active.get(key.workflow)
            if run is None:
                (unwanted if self._runs.knows(key.workflow) else unknown).append(key)
                continue
            task = run.tasks.get(key.task)
            attempt = task.attempt(key.number) if task is not None else None
            if (
                attempt is None
                or attempt.state != "running"
                or (attempt.peer, attempt.epoch) != (sender.id, epoch)
            ):
                unwanted.append(key)
        return Wanted(unwanted=tuple(unwanted), unknown=tuple(unknown))

    async def still_held(self, sender: Contact, message: StillHeld) -> Unheld:
        id = message.workflow
        elsewhere = self.still_held_elsewhere
        if is_queued(id) and not self._runs.knows(id) and elsewhere is not None:
            return await elsewhere(message)
        run = await self._runs.get(id)
        found = run.unwanted(message.hashes) if run is not None else []
        if run is None or (not run.over and not await self.is_committed(id)):
            raise Refused("moved", ELSEWHERE)
        return Unheld(hashes=tuple(found))

    async def _hand_on(self, sender: Contact, message: HandOn) -> HandedOn:
        done = await self.hand_on(sender.id, message.workflow, message.files)
        return HandedOn(hashes=tuple(done))

    async def hand_on(self, peer: bytes, id: str, files: tuple[File, ...]) -> list[bytes]:
        """That peer leaves: what it alone has of a workflow is copied to others. Those that are
        somewhere else then, or that nobody wants."""
        run = await self._runs.get(id)
        if run is None:
            raise Refused("moved", ELSEWHERE)
        counts = self._journal.is_over(id) or await self.is_committed(id)
        unwanted = set(run.unwanted(file.hash for file in files)) if counts else set()
        wanted = [file for file in files if file.hash not in unwanted]
        return [*unwanted, *await self._copies.hand_on(peer, run, wanted)]

    def _vacancy(self, sender: Contact, message: Vacancy) -> None:
        self._home.heard_of_room(sender.id, message.free)
