"""A simulated host: a disk, and one life after another of the peer that runs on it.

The peer is the product's own: `SimPeer` is its substrate, `enactment` does all work on workflows.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from valence.master.queue import Sites
from valence.peer.booking_storage import SqliteBookingStorage
from valence.peer.journal_storage import SqliteJournalStorage
from valence.peer.outbox_storage import SqliteOutboxStorage
from valence.protocols.config import Config
from valence.protocols.consensus.placement import QUEUED
from valence.protocols.data.cache import Reservation as CacheRoom
from valence.protocols.data.transfer import Transfer, Unavailable
from valence.protocols.engine.enactment import Enactment
from valence.protocols.engine.home import Home
from valence.protocols.engine.targets import Peers, Targets
from valence.protocols.wire.messages import (
    BlobPart,
    Capacity,
    Contact,
    File,
    Hello,
    Message,
    PulledTasks,
    PullTasks,
    ReadBlob,
    Traits,
    Welcome,
)
from valence.protocols.wire.rpc import CallFailed

from .disk import Platter, SimDatabase
from .files import SimBlobs, SimLauncher
from .loop import Life
from .network import Network, SimPeer

T = TypeVar("T")
QUEUE_INDEX = 60_000
EPOCH_OF_TIME = 1_700_000_000.0


class Host:
    def __init__(
        self,
        network: Network,
        index: int,
        config: Config,
        capacity: Capacity,
        skew_s: float,
        site: str = "here",
        queue: Contact | None = None,
        labels: tuple[str, ...] = (),
    ) -> None:
        self.labels = labels
        self.index = index
        self.platter = Platter()
        self.capacity = capacity
        self.skew_s = skew_s
        self.life: Life | None = None
        self.gone = False  # for good
        self.slots = capacity.millicores // 1000
        self.sync_s = 0.001
        self.quota_bytes = 2**40
        self.site = site
        self.queue = queue  # the task queue that its site pulls from
        self._network = network
        self._config = config

    @property
    def up(self) -> bool:
        return self.life is not None

    @property
    def id(self) -> bytes:
        return self.peer.contact.id

    def start(self, seeds: list[Contact]) -> None:
        self.life = Life()
        self.platter.boots += 1
        if hasattr(self, "peer"):
            self._network.closed.discard(self.id)
            self._network.muted.discard(self.id)
        self.life.context.run(self._start, seeds)

    def _start(self, seeds: list[Contact]) -> None:
        self.peer = peer = SimPeer(
            self._network,
            self.index,
            self._config,
            self.capacity,
            Traits(arch="x86_64", os="linux", site=self.site, labels=self.labels),
            boot=self.platter.boots,
            life=self.life,
        )
        rng = self.rng = random.Random(peer.rng.getrandbits(64))
        self.database = SimDatabase(self.platter, random.Random(rng.getrandbits(64)))
        self.database.sync_s = self.sync_s
        self.blobs = SimBlobs(self.platter, self.quota_bytes)
        self.transfer = Transfer(
            peer.rpc,
            self.blobs,
            peer.members,
            peer.records,
            self.clock,
            random.Random(rng.getrandbits(64)),
        )
        self.workshop = SimLauncher(self.blobs, self.transfer, rng)
        self.enactment = Enactment(
            rpc=peer.rpc,
            members=peer.members,
            liveness=peer.liveness,
            records=peer.records,
            journals=SqliteJournalStorage(self.database, self.clock),
            outbox=SqliteOutboxStorage(self.database, self.clock),
            bookings=SqliteBookingStorage(self.database),
            blobs=self.blobs,
            transfer=self.transfer,
            workshop=self.workshop,
            clock=self.clock,
            rng=rng,
            config=self._config,
            exchange=self._exchange if self.queue is not None else None,
            targets=self._targets,
        )
        if self.queue is not None:
            self.transfer.from_origin = self._from_queue
        self._started()
        self.enactment.load()
        self.tasks = [asyncio.ensure_future(work()) for _, work in self.enactment.works()]
        self.tasks.append(asyncio.ensure_future(self._join(seeds)))

    def _targets(self, home: Home) -> Targets:
        return Peers(home)

    def _started(self) -> None:
        pass

    async def _exchange(self, message: Message) -> Message:
        assert self.queue is not None
        return await self.peer.rpc.call(self.queue, message, Message, 10.0)

    async def _from_queue(self, file: File, hold: str, room: CacheRoom) -> None:
        """Fetch an input of a queue's workflow; a real peer fetches it over HTTP."""
        assert self.queue is not None
        message = ReadBlob(hash=file.hash, offset=0, length=max(1, file.size))
        try:
            answer = await self.peer.rpc.call(self.queue, message, BlobPart, 5.0)
        except CallFailed as error:
            raise Unavailable(f"{file.name}: the queue does not answer: {error}") from None
        self.blobs.keep(file.hash, answer.data, hold, room)

    def clock(self) -> float:
        return EPOCH_OF_TIME + self.skew_s + asyncio.get_running_loop().time()

    async def _join(self, seeds: list[Contact]) -> None:
        """Join as the daemon does: greet until a peer answers, then settle; and go on greeting."""
        others = [seed for seed in seeds if seed.id != self.id]
        settled, again_s = not others, 2.0
        met: set[bytes] = set()  # peers that the failure detector looks after
        if settled:
            self.enactment.settle()
        while others:
            await self._greet_new(self.rng.choice(others), met)
            if not settled and self.peer.members.count > 1:
                settled = True
                await asyncio.sleep(0.5)
                self.enactment.settle()
            await asyncio.sleep(0.3 if not settled else again_s)
            again_s = min(30.0, 1.2 * again_s) if settled else 2.0

    async def _greet_new(self, seed: Contact, met: set[bytes]) -> None:
        if self.peer.members.get(seed.id) is not None:
            met.add(seed.id)
        if self.peer.members.count <= 1 or seed.id not in met:
            await self._greet(seed)

    async def _greet(self, seed: Contact) -> None:
        try:
            hello = Hello(member=self.peer.members.me)
            answer = await self.peer.rpc.call(seed, hello, Welcome, 1.0)
        except CallFailed:
            return
        self.peer.members.apply(answer.member, asyncio.get_running_loop().time())
        await self.peer.liveness.sync(seed)
        await self.peer.overlay.find(self.id)

    async def leave(self, grace_s: float) -> None:
        """Leave as the daemon does."""
        await self.enactment.leave(grace_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                peer = self.peer
                await asyncio.gather(peer.records.hand_on(), peer.liveness.leave())

    def kill(self, whole: bool = True, mute: bool = False) -> None:
        """Kill the peer between two steps, without a word: the `whole` host, or only its process.
        The messages that a whole host has in flight are lost, too: always if `mute`, else often."""
        assert self.life is not None
        if not whole:
            self._network.close(self.id)
        elif mute or self._network.rng.random() < 0.5:
            self._network.muted.add(self.id)
        self.database.crash()
        self.life.kill()
        self.life = None

    def bury(self) -> None:
        """Free its memory: it will not be back, and nobody looks at it any more."""
        peer, enactment = self.peer, self.enactment
        self._network.forget(peer.contact)
        self.platter.tables.close()
        for part in (*vars(enactment).values(), *vars(peer).values()):
            product = type(part).__module__.startswith(("valence.peer.", "valence.protocols."))
            if product and hasattr(part, "__dict__"):
                vars(part).clear()

    async def do(self, work: Coroutine[Any, Any, T], limit_s: float) -> T | None:
        """Run this as a part of the peer; None if it does not end in time."""
        assert self.life is not None
        task = asyncio.get_running_loop().create_task(work, context=self.life.context.copy())
        done, _ = await asyncio.wait([task], timeout=limit_s)
        if not done:
            task.cancel()
            return None
        return task.result()


class QueueHost(Host):
    """A task queue: a host that is nobody's peer."""

    sites: Sites

    def __init__(self, network: Network, config: Config, skew_s: float) -> None:
        alone = replace(config, keepers=1)
        super().__init__(network, QUEUE_INDEX, alone, Capacity(), skew_s)

    def _targets(self, home: Home) -> Targets:
        self.sites = Sites(home)
        return self.sites

    def _started(self) -> None:
        self.enactment.gateway.prefix = QUEUED
        self.peer.rpc.on(PullTasks, self._pull)
        self.watching = asyncio.ensure_future(self.sites.watch())

    async def _pull(self, sender: Contact, message: PullTasks) -> PulledTasks:
        return await self.sites.pull(message)
