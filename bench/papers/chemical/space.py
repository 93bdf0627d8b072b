"""A community of nodes on the simulator, with Valence's own layer, strategy, admission and calls.

Section 4.1 of the paper: workflows of 3 to 10 levels, each of 1 to 15 tasks of 1 to 10 steps, sent
to nodes of unlimited computing power (here: 64 cores each). Tasks are timers. A step is the longest
time that a message takes (4 ms). Two modes:

- *default*: Valence's own. A task is placed as soon as its inputs are there; a group of equal tasks
  asks once; every node knows the others, so a place on the ring is one step away.
- *paper*: level by level, molecules at the owners of their ids (`engine`); each task asks for
  itself; a place on the ring is looked up, from finger to finger.
"""

from __future__ import annotations

import asyncio
import copy
import random
import statistics
from bisect import bisect_left
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

from sim.loop import run_out
from sim.network import Faults, Network
from valence.protocols.capacity.admission import Admission
from valence.protocols.capacity.door import Door, Guest
from valence.protocols.config import LAN
from valence.protocols.membership.liveness import Liveness
from valence.protocols.membership.members import Members
from valence.protocols.overlay.chord import NEAR, SIZE, Circle, Ring
from valence.protocols.strategies.base import Placed, Unit
from valence.protocols.strategies.chemical.chemical import Chemical
from valence.protocols.strategies.chemical.config import ChemicalConfig
from valence.protocols.strategies.chemical.holder import USED_STEPS
from valence.protocols.strategies.chemical.layer import Layer
from valence.protocols.strategies.chemical.questions import Questions
from valence.protocols.wire.messages import (
    AttemptKey,
    Capacity,
    Commit,
    Committed,
    Contact,
    Done,
    Member,
    Needs,
    Reserve,
    ReturnLeases,
    Traits,
    Work,
)
from valence.protocols.wire.rpc import Rpc

from .engine import Engine, TaskEnded, task_molecule

STEP_S = 0.004
CORES = 64
LEASE_S = 60.0
LEVELS = (3, 10)
WIDTH = (1, 15)
STEPS = (1, 10)
NEEDS = Needs(Capacity(1000))
VIRTUAL_S_MAX = 3600.0
CONFIG = replace(
    LAN,
    members_max=20_000,
    lease_ttl_s=LEASE_S,
    vacancy_wishes_max=0,  # the paper notifies nobody
    # nobody dies here
    sections=(ChemicalConfig(active_s=1000.0, refresh_s=300.0, ttl_s=1000.0),),
)


@dataclass(frozen=True, slots=True)
class Experiment:
    nodes: int
    workflows: int
    mode: str = "default"  # or paper
    seed: int = 1


@dataclass(slots=True)
class Result:
    time_s: float  # mean over workflows, from submission to end
    tasks: int
    messages: int  # for scheduling: from the first submission to the last end
    waking: int  # before that: all nodes publish their load
    best: float  # fraction of placements at the node that was least loaded at that moment

    @property
    def per_task(self) -> float:
        return self.messages / self.tasks


class _Overlay(Ring):
    """A ring whose tables are already stabilised."""

    def fill(self, contacts: list[Contact], ids: list[int]) -> None:
        circle: Circle = self._circle
        count = len(ids)
        at = bisect_left(ids, int.from_bytes(self._rpc.me.id, "big"))
        for step in range(1, NEAR + 1):
            circle.saw(contacts[(at + step) % count])
            circle.saw(contacts[(at - step) % count])
        for bit in range(160 - count.bit_length() - 4, 160):
            start = (ids[at] + (1 << bit)) % SIZE
            circle.saw(contacts[bisect_left(ids, start) % count])


class Node(Guest):
    def __init__(self, space: ChemicalSpace, index: int, member: Member, view: Members) -> None:
        self.space = space
        self.member = member
        self.rng = random.Random(f"{space.plan.seed} node {index}")
        self.homes: dict[AttemptKey, Contact] = {}  # of the tasks that run here
        wire = space.network.wire(member.contact)
        self.rpc = wire.rpc = Rpc(member.contact, wire, self.rng, CONFIG)
        members = copy.copy(view)  # the members are shared by all nodes: nobody joins or leaves
        members.me = member
        members._listeners = []
        liveness = Liveness(self.rpc, members, self.rng, CONFIG)
        self.admission = Admission(member.capacity, member.traits, CONFIG)
        self.door = Door(self.rpc, members, self.admission, LEASE_S)
        self.door.open(self)
        self.layer = Layer(self.rpc, members, liveness, self.rng, CONFIG, self.door.ticket)
        self.door.looked_at += (self._captured, self.layer.look)
        self.door.on_room.append(self.layer.changed)
        self.questions = Questions(self.rpc, members, self.layer, self.rng, CONFIG)
        self.strategy = Chemical(
            self.rpc, members, self.layer, self.questions, self.rng, CONFIG, self.placed,
            lambda unit: None,
        )  # fmt: skip
        if space.plan.mode == "paper":
            self.overlay = _Overlay(self.rpc, self.rng, CONFIG)
            self.layer.locate = self.locate
            # every task asks the layer, even if the node that holds it is idle itself
            self.strategy._here = lambda group, count: None  # type: ignore[method-assign]
            self.engine = Engine(
                self.rpc, members, self.locate, space.spawn, self._look_for, space.results
            )
        else:
            self.rpc.on(TaskEnded, self._ended)

    async def locate(self, key: bytes) -> bytes:
        if not len(self.overlay.circle):
            self.overlay.fill(self.space.contacts, self.space.ids)
        return (await self.overlay.find(key, 1))[0].id

    # as a resource

    def _captured(self, sender: Contact, message: Reserve | ReturnLeases) -> None:
        if isinstance(message, Reserve):
            self.space.captured(self)

    def let_in(self, home: bytes, work: Work) -> None:
        self.homes[work.key] = self.space.by_id[home].member.contact

    def wait(self, unit: Hashable) -> None:
        raise AssertionError("nothing waits at a resource of the paper's")

    def start(self, unit: Hashable) -> None:
        key = cast(AttemptKey, unit)
        steps = self.space.steps[key.workflow, key.task]
        asyncio.get_running_loop().call_later(steps * STEP_S, self._end, key)

    def _end(self, key: AttemptKey) -> None:
        self.door.release(key)
        self.door.advance()
        self.space.spawn(self._report(self.homes.pop(key), key))

    async def _report(self, home: Contact, key: AttemptKey) -> None:
        await self.rpc.call(home, TaskEnded(key=key), Done, 30.0)

    def _ended(self, sender: Contact, message: TaskEnded) -> Done:
        self.space.ended(message.key)
        return Done()

    # as an entry point, or as the holder of a task

    def _look_for(self, key: AttemptKey) -> None:
        self.strategy.add([Unit(key, NEEDS)])

    def placed(self, batch: list[Placed]) -> None:
        by_peer: dict[bytes, tuple[Contact, list[Work]]] = {}
        for one in batch:
            if self.space.plan.mode == "paper":
                self.engine.map_to_resource(one.unit.key, one.peer.id, one.lease)
            work = Work(one.unit.key, one.lease, one.unit.needs, command=("work",))
            by_peer.setdefault(one.peer.id, (one.peer, []))[1].append(work)
        for contact, works in by_peer.values():
            self.space.spawn(self._send(contact, works))

    async def _send(self, contact: Contact, works: list[Work]) -> None:
        answer = await self.rpc.call(contact, Commit(works=tuple(works)), Committed, 30.0)
        assert not answer.refused, answer.refused


class ChemicalSpace:
    def __init__(self, plan: Experiment) -> None:
        self.plan = plan
        self.network = Network(plan.seed, Faults(latency_s=STEP_S / 2, jitter_s=STEP_S / 2))
        self.rng = random.Random(f"space {plan.seed} {plan.nodes} {plan.workflows}")
        rng = random.Random(f"nodes {plan.seed}")
        node_ids = sorted(rng.randbytes(20) for _ in range(plan.nodes))
        self.contacts = [
            Contact(node_id, f"10.{n // 62500}.{n // 250 % 250}.{n % 250}", 7000)
            for n, node_id in enumerate(node_ids)
        ]
        self.ids = [int.from_bytes(node_id, "big") for node_id in node_ids]
        capacity = Capacity(1000 * CORES, 2**40)
        members = [
            Member(c, "http://x", capacity, Traits("x86_64", "linux")) for c in self.contacts
        ]
        view = Members(members[0], CONFIG)
        for member in members:
            view.apply(member, 0.0)
        self.nodes = [Node(self, n, member, view) for n, member in enumerate(members)]
        self.by_id = {node.member.contact.id: node for node in self.nodes}
        self.steps: dict[tuple[str, str], int] = {}
        self.left: dict[str, int] = {}
        self.parents: dict[tuple[str, str], set[str]] = {}
        self.children: dict[tuple[str, str], list[str]] = {}
        self.home: dict[str, Node] = {}
        self.began: dict[str, float] = {}
        self.times: list[float] = []
        self.over = asyncio.Event()
        self.best: list[bool] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def captured(self, node: Node) -> None:
        """Counts whether it is among the least loaded at this moment, to a step of the layer."""
        free, step = node.admission.free.millicores, 1000 * CORES // USED_STEPS
        sample = self.rng.sample(self.nodes, min(50, len(self.nodes)))
        self.best.append(all(free >= other.admission.free.millicores - step for other in sample))

    def submit(self, number: int) -> None:
        rng, workflow = self.rng, f"w{number}"
        levels = [
            [f"{level}.{i}" for i in range(rng.randint(*WIDTH))]
            for level in range(rng.randint(*LEVELS))
        ]
        self.left[workflow] = sum(map(len, levels))
        self.home[workflow] = rng.choice(self.nodes)
        self.began[workflow] = asyncio.get_running_loop().time()
        above: list[str] = []
        for level in levels:
            for task in level:
                self.steps[workflow, task] = rng.randint(*STEPS)
                taken = rng.sample(above, min(len(above), rng.randint(1, 2)))
                self.parents[workflow, task] = set(taken)
                for parent in taken:
                    self.children.setdefault((workflow, parent), []).append(task)
            above = level
        if self.plan.mode == "paper":
            units = [
                task_molecule(workflow, task, n, self.children.get((workflow, task), []))
                for n, level in enumerate(levels)
                for task in level
            ]
            self.spawn(self.home[workflow].engine.submit(workflow, units))
        else:
            self.place(workflow, levels[0])

    def place(self, workflow: str, tasks: Iterable[str]) -> None:
        units = [Unit(AttemptKey(workflow, task, 1), NEEDS) for task in tasks]
        self.home[workflow].strategy.add(units)

    def results(self, workflow: str) -> None:
        self.times.append(asyncio.get_running_loop().time() - self.began[workflow])
        if len(self.times) == self.plan.workflows:
            self.over.set()

    def ended(self, key: AttemptKey) -> None:
        workflow = key.workflow
        self.left[workflow] -= 1
        if not self.left[workflow]:
            self.results(workflow)
            return
        ready = []
        for child in self.children.get((workflow, key.task), ()):
            waiting = self.parents[workflow, child]
            waiting.discard(key.task)
            if not waiting:
                ready.append(child)
        if ready:
            self.place(workflow, ready)

    async def run(self) -> Result:
        for node in self.nodes:
            self.spawn(node.layer.run())
            self.spawn(node.strategy.run())
        await self.nodes[0].layer.want()
        await asyncio.sleep(15.0)  # until all have published their load, and the scale fits
        waking = self.network.sent
        for number in range(self.plan.workflows):
            self.submit(number)
        async with asyncio.timeout(VIRTUAL_S_MAX):
            await self.over.wait()
        messages = self.network.sent - waking
        for node in self.nodes:
            await node.strategy.close()
            await node.questions.close()
            await node.layer.close()
        for task in list(self._tasks):
            task.cancel()
        best = sum(self.best) / max(1, len(self.best))
        return Result(statistics.mean(self.times), len(self.steps), messages, waking, best)


def experiment(plan: Experiment) -> Result:
    async def run() -> Result:
        return await ChemicalSpace(plan).run()

    return run_out(run())
