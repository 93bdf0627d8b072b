"""Puts together the parts of a peer that enact workflows: the same in a daemon and in `sim/`.

Its borders are handed in: calls to other peers, the members of the cluster, a disk, files, and a
workshop that runs attempts.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from ..capacity.admission import Admission
from ..capacity.door import Door
from ..config import Config
from ..consensus.archive import Archive
from ..consensus.election import Elections
from ..consensus.keeping import Keeping
from ..consensus.lines import Lines
from ..consensus.membership_change import MembershipChange
from ..consensus.placement import is_queued
from ..data.transfer import Transfer
from ..membership.liveness import Liveness
from ..membership.members import Members
from ..ports import Blobs, BookingStorage, JournalStorage, Launcher, OutboxStorage, StorageElements
from ..records import Records
from ..strategies.base import Placed, is_worth_reading
from ..strategies.gangs import Gangs
from ..strategies.pilots.service import PilotsService
from ..strategies.registry import services
from ..strategies.service import Context, FileEvents, Service, Work
from ..wire.messages import Outcome
from ..wire.rpc import Rpc
from .answers import Answers
from .executor import Executor
from .fencing import Fencing
from .gateway import Gateway
from .home import Home
from .journal import Journal
from .locate import VOID_HOME, Locate
from .outbox import Outbox
from .relay import Exchange, Relay
from .retention import Retention
from .targets import Targets

log = logging.getLogger("valence.peer")

S = TypeVar("S", bound=Service)

HAND_ON_S_MIN = 1.0  # even if tasks have used up the grace period


class Enactment:
    def __init__(
        self,
        *,
        rpc: Rpc,
        members: Members,
        liveness: Liveness,
        records: Records,
        journals: JournalStorage,
        outbox: OutboxStorage,
        blobs: Blobs,
        transfer: Transfer,
        workshop: Launcher,
        clock: Callable[[], float],
        rng: random.Random,
        config: Config,
        storage: StorageElements | None = None,
        exchange: Exchange | None = None,
        targets: Callable[[Home], Targets] | None = None,
        gateway: Callable[..., Gateway] = Gateway,
        bookings: BookingStorage | None = None,
    ) -> None:
        self.members = members
        self._liveness = liveness
        self.admission = Admission(members.me.capacity, members.me.traits, config)
        self.door = door = Door(rpc, members, self.admission, config.lease_ttl_s)
        counts: Counter[str] = Counter()
        fencing = Fencing(counts)
        self.outbox = Outbox(
            rpc=rpc, members=members, door=door, blobs=blobs, storage=outbox, fencing=fencing,
            counts=counts,
        )  # fmt: skip
        self.executor = Executor(
            rpc=rpc, members=members, door=door, outbox=self.outbox, fencing=fencing, blobs=blobs,
            workshop=workshop, clock=clock, gang_check_s=config.gang_check_s, counts=counts,
        )  # fmt: skip
        self.keeping = Keeping(rpc, members, journals, clock, rng, config)
        self.journal = Journal(journals, self.keeping)
        self.home = Home(
            rpc=rpc,
            members=members,
            records=records,
            blobs=blobs,
            transfer=transfer,
            journal=self.journal,
            clock=clock,
            rng=rng,
            storage=storage,
            targets=targets,
        )
        self.gangs = Gangs(rpc, members, rng, config, clock, self.home.placed, self.home.estimate)
        self.home.use(self.gangs)
        files = FileEvents(lambda: blobs.cache.prefixes)
        context = Context(
            rpc, members, liveness, clock, rng, config, door, files, self._placed,
            self.home.estimate, bookings,
        )  # fmt: skip
        self.services = services(context)
        for service in self.services.values():
            self.home.use(service.strategy)
            if service.planner is not None and self.home.targets.may_promise:
                self.home.planning.planner = service.planner
        site = self.service(PilotsService)
        self.relay = Relay(rpc, members, site.site, site.pilots, rng, exchange)
        self.home.reception.relay = self.relay.report
        self.home.reception.still_held_elsewhere = self.relay.still_held
        self._site, self._files = site.site, files
        self.executor.on_made = self._made
        self.outbox.on_let_go = self._let_go
        self.elections = Elections(self.keeping, self.home.take_up)
        self.membership_change = MembershipChange(self.keeping)
        self.lines = Lines(self.keeping)
        self.elections.meet = self.lines.look
        self.archive = Archive(self.keeping, self.elections, self.lines)
        answers = Answers(self.home, rpc, clock)
        locate = Locate(rpc, members, records, self.journal)
        stuck = answers.why_stuck = self.elections.stuck
        self.gateway = gateway(rpc, members, self.home, answers, locate, rng, stuck)
        self.outbox.take_own = self._take_own
        self._locate = locate
        self.outbox.find_home = self._find_home
        hand_on = self.home.reception.hand_on
        self.retention = Retention(rpc, members, blobs, self._find_home, locate.forget, hand_on)
        self._transfer = transfer
        self.home.duplicates.find = locate.duplicate
        self.home.outstanding.on_first = liveness.stir
        self.keeping.on_deposed = self.home.deposed
        self.keeping.on_dropped = self.home.dropped
        self.keeping.on_doubt = liveness.suspect
        self.keeping.on_company = self._stir
        liveness.watched = self._watched

    def service(self, kind: type[S]) -> S:
        """The strategy service of that class."""
        return next(service for service in self.services.values() if isinstance(service, kind))

    def load(self) -> None:
        """Loads what an earlier process of this peer left on disk. No message was handled yet."""
        self.keeping.load()
        for service in self.services.values():
            service.load()
        self.outbox.load()

    def settle(self) -> None:
        """Goes on with what was loaded: the other peers are known, or none answered for a while."""
        self.home.settle()
        self.relay.settle()
        self.elections.start()

    def works(self) -> list[tuple[str, Work]]:
        """The loops that run as long as the peer does. One that fails is started again."""
        return [
            *(work for service in self.services.values() for work in service.works()),
            ("gangs", self.gangs.run),
            ("ganged", self.executor.watch_gangs),
            ("calls", self.executor.watch_calls),
            ("relay", self.relay.run),
            ("relayed", self.relay.outstanding.watch),
            ("outstanding", self.home.outstanding.watch),
            ("promises", self.home.promises.watch),
            ("retention", self.retention.run),
            ("catalog", self._transfer.run),
            ("stragglers", self.home.stragglers.watch),
            ("elections", self.elections.run),
            ("membership_change", self.membership_change.run),
            ("archive", self.archive.run),
            ("lines", self.lines.run),
        ]

    def _take_own(self, ended: Outcome) -> bool:
        taken = self.home.take_own(ended)
        if taken:
            self._let_go(ended)
        return taken

    def _let_go(self, ended: Outcome) -> None:
        """The outcome has reached its home."""
        if ended.outputs and is_worth_reading(ended.outputs):
            for told in self._files.on_told:
                told()

    def _made(self, took_s: float) -> None:
        for made in self._files.on_made:
            made(took_s)

    def _placed(self, batch: list[Placed]) -> None:
        """Passes placed units on: to this peer's home, or to the relay if pulled from a queue."""
        pulled = [one for one in batch if is_queued(one.unit.key.workflow)]
        if pulled:
            self.relay.placed(pulled)
        if len(pulled) < len(batch):
            self.home.placed([one for one in batch if not is_queued(one.unit.key.workflow)])

    async def _find_home(self, workflow: str) -> bytes | None:
        if is_queued(workflow) and self.relay.exchange is not None:
            return self._site.master(self._site.name)
        home = await self._locate.home(workflow)
        return None if home == VOID_HOME else home

    def _stir(self) -> None:
        self._liveness.stir()
        self.elections.stir()

    def _watched(self) -> set[bytes]:
        """The peers to watch closely: those that run attempts for this one or keep its journals."""
        working = (*self.home.outstanding.peers(), *self.relay.outstanding.peers())
        return {*working, *self.keeping.company()}

    async def leave(self, grace_s: float) -> None:
        """Accepts nothing more, finishes or hands back attempts, reports outcomes, and copies files
        that no other peer has."""
        self.home.closed = self._transfer.closed = self.elections.closed = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        await self.executor.leave(grace_s)
        limit_s = max(min(grace_s, HAND_ON_S_MIN), deadline - loop.time())
        safe, left = await self.retention.hand_on(limit_s, self.executor.hurry)
        if left:
            log.info("leaving with %d files that no other peer has (%d were copied)", left, safe)

    async def close(self) -> None:
        await self.executor.close()
        await self.retention.close()
        await self.relay.close()
        await self.home.close()
        for service in self.services.values():
            await service.close()
        await self.keeping.close()
        await asyncio.sleep(0)
