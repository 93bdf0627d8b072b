"""Takes the reports and questions of other peers: outcomes, attempts they run, files they hold.

Rules:
- An outcome is acknowledged when it is committed: until then its peer keeps and repeats it.
- Only the home can say whether a file is still wanted, and only from committed entries: another
  home might undo the others.
- An error in one workflow does not keep the outcomes of others from being taken.
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
from .outstanding import Outstanding
from .replication import Replication
from .run import Run
from .runs import Runs

log = logging.getLogger("valence.home")

COUNT_S_MAX = 10.0
ELSEWHERE = "its home is elsewhere"

#: takes the outcomes that a peer has reported, and says which are kept
Relay = Callable[[bytes, list[Outcome]], Awaitable[Reported]]


class Enacts(Protocol):
    """The home, as far as reports need it."""

    def take(self, run: Run, peer: bytes, outcomes: list[Outcome]) -> None:
        """Take those that count; decide what follows from them, and perform it."""

    def heard_of_room(self, peer: bytes, free: Capacity) -> None:
        """A peer has this much free capacity now."""


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
        outstanding: Outstanding,
        company: Company,
        replication: Replication,
        counts: Counter[str],
    ) -> None:
        self.relay: Relay = _nowhere  # for outcomes of a task queue's workflows
        self.still_held_elsewhere: Callable[[StillHeld], Awaitable[Unheld]] | None = None
        self._home = home
        self._runs = runs
        self._journal = journal
        self._blobs = blobs
        self._outstanding = outstanding
        self._company = company
        self._replication = replication
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
            workflow_id = ended.key.workflow
            if is_queued(workflow_id):
                relayed.append(ended)
                continue
            self._heard_of(sender.id, ended)
            if self._runs.knows(workflow_id):  # elected is not enough: it must be in office
                by_run[workflow_id].append(ended)
            elif (home := self._journal.keeping.follows(workflow_id)) is not None:
                moved[workflow_id] = home
            else:
                unknown.append(ended.key)
        for outcomes in by_run.values():
            for ended in outcomes:
                if ended.enclosed:
                    await self.keep_enclosed(ended)
        taken = {
            workflow_id: outcomes
            for workflow_id, outcomes in by_run.items()
            if await self._take_some(workflow_id, sender.id, outcomes)
        }
        self._home.heard_of_room(sender.id, message.free)
        kept = await self.counted(taken)
        if relayed:
            reported = await self.relay(sender.id, relayed)
            kept += reported.kept
            unknown += reported.unknown
            moved.update(reported.moved)
        return Reported(kept=tuple(kept), unknown=tuple(unknown), moved=tuple(moved.items()))

    async def _take_some(self, workflow_id: str, peer: bytes, outcomes: list[Outcome]) -> bool:
        """False: these can't be taken, and are not acknowledged."""
        run = self._runs.active.get(workflow_id)
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
            log.exception("outcomes of workflow %s can't be taken", run.id)
            return False
        return True

    async def counted(self, by_run: dict[str, list[Outcome]]) -> list[AttemptKey]:
        """The outcomes of those workflows whose entries are all committed by now."""
        committed = await asyncio.gather(*map(self.is_committed, by_run))
        return [
            ended.key
            for is_committed, outcomes in zip(committed, by_run.values(), strict=True)
            if is_committed
            for ended in outcomes
        ]

    async def is_committed(self, workflow_id: str) -> bool:
        """All of its entries so far are committed; False if they are not within a while."""
        if self._journal.is_kept(workflow_id):
            return True
        try:
            async with asyncio.timeout(COUNT_S_MAX):
                await self._journal.kept(workflow_id)
        except (TimeoutError, Deposed):
            return False
        return True

    def take_own(self, me: bytes, ended: Outcome) -> Coroutine[Any, Any, None] | bool:
        """Takes an outcome of this very peer at once: there is nobody to acknowledge it to.

        False: its home is elsewhere by now. A coroutine, to be awaited: a task of a gang has
        failed, and the gang's other peers are asked first."""
        workflow_id = ended.key.workflow
        self._heard_of(me, ended)
        run = self._runs.active.get(workflow_id)
        if run is not None and ended.key.task in run.tasks:
            if ended.kind == "failed" and run.workflow.tasks[ended.key.task].gang:
                return self._take_judged(run, me, ended)
            return self._take(run, me, [ended])
        return run is not None or self._runs.knows(workflow_id)

    async def _take_judged(self, run: Run, me: bytes, ended: Outcome) -> None:
        judged = await self._company.judged(run, ended)
        if self._runs.is_active(run):
            self._take(run, me, [judged])

    def _heard_of(self, peer: bytes, ended: Outcome) -> None:
        """The peer need not be asked about this attempt any more; unless the outcome belongs to an
        attempt of another home that has the same number by chance: the peer may know nothing of
        this home's attempt."""
        run = self._runs.active.get(ended.key.workflow)
        task = run.tasks.get(ended.key.task) if run else None
        attempt = task.attempt(ended.key.number) if task else None
        if attempt is None or attempt.epoch == ended.epoch:
            self._outstanding.drop(peer, [ended.key])

    async def keep_enclosed(self, ended: Outcome) -> None:
        """Small files come along with the outcome: this peer becomes their second holder."""
        for digest, data in ended.enclosed:
            if digest not in self._blobs:
                try:
                    await self._blobs.put(data, ended.key.workflow)
                except BlobError as error:
                    log.warning("no second copy of an output was made: %s", error)

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
        workflow_id = message.workflow
        elsewhere = self.still_held_elsewhere
        if is_queued(workflow_id) and not self._runs.knows(workflow_id) and elsewhere is not None:
            return await elsewhere(message)
        run = await self._runs.get(workflow_id)
        unwanted = run.unwanted(message.hashes) if run is not None else []
        if run is None or (not run.over and not await self.is_committed(workflow_id)):
            raise Refused("moved", ELSEWHERE)
        return Unheld(hashes=tuple(unwanted))

    async def _hand_on(self, sender: Contact, message: HandOn) -> HandedOn:
        done = await self.hand_on(sender.id, message.workflow, message.files)
        return HandedOn(hashes=tuple(done))

    async def hand_on(self, peer: bytes, workflow_id: str, files: tuple[File, ...]) -> list[bytes]:
        """That peer leaves: the files of a workflow that it alone has are copied to others. Returns
        those that it need not keep: other peers have them, or nobody wants them."""
        run = await self._runs.get(workflow_id)
        if run is None:
            raise Refused("moved", ELSEWHERE)
        committed = self._journal.is_over(workflow_id) or await self.is_committed(workflow_id)
        unwanted = set(run.unwanted(file.hash for file in files)) if committed else set()
        wanted = [file for file in files if file.hash not in unwanted]
        return [*unwanted, *await self._replication.hand_on(peer, run, wanted)]

    def _vacancy(self, sender: Contact, message: Vacancy) -> None:
        self._home.heard_of_room(sender.id, message.free)
