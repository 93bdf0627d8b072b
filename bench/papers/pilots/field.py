"""Pilots of two sites and a task queue on the simulator, with the product's own code on both sides.

Section IV of the paper: about 100, 500 and 1,500 pilots, workflows of two steps (each task makes
one file, and tasks of the second step read the files of the first), tasks of 3.3 minutes on
average. Here a pilot has one core, tasks take 100 to 300 s, and files have 20,000 bytes, since only
their number matters. All pilots know all members and none dies: the experiment is about rounds,
lists, caches and the queue.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from sim.disk import Platter, SimDatabase
from sim.files import SimBlobs, SimLauncher
from sim.host import QueueHost
from sim.loop import run_out
from sim.network import Network
from valence.peer.journal_storage import SqliteJournalStorage
from valence.peer.outbox_storage import SqliteOutboxStorage
from valence.protocols.config import LAN, Config
from valence.protocols.data.cache import Reservation
from valence.protocols.data.transfer import Transfer, Unavailable
from valence.protocols.engine.enactment import Enactment
from valence.protocols.membership.members import Members, believe
from valence.protocols.overlay.overlays import MADE_BY
from valence.protocols.records import Records
from valence.protocols.strategies.pilots.config import PilotsConfig
from valence.protocols.strategies.pilots.service import PilotsService
from valence.protocols.wire.codec import pack_member
from valence.protocols.wire.messages import (
    BlobPart,
    Capacity,
    Contact,
    File,
    Member,
    Message,
    Moved,
    ReadBlob,
    Traits,
    Work,
)
from valence.protocols.wire.rpc import CallFailed, Rpc

SITES = ("infiniband", "grid")
TASK_S = 200.0
KINDS = ("serial", "splitting", "merging")
PARTS = ("pilot", "master pilot", "pilots", "relay", "relayed", "catalog", "holds")
VIRTUAL_S_MAX = 20_000.0
CONTACTS = 60

FIELD = replace(LAN, lease_ttl_s=30.0, refresh_s=1e9, republish_s=1e9, record_ttl_s=1e9)


@dataclass(frozen=True, slots=True)
class Experiment:
    pilots: int = 100
    tasks: int = 300
    kind: str = "serial"
    mode: str = "distributed"  # or greedy, centralised, pre-DHT
    seed: int = 1


@dataclass(slots=True)
class Result:
    seconds: float = 0.0
    tasks: int = 0
    requests: int = 0  # to the queue
    # between two tasks of a pilot: when the second began, and how long that took
    delays: list[tuple[float, float]] = field(default_factory=list)
    moved: Counter[str] = field(default_factory=Counter)  # bytes that second steps read
    running: list[tuple[float, int]] = field(default_factory=list)
    asked: list[tuple[float, int]] = field(default_factory=list)  # requests so far
    queued: list[tuple[float, int]] = field(default_factory=list)  # requests that wait
    messages: int = 0
    bytes: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def delay_s(self) -> float:
        return statistics.median(delay for _, delay in self.delays) if self.delays else 0.0

    @property
    def hits(self) -> float:
        """The fraction of the bytes read that came from some cache."""
        return (self.moved["local"] + self.moved["peer"]) / max(1, sum(self.moved.values()))

    @property
    def local(self) -> float:
        return self.moved["local"] / max(1, sum(self.moved.values()))


def document(kind: str, tasks: int, strategy: str = "pilots") -> dict[str, Any]:
    """Two steps; the kind says how many tasks read a file of the first."""
    first = {"serial": tasks // 2, "splitting": tasks // 3, "merging": 2 * tasks // 3}[kind]
    made: dict[str, Any] = {}
    for i in range(first):
        made[f"a{i}"] = {"command": ["work", f"{TASK_S:g}"], "outputs": [f"large.{i}"]}
    for i in range(tasks - first):
        reads = [f"large.{i % first}"]
        if kind == "merging":
            reads = [f"large.{(2 * i) % first}", f"large.{(2 * i + 1) % first}"]
        made[f"b{i}"] = {
            "command": ["work", f"{TASK_S:g}"], "inputs": reads, "outputs": [f"small.{i}"],
        }  # fmt: skip
    return {"name": kind, "strategy": strategy, "tasks": made}


def known_to_all(members: list[Member], config: Config) -> list[Members]:
    """The members' views, which share one table."""
    views = [Members(member, config) for member in members]
    known = {member.contact.id: believe(pack_member(member)) for member in members}
    order = sorted(known)
    for view in views:
        view._known, view._order, view._sorted = known, order, True
        view._here, view._count = members, len(members)
        view.speaker = order[0]
    return views


class Node:
    """A pilot: a peer's part in workflows, without membership and failure detection."""

    def __init__(
        self, network: Network, members: Members, config: Config, queue: Contact | None, seed: int
    ) -> None:
        contact = members.me.contact
        wire = network.wire(contact)
        rng = self.rng = random.Random(seed)
        self.rpc = Rpc(contact, wire, rng, config)
        wire.rpc = self.rpc
        self.members = members
        self.queue = queue
        self.overlay = MADE_BY[config.overlay](self.rpc, rng, config)
        self.records = Records(self.rpc, self.overlay, rng, config)
        self.blobs = SimBlobs(Platter())
        self.transfer = Transfer(
            self.rpc, self.blobs, members, self.records, self._clock, random.Random(seed),
        )  # fmt: skip
        self.workshop = SimLauncher(self.blobs, self.transfer, rng)
        database = SimDatabase(Platter(), random.Random(seed))
        nobody = SimpleNamespace(stir=lambda: None, suspect=lambda *_: None, watched=None)
        self.enactment = Enactment(
            rpc=self.rpc,
            members=members,
            liveness=nobody,  # type: ignore[arg-type]
            records=self.records,
            journals=SqliteJournalStorage(database, self._clock),
            outbox=SqliteOutboxStorage(database, self._clock),
            blobs=self.blobs,
            transfer=self.transfer,
            workshop=self.workshop,
            clock=self._clock,
            rng=rng,
            config=config,
            exchange=self._exchange if queue is not None else None,
        )
        if queue is not None:
            self.transfer.from_origin = self._from_queue
        self.enactment.home.outstanding.settled = True
        self.enactment.relay.settle()

    def start(self, parts: tuple[str, ...] = PARTS) -> None:
        self.work = [
            asyncio.ensure_future(work()) for name, work in self.enactment.works() if name in parts
        ]

    def _clock(self) -> float:
        return asyncio.get_running_loop().time()

    async def _exchange(self, message: Message) -> Message:
        assert self.queue is not None
        return await self.rpc.call(self.queue, message, Message, 30.0)

    async def _from_queue(self, file: File, hold: str, room: Reservation) -> None:
        assert self.queue is not None
        message = ReadBlob(hash=file.hash, offset=0, length=max(1, file.size))
        try:
            answer = await self.rpc.call(self.queue, message, BlobPart, 5.0)
        except CallFailed as error:
            raise Unavailable(str(error)) from None
        self.blobs.keep(file.hash, answer.data, hold, room)


def nodes(
    network: Network,
    count: int,
    config: Config,
    queue: Contact | None,
    sites: tuple[str, ...],
    seed: int,
) -> list[Node]:
    """Pilots, half at each site; each knows some others, and its neighbours."""
    rng = random.Random(7)
    rows = []
    for index in range(count):
        peer_id = random.Random(f"pilot {index}").randbytes(20)
        contact = Contact(peer_id, f"10.{index // 62500}.{index // 250 % 250}.{index % 250}", 7000)
        traits = Traits("x86_64", "linux", sites[index % len(sites)])
        rows.append(Member(contact, "", Capacity(1000, 2**30), traits, 1))
    made = [
        Node(network, members, config, queue, 1_000_000 * seed + index)
        for index, members in enumerate(known_to_all(rows, config))
    ]
    by_id = sorted(rows, key=lambda m: m.contact.id)
    place = {m.contact.id: i for i, m in enumerate(by_id)}
    for node in made:
        at = place[node.rpc.me.id]
        beside = by_id[max(0, at - 8) : at + 9]
        for other in (*beside, *rng.sample(rows, min(CONTACTS, count))):
            if other.contact.id != node.rpc.me.id:
                node.overlay.saw(other.contact)
    return made


class Field:
    """One run of the product's own code: distributed, or with the paper's greedy assignment."""

    def __init__(self, plan: Experiment) -> None:
        self.plan = plan
        self.result = Result(tasks=plan.tasks)
        self.network = Network(plan.seed)
        cells = 0 if plan.mode == "greedy" else PilotsConfig().cells_max
        self.config = FIELD.having(PilotsConfig(cells_max=cells))

    async def run(self) -> Result:
        plan, result = self.plan, self.result
        queue = QueueHost(self.network, self.config, 0.0)
        queue.start([])
        made = nodes(self.network, plan.pilots, self.config, queue.peer.contact, SITES, plan.seed)
        ended: dict[bytes, float] = {}
        count = 0

        def begin(node: Node, work: Work) -> None:
            nonlocal count
            count += 1
            at = self._now()
            result.running.append((at, count))
            if node.rpc.me.id in ended:
                result.delays.append((at, at - ended[node.rpc.me.id]))

        def end(node: Node, work: Work) -> None:
            nonlocal count
            count -= 1
            result.running.append((self._now(), count))
            ended[node.rpc.me.id] = self._now()

        for node in made:
            node.workshop.on_begin = lambda work, node=node: begin(node, work)  # type: ignore[misc]
            node.workshop.on_end = lambda work, node=node: end(node, work)  # type: ignore[misc]
            node.start()
        text = json.dumps(document(plan.kind, plan.tasks)).encode()
        home = queue.enactment.home
        await asyncio.sleep(5.0)
        assert home.outstanding.settled
        began = self._now()
        workflow_id, _ = await queue.enactment.gateway.submit(text, {}, "somebody", False)
        run = home.remembered(workflow_id)
        assert run is not None
        while not run.over:
            await asyncio.sleep(5.0)
            at = self._now() - began
            result.asked.append((at, queue.sites.counts["requests"]))
            served = sum(site.turn.locked() for site in queue.sites.sites.values())
            result.queued.append((at, served))
            assert self._now() < VIRTUAL_S_MAX, dict(run.counts)
        assert run.state == "succeeded", run.reason
        result.seconds = max(
            a.outcome.ended_at for t in run.tasks.values() for a in t.attempts if a.outcome
        )
        result.seconds -= began
        result.running = [(at - began, n) for at, n in result.running]
        result.delays = [(at - began, delay) for at, delay in result.delays]
        result.requests = queue.sites.counts["requests"]
        for task in run.tasks.values():
            moved = task.won.moved if task.won is not None else Moved()
            result.moved.update(moved._asdict())
        for node in made:
            site = node.enactment.service(PilotsService)
            result.counts.update(site.pilot.counts)
            result.counts.update({f"master {k}": v for k, v in site.master.counts.items()})
            result.counts.update({f"relay {k}": v for k, v in node.enactment.relay.counts.items()})
            result.bytes += node.rpc.counts.bytes_sent
        result.messages = self.network.sent
        return result

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def experiment(plan: Experiment) -> Result:
    from .models import Model

    random.seed(plan.seed)
    return run_out((Field if plan.mode in ("distributed", "greedy") else Model)(plan).run())
