"""A grid of sites on the simulator, with Valence's strategies, admission and calls.

Section 5.2 of the paper: every site is a broker with one fork-join workflow, and a resource with a
number of processors, their speed, architecture and operating system. The paper takes these from
five grids of its time and gives no numbers. Here they are drawn at random: processors log-uniformly
from 1 to 400 (with these, tickets every 100 s lead to about the paper's Table 5), speeds around
2,200 MIPS from 700 to 3,000, nine in ten sites of one architecture and nine in ten of one system,
as in those grids. Tasks ask for a speed of 700 to 1,500 MIPS, as the claims of the paper's Table 2
do, and for an architecture and a system that some site has. Tasks are timers.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from sim.loop import run_out
from sim.network import Network
from valence.protocols.capacity.admission import Admission
from valence.protocols.capacity.door import Door, Guest
from valence.protocols.capacity.matching import unmet
from valence.protocols.config import LAN, Config
from valence.protocols.membership.members import Members
from valence.protocols.strategies.base import Placed, Placement, Strategy, Unit
from valence.protocols.strategies.tickets.claims import Tickets
from valence.protocols.strategies.tickets.config import TicketsConfig
from valence.protocols.strategies.tickets.owner import Owner
from valence.protocols.strategies.tickets.provider import TicketProvider
from valence.protocols.strategies.tickets.space import Space
from valence.protocols.wire.messages import (
    AttemptKey,
    Capacity,
    Commit,
    Committed,
    Contact,
    Member,
    Needs,
    Offers,
    Reserve,
    Room,
    Traits,
    Work,
)
from valence.protocols.wire.rpc import Rpc

ARCHITECTURES = (*["intel"] * 9, "sparc")
SYSTEMS = (*["linux"] * 9, "solaris")
LEASE_S = 60.0
SPEED = 1000.0  # MIPS of a peer of speed 1
SPEEDS = (0.7, 3.0, 2.2)  # minimum, maximum and mode
SPEEDS_ASKED = (0.7, 1.5)
MI = (50_000, 500_000)
FORKS = 5
PROCESSORS_MAX = 400
VIRTUAL_S_MAX = 2e6
NON_COOPERATIVE = ("non-cooperative", "task by task")

#: as in the paper: 4 dimensions (processors, speed, architecture, system), f_min = 4
MARKETS = TicketsConfig(
    cell_cores=(4, 16, 64),
    cell_speeds=(1.6, 2.0, 2.35),  # its quartiles
    cell_memory_gib=(),
    cell_words=4,
    claim_refresh_s=60.0,  # nobody dies here
    claim_ttl_s=10_000.0,
    ticket_refresh_s=600.0,
    ticket_wanted_s=100.0,
    ticket_hold_after_s=1e9,
)
GRID = replace(
    LAN,
    queue_s_max=0.0,
    lease_ttl_s=LEASE_S,
    vacancy_wishes_max=0,  # the paper notifies nobody
    sections=(MARKETS,),
)


@dataclass(frozen=True, slots=True)
class Experiment:
    tasks: int = 100  # of each workflow
    mode: str = "tickets"  # or interval, centralised, non-cooperative, task by task
    interval_s: float = 300.0  # between tickets, in the mode that has them
    sites: int = 100
    seed: int = 1

    def config(self) -> Config:
        if self.mode == "interval":
            timed = replace(MARKETS, ticket_on_change=False, ticket_refresh_s=self.interval_s)
            return replace(GRID, queue_share=0.0).having(timed)
        if self.mode == "centralised":  # one cell, so one owner; it need not plan ahead
            one = replace(
                MARKETS, cell_cores=(), cell_speeds=(), cell_words=1, cell_peers_max=10**6
            )
            return replace(GRID, queue_share=0.0).having(one)
        if self.mode in NON_COOPERATIVE:
            return replace(GRID, queue_s_max=1e12, queue_units_max=10**9, patience_s=1e12)
        return GRID


@dataclass(slots=True)
class Result:
    makespan_s: float = 0.0  # mean over workflows
    delay_s: float = 0.0  # from ready to placed, mean over tasks
    idle_s: float = 0.0  # the part of it during which the processor that it then got was free
    waiting_s: float = 0.0  # from ready to running
    response_s: float = 0.0
    notifications: float = 0.0  # per task
    claims: int = 0
    tickets: int = 0
    messages: int = 0
    tasks: int = 0
    per_processor: list[float] = field(default_factory=list)

    def quartiles(self) -> tuple[float, float, float, float, float]:
        ordered = sorted(self.per_processor)
        q1, median, q3 = statistics.quantiles(ordered, n=4)
        return ordered[0], q1, median, q3, ordered[-1]


class FirstMatch:
    """The non-cooperative mode: all ready tasks of a broker go to the first resource that matches;
    or, kinder than the paper's description, each task to a resource of its own."""

    name = "first match"

    def __init__(
        self, rpc: Rpc, members: Members, rng: random.Random, on_placed: Any, each: bool
    ) -> None:
        self._rpc, self._members, self._rng, self._on_placed = rpc, members, rng, on_placed
        self._each = each
        self._units: asyncio.Queue[list[Unit]] = asyncio.Queue()

    def add(self, units: Any) -> None:
        self._units.put_nowait(list(units))

    async def run(self) -> None:
        while True:
            units = await self._units.get()
            fitting = [
                m for m in self._members.here() if not unmet(m.capacity, m.traits, units[0].needs)
            ]
            chosen = [self._rng.choice(fitting)] * len(units)
            if self._each:
                # weighted by size: a lookup finds a processor, not a site
                sizes = [m.capacity.millicores for m in fitting]
                chosen = self._rng.choices(fitting, sizes, k=len(units))
            for first in {m.contact.id: m for m in chosen}.values():
                part = [u for u, m in zip(units, chosen, strict=True) if m is first]
                room = Room(part[0].needs, len(part), 1.0, None, True)
                answer = await self._rpc.call(first.contact, Reserve(asks=(room,)), Offers, 60.0)
                leases = answer.grants[0].leases
                assert len(leases) == len(part), answer.grants[0].refusal
                record = Placement(self.name)
                self._on_placed(
                    [Placed(u, first.contact, x, record) for u, x in zip(part, leases, strict=True)]
                )


class GridSite(Guest):
    """A peer, which is both a broker and a resource."""

    def __init__(self, grid: Grid, index: int, member: Member, everybody: list[Member]) -> None:
        self.grid = grid
        self.member = member
        self.executed = 0
        self.free_since = deque([0.0] * (member.capacity.millicores // 1000))
        self.rng = random.Random(f"{grid.plan.seed} site {index}")
        config = grid.config
        wire = grid.network.wire(member.contact)
        self.rpc = wire.rpc = Rpc(member.contact, wire, self.rng, config)
        self.members = Members(member, config)
        for other in everybody:
            self.members.apply(other, 0.0)
        self.admission = Admission(member.capacity, member.traits, config)
        self.door = door = Door(self.rpc, self.members, self.admission, LEASE_S)
        door.open(self)
        self.works: list[Any] = []
        self.strategy: Strategy | FirstMatch
        self.provider: TicketProvider | None = None
        self.owner: Owner | None = None
        if grid.plan.mode in NON_COOPERATIVE:
            each = grid.plan.mode == "task by task"
            self.strategy = FirstMatch(self.rpc, self.members, self.rng, self.placed, each)
            self.works = [self.strategy.run()]
        else:
            space = Space(self.members, config)
            self.owner = Owner(self.rpc, self.members, space, self.rng, config)
            self.strategy = Tickets(
                self.rpc, self.members, space, self.rng, config, self.placed, self.estimate
            )
            self.provider = TicketProvider(
                self.rpc, self.members, space, self.rng, config, door.reserve, door.ticket
            )
            door.on_room.append(self.provider.changed)
            self.works = [self.strategy.run(), self.owner.run(), self.provider.run()]

    # as a resource

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def start(self, unit: Hashable) -> None:
        key = cast(AttemptKey, unit)
        self.executed += 1
        self.grid.began(key, self.now(), self.free_since.popleft())
        runtime_s = self.grid.size(key) / (SPEED * self.member.traits.speed)
        asyncio.get_running_loop().call_later(runtime_s, self._end, key)

    def _end(self, key: AttemptKey) -> None:
        self.door.release(key)
        self.free_since.append(self.now())
        self.grid.ended(key, self.now())
        self.door.advance()

    # as a broker

    def estimate(self, unit: Unit) -> float | None:
        """The run time that a user might estimate: about as long as any other task."""
        return sum(MI) / 2 / SPEED

    def placed(self, batch: list[Placed]) -> None:
        by_peer: dict[bytes, tuple[Contact, list[Work]]] = {}
        for one in batch:
            self.grid.placed(one.unit.key, self.now())
            work = Work(one.unit.key, one.lease, one.unit.needs, command=("work",))
            by_peer.setdefault(one.peer.id, (one.peer, []))[1].append(work)
        for contact, works in by_peer.values():
            self.grid.spawn(self._send(contact, works))

    async def _send(self, contact: Contact, works: list[Work]) -> None:
        answer = await self.rpc.call(contact, Commit(works=tuple(works)), Committed, 30.0)
        for key, _ in answer.refused:
            again = key._replace(number=key.number + 1)
            self.grid.again(key, again)
            self.strategy.add([self.grid.unit(self, again)])


class Grid:
    def __init__(self, plan: Experiment) -> None:
        self.plan = plan
        self.config = plan.config()
        self.network = Network(plan.seed)
        rng = self.rng = random.Random(f"grid {plan.seed}")
        everybody = []
        for index in range(plan.sites):
            peer_id = random.Random(f"site {index}").randbytes(20)
            contact = Contact(peer_id, f"10.0.{index // 250}.{index % 250}", 7000)
            processors = round(PROCESSORS_MAX ** rng.random())
            speed = rng.triangular(*SPEEDS)
            traits = Traits(rng.choice(ARCHITECTURES), rng.choice(SYSTEMS), "site", speed)
            everybody.append(
                Member(contact, "http://x", Capacity(1000 * processors, 2**40), traits)
            )
        self.sites = [GridSite(self, i, m, everybody) for i, m in enumerate(everybody)]
        self.ready_at: dict[str, float] = {}
        self.sizes: dict[str, float] = {}
        self.sums: Counter[str] = Counter()
        self.left: dict[int, list[list[str]]] = {}
        self.running: dict[int, int] = {}
        self.makespans: list[float] = []
        self.over = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        # the needs of each broker's tasks, which some resource meets
        self.needs = []
        for _ in range(plan.sites):
            like = rng.choice(everybody)
            slowest = min(rng.uniform(*SPEEDS_ASKED), like.traits.speed)
            self.needs.append(
                Needs(Capacity(1000), like.traits.arch, like.traits.os, None, slowest)
            )

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def levels(self) -> list[int]:
        """Forks between single tasks, as wide as the number of tasks requires."""
        wide = self.plan.tasks - FORKS - 1
        widths = [wide // FORKS + (i < wide % FORKS) for i in range(FORKS)]
        return [1, *(w for width in widths for w in (width, 1))]

    # a task's key: workflow = its broker's number, task = its own

    def unit(self, site: GridSite, key: AttemptKey) -> Unit:
        broker = int(key.workflow)
        # upward rank: the levels after it, each as long as a task of mean size
        rank = (2 * FORKS + 1 - int(key.task.split(".")[0])) * sum(MI) / 2 / SPEED
        return Unit(key, self.needs[broker], rank)

    def size(self, key: AttemptKey) -> float:
        return self.sizes[f"{key.workflow}/{key.task}"]

    def begin_level(self, broker: int) -> None:
        now = asyncio.get_running_loop().time()
        if not self.left[broker]:
            self.makespans.append(now)
            if len(self.makespans) == self.plan.sites:
                self.over.set()
            return
        names = self.left[broker].pop(0)
        self.running[broker] = len(names)
        site = self.sites[broker]
        keys = [AttemptKey(str(broker), name, 1) for name in names]
        for key in keys:
            self.ready_at[f"{broker}/{key.task}"] = now
        site.strategy.add([self.unit(site, key) for key in keys])

    def placed(self, key: AttemptKey, now: float) -> None:
        self.sums["delay"] += now - self.ready_at[f"{key.workflow}/{key.task}"]  # type: ignore[assignment]

    def again(self, key: AttemptKey, new: AttemptKey) -> None:
        self.sums["again"] += 1

    def began(self, key: AttemptKey, now: float, free_since: float) -> None:
        ready_at = self.ready_at[f"{key.workflow}/{key.task}"]
        self.sums["waiting"] += now - ready_at  # type: ignore[assignment]
        self.sums["idle"] += now - max(ready_at, free_since)  # type: ignore[assignment]

    def ended(self, key: AttemptKey, now: float) -> None:
        broker = int(key.workflow)
        self.sums["response"] += now - self.ready_at[f"{key.workflow}/{key.task}"]  # type: ignore[assignment]
        self.sums["tasks"] += 1
        self.running[broker] -= 1
        if not self.running[broker]:
            latency_s = self.network.faults.latency_s
            asyncio.get_running_loop().call_later(latency_s, self.begin_level, broker)

    async def run(self) -> Result:
        for site in self.sites:
            for work in site.works:
                self.spawn(work)
        rng = random.Random(f"tasks {self.plan.seed}")
        for broker in range(self.plan.sites):
            names = [[f"{n}.{i}" for i in range(w)] for n, w in enumerate(self.levels())]
            self.left[broker] = names
            for level in names:
                for name in level:
                    self.sizes[f"{broker}/{name}"] = rng.uniform(*MI)
        for broker in range(self.plan.sites):
            self.begin_level(broker)
        async with asyncio.timeout(VIRTUAL_S_MAX):
            await self.over.wait()
        for task in list(self._tasks):
            task.cancel()
        count = self.sums["tasks"]
        notified = offered = 0
        tickets = claims = 0
        for site in self.sites:
            if site.owner is not None and site.provider is not None:
                tickets += site.provider.counts["tickets"]
                claims += site.owner.counts["claims"]
                offered += site.strategy.counts["offered"]  # type: ignore[union-attr]
        notified = offered or count
        return Result(
            statistics.mean(self.makespans),
            self.sums["delay"] / count,
            self.sums["idle"] / count,
            self.sums["waiting"] / count,
            self.sums["response"] / count,
            notified / count,
            claims,
            tickets,
            self.network.sent,
            count,
            [s.executed / (s.member.capacity.millicores / 1000) for s in self.sites],
        )


def experiment(plan: Experiment) -> Result:
    async def run() -> Result:
        return await Grid(plan).run()

    return run_out(run())
