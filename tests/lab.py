"""Simulated peers with a door and one strategy each: what the conformance suite looks at.

One of them, the home, has units to place. What it is given room for it commits; what a peer runs
ends after a while, and its home hears of the room, as with a report.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import cast

from sim.network import Faults, Network, SimPeer
from valence.protocols.capacity.admission import Admission
from valence.protocols.capacity.door import Door, Guest
from valence.protocols.config import LAN
from valence.protocols.strategies.base import Placed, Unit
from valence.protocols.strategies.registry import MADE_BY
from valence.protocols.strategies.service import Context, FileEvents
from valence.protocols.wire.messages import (
    AttemptKey,
    Capacity,
    Commit,
    Committed,
    Contact,
    Needs,
    Traits,
    Vacancy,
    Work,
)
from valence.protocols.wire.rpc import CallFailed

CORE = Needs(Capacity(millicores=1000))
GIB = 2**30


def unit(name: str, needs: Needs = CORE, **more: object) -> Unit:
    return Unit(AttemptKey("w", name, 1), needs, **more)  # type: ignore[arg-type]


class Bench(Guest, SimPeer):
    """A peer: what it runs is a timer."""

    def __init__(self, lab: Lab, index: int, capacity: Capacity, traits: Traits) -> None:
        super().__init__(lab.network, index, LAN, capacity, traits)
        self.lab = lab
        self.running: dict[AttemptKey, bytes] = {}
        self.homes: dict[AttemptKey, bytes] = {}
        self.dead = False
        self.admission = Admission(self.capacity, self.traits, LAN)
        self.door = Door(self.rpc, self.members, self.admission, LAN.lease_ttl_s)
        self.door.open(self)
        context = Context(
            self.rpc, self.members, self.liveness, lab.now, self.rng, LAN, self.door,
            FileEvents(dict), self._placed, lambda unit: unit.runtime_s,
        )  # fmt: skip
        self.service = MADE_BY[lab.strategy](context)
        self.strategy = self.service.strategy
        self.rpc.on(Vacancy, lambda sender, m: self.strategy.vacancy(sender.id, m.free))
        self._tasks += [asyncio.ensure_future(run()) for _, run in self.service.works()]
        self._side: set[asyncio.Task[None]] = set()

    # as a home

    def _placed(self, batch: list[Placed]) -> None:
        for one in batch:
            self.lab.placed.append(one)
            task = asyncio.ensure_future(self._commit(one))
            self._side.add(task)
            task.add_done_callback(self._side.discard)

    async def _commit(self, one: Placed) -> None:
        work = Work(one.unit.key, one.lease, one.unit.needs, command=("x",), owner=one.unit.owner)
        try:
            answer = await self.rpc.call(one.peer, Commit(works=(work,)), Committed, 3.0)
        except CallFailed:
            await asyncio.sleep(2 * LAN.lease_ttl_s)  # it may have come there: the home would ask
            if not self.lab.ran[one.unit.key.task]:
                self.again(one.unit)
        else:
            if answer.refused:
                self.again(one.unit)

    def again(self, unit: Unit) -> None:
        """The next attempt of what was lost, or refused."""
        self.strategy.add([unit._replace(key=unit.key._replace(number=unit.key.number + 1))])

    # as a resource

    def refusal(self, home: bytes, work: Work) -> str | None:
        return None if work.key in self.homes else ""

    def let_in(self, home: bytes, work: Work) -> None:
        self.homes[work.key] = home

    def hand_back(self, unit: Hashable, reason: str) -> None:
        self.door.release(unit)
        self.lab.handed_back(cast(AttemptKey, unit))

    def start(self, unit: Hashable) -> None:
        key = cast(AttemptKey, unit)
        assert key not in self.lab.begun, f"{key} is begun twice"
        self.lab.begun[key] = self.contact.id
        self.lab.order.append(key.task)
        self.admission.sanity_check()
        asyncio.get_running_loop().call_later(self.lab.runtime_s, self._end, key)

    def _end(self, key: AttemptKey) -> None:
        if self.dead:
            return
        self.lab.ran[key.task] += 1
        self.lab.at[key.task] = self.contact.id
        self.door.release(key)
        self.door.advance()
        home = self.members.contact(self.homes[key])
        if home is not None:
            self.rpc.tell(home, Vacancy(free=self.admission.free))

    async def die(self) -> None:
        self.dead = True
        await self.crash()

    async def close(self) -> None:
        self.door.close()
        for task in list(self._side):
            task.cancel()
        await self.service.close()
        await super().close()


class Lab:
    PATIENCE_S = 120.0  # virtual

    def __init__(self, strategy: str, seed: int = 1, faults: Faults | None = None) -> None:
        self.strategy = strategy
        self.network = Network(seed, faults)
        self.runtime_s = 0.2
        self.peers: list[Bench] = []
        self.units: dict[AttemptKey, Unit] = {}
        self.placed: list[Placed] = []
        self.begun: dict[AttemptKey, bytes] = {}
        self.order: list[str] = []
        self.ran: Counter[str] = Counter()
        self.at: dict[str, bytes] = {}

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def home(self) -> Bench:
        return self.peers[0]

    async def peer(self, cores: int = 2, gpus: int = 0, **traits: object) -> Bench:
        capacity = Capacity(millicores=1000 * cores, memory_bytes=8 * GIB, gpus=gpus)
        kept = {"arch": "x86_64", "os": "linux", "site": "here", **traits}
        made = Bench(self, len(self.peers), capacity, Traits(**kept))  # type: ignore[arg-type]
        self.peers.append(made)
        if made is not self.home:
            await made.join(self.home)
        return made

    async def open(self, count: int, cores: int = 2) -> Lab:
        for _ in range(count):
            await self.peer(cores)
        await self.until(lambda: all(len(p.members.here()) == count for p in self.peers))
        return self

    def add(self, units: Iterable[Unit]) -> None:
        units = list(units)
        self.units.update((unit.key, unit) for unit in units)
        self.home.strategy.add(units)

    def handed_back(self, key: AttemptKey) -> None:
        first = self.units[key._replace(number=1)]
        self.home.again(first._replace(key=key))

    async def give_up_at(self, gone: set[bytes]) -> None:
        """The home finds out who is dead: what was given to those is placed anew."""
        await self.until(lambda: not {m.contact.id for m in self.home.members.here()} & gone)
        for _ in range(20):
            latest = {one.unit.key.task: one for one in self.placed}
            for one in latest.values():
                if one.peer.id in gone and not self.ran[one.unit.key.task]:
                    self.placed.remove(one)
                    self.home.again(one.unit)
            await asyncio.sleep(1.0)

    async def until(self, condition: Callable[[], object], within_s: float | None = None) -> None:
        """In virtual seconds."""
        end = self.now() + (within_s or self.PATIENCE_S)
        while not condition():
            assert self.now() < end, self.story()
            await asyncio.sleep(0.02)

    def story(self) -> str:
        """Why it is not over."""
        waiting = [
            f"{unit.key.task}: {self.home.strategy.waiting_for(unit.key)}"
            for unit in self.units.values()
            if not self.ran[unit.key.task]
        ]
        return f"{len(waiting)} of {len(self.units)} have not run: {'; '.join(waiting[:5])}"

    async def all_ran(self, within_s: float | None = None) -> None:
        await self.until(
            lambda: all(self.ran[unit.key.task] for unit in self.units.values()), within_s
        )

    def contacts(self) -> list[Contact]:
        return [peer.contact for peer in self.peers]

    async def close(self) -> None:
        """Nothing is over-booked, and in the end all room is free again."""
        await asyncio.sleep(2 * LAN.lease_ttl_s + 2 * self.runtime_s)
        for peer in self.peers:
            if not peer.dead:
                peer.admission.expire(self.now())
                peer.admission.sanity_check()
                free = peer.admission.free == peer.admission.capacity
                assert free, f"room leaked: {peer.admission.free} of {peer.admission.capacity}"
                assert not peer.errors, peer.errors
                await peer.close()
