"""One simulated disaster: hosts, users and faults, all drawn from one seed.

Peers crash and come back, crash for good, stop and go on; links are cut, cut in one direction,
clogged; islands form and heal; messages are lost, doubled and late; disks are slow or full; clocks
differ; the power fails for many at once. Each world has a share of these only, at a rate of its own
(swarm testing: what hides behind one fault shows where that is missing). Then the faults stop, and
everything must come to its end.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from valence.protocols.config import LAN, Config
from valence.protocols.consensus.placement import is_queued
from valence.protocols.consensus.replica import majority, shown
from valence.protocols.engine.answers import ApiError
from valence.protocols.strategies.tickets.service import TicketsService
from valence.protocols.wire.messages import (
    Ask,
    Capacity,
    Contact,
    Elect,
    Elected,
    Outcome,
    ReadChunk,
    Work,
)

from .host import Host, QueueHost
from .ledger import FINAL, Ledger, Violation
from .loop import NOBODY
from .network import Faults, Network

SIM = logging.getLogger("valence.sim")
FAULTS = (
    "crash", "power", "leave", "ambush", "turncoat", "die", "stop", "island", "cut", "one-way",
    "clog", "lossy", "slow-disk", "full-disk",
)  # fmt: skip
SEEDS_MAX = 20
QUOTAS = (2**40, 2**40, 300_000)
PATIENCE_S = 240.0
LEAVE_S = 2.0
ROOM_S = 60.0  # for what nobody wants any more to be given up
QUIET_S = 15.0  # after the last end: time for leases to expire


#: thousands of peers in one process: each pings less often, and says more at a time
CROWD = replace(
    LAN,
    probe_s=10.0,
    probe_quiet_s=10.0,
    probe_timeout_s=1.0,
    gossip_s=8.0,
    gossip_per_message=80,
    self_doubt_max=0,
    indirect_probes=1,
    retry_first_s=0.7,
    retry_min_s=0.7,
    sync_s_min=3.0,
    sync_s_max=16.0,
    refresh_s=900.0,
    forget_dead_s=240.0,  # no rumour is that old
)
CROWD_PEERS = 200
HALVE_S = 5.0  # for so long a keeper is looked for that has a part of a submission
CROWD_QUIET_S = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    peers: int = 7
    workflows: int = 4
    seconds: float = 50.0  # of faults
    faults: tuple[str, ...] = FAULTS
    every_s: float = 3.0  # a fault, on average
    majority_lost_s: float = float("inf")
    keepers: int = 3
    replaced: float = 0.0  # of all peers, every minute: one dies for good, a new one comes
    width: int = 6  # of workflows, at most
    gangs: float = 0.1  # of tasks: they need two or three peers at once
    strategy: str = "probe"
    queue: bool = False  # there is a task queue, and many submit to that
    overlay: str = "kademlia"
    # bytes of a journal in one message: 1 is an entry at a time; 0: the seed says
    slice_bytes: int = 0
    config: Config = LAN
    mutant: str = ""  # a rule that is broken on purpose

    def command(self) -> str:
        default = Plan(self.seed)
        words = [f"python -m sim --seed {self.seed}"]
        said = ("peers", "workflows", "seconds", "every_s", "keepers", "replaced", "gangs")
        for name in (*said, "slice_bytes"):
            value = getattr(self, name)
            if value != getattr(default, name):
                words.append(f"--{name.replace('_', '-')} {value:g}")
        if self.strategy != default.strategy:
            words.append(f"--strategy {self.strategy}")
        if self.queue:
            words.append("--queue")
        if self.overlay != default.overlay:
            words.append(f"--overlay {self.overlay}")
        if self.faults != FAULTS:
            words.append("--faults " + (",".join(self.faults) or "none"))
        if self.majority_lost_s != default.majority_lost_s:
            words.append(f"--majority-lost {self.majority_lost_s:g}")
        if self.mutant:
            words.append(f"--mutant {self.mutant}")
        return " ".join(words)


@dataclass(slots=True)
class WorldReport:
    seed: int
    violation: str = ""
    virtual_s: float = 0.0
    messages: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)


class World:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.network = Network(self.rng.getrandbits(64))
        self.ledger = Ledger()
        self.ledger.lax = plan.majority_lost_s < float("inf")
        self.hosts: list[Host] = []
        self.trace: list[str] = []
        self._config = replace(
            plan.config,
            keepers=plan.keepers,
            overlay=plan.overlay,
            majority_lost_s=plan.majority_lost_s,
            stand_step_s=self.rng.choice((plan.config.stand_step_s, 0.0)),  # 0: all at once
            archive_after_s=2.0,
            follow_s=5.0 if plan.peers < CROWD_PEERS else LAN.follow_s,
            archive_s=5.0 if plan.peers < CROWD_PEERS else 60.0,
        )
        slice_bytes = plan.slice_bytes or self._drawn_slice_bytes()
        if slice_bytes < LAN.keep_bytes_max:  # copies catch up, and documents arrive, bit by bit
            self._config = replace(
                self._config, keep_bytes_max=slice_bytes, document_part_bytes=200
            )
        if plan.seed % 2 and plan.peers < CROWD_PEERS:  # news spread as among many
            self._config = replace(self._config, wave_min=3, wave_width=2)
        self._next_host = 0
        self.queue: QueueHost | None = None
        self._sites: tuple[str, ...] = ("here",)
        if plan.strategy == "pilots":
            self._sites = self.rng.choice((("here",), ("here", "there")))
        self._ambush = self._turncoat = False
        self._perished = False
        # this world's own mood
        count = self.rng.randint(3, len(plan.faults)) if len(plan.faults) > 3 else len(plan.faults)
        self.faults = self.rng.sample(plan.faults, count)
        if plan.queue:
            self.faults += ["queue"] * 2
        self.every_s = plan.every_s * self.rng.choice((0.3, 1.0, 1.0, 2.0))
        self.sync_s = self.rng.choice((0.001, 0.001, 0.02, 0.2))
        # a few of the larger files fill it: results wait for room until others are consumed (but
        # all that is submitted while the faults last fits: also what nobody was told of)
        longer = max(1, round(plan.seconds / Plan(0).seconds))
        self.quota_bytes = 2**40 if plan.peers >= CROWD_PEERS else self.rng.choice(QUOTAS) * longer
        self.treachery = self.rng.choice((0.0, 0.3))  # who has just acknowledged dies
        if plan.replaced:
            self.treachery = 0.0  # so many die already
        self._broken: Violation | None = None
        self._harm: dict[str, int] = {}
        self._calm_since = self._died_at = 0.0
        self._recovering = asyncio.Event()
        self._followed: set[str] = set()
        self._problem = "no answer"  # that a user was told last
        self._users: set[asyncio.Task[None]] = set()

    def _drawn_slice_bytes(self) -> int:
        if self.plan.peers >= CROWD_PEERS:
            return LAN.keep_bytes_max
        own = random.Random(f"slices {self.plan.seed}")  # so that nothing else is drawn otherwise
        return own.choice((LAN.keep_bytes_max, LAN.keep_bytes_max, 2000, 1))

    def say(self, text: str) -> None:
        now = asyncio.get_running_loop().time()
        self.trace.append(f"{now:9.3f}  {text}")
        SIM.info("%9.3f  %s", now, text)

    # ----------------------------------------------------------------- hosts

    def add_host(self) -> Host:
        index = self._next_host
        self._next_host += 1
        slots = self.rng.choice((1, 2, 2, 4))
        skew_s = self.rng.uniform(-30, 30)
        capacity = Capacity(millicores=1000 * slots, memory_bytes=2**30)
        site = self.rng.choice(self._sites) if len(self._sites) > 1 else self._sites[0]
        queue = self.queue.peer.contact if self.queue is not None else None
        host = Host(self.network, index, self._config, capacity, skew_s, site, queue)
        host.sync_s = self.sync_s
        host.quota_bytes = self.quota_bytes
        self.hosts.append(host)
        self.start(host)
        return host

    def start(self, host: Host) -> None:
        known = [other.peer.contact for other in self.hosts if hasattr(other, "peer")]
        if host is self.queue:
            known = []
        host.start(self.rng.sample(known, min(len(known), SEEDS_MAX)))
        self._look_on(host)
        for task in host.tasks:
            task.add_done_callback(self._over_with, context=NOBODY)

    def _over_with(self, task: asyncio.Task[None]) -> None:
        """What should run for as long as the peer does, has ended."""
        if not task.cancelled() and task.exception() is not None:
            self._unheard(asyncio.get_running_loop(), {"exception": task.exception()})

    def _look_on(self, host: Host) -> None:
        """All that the ledger is to hear of, from the parts themselves."""
        ledger, keeping = self.ledger, host.enactment.keeping
        home_hears = keeping.on_committed
        assert host.life is not None

        def agreed(workflow: str) -> None:
            self._guard(lambda: ledger.agreed(host, workflow))
            home_hears(workflow)
            if self._ambush:
                self._ambush = False
                loop = asyncio.get_running_loop()
                loop.call_soon(self._spring, host, workflow, context=NOBODY)

        keeping.on_committed = agreed
        host.workshop.on_begin = lambda work: self._guard(lambda: self._begins(host, work))
        host.workshop.on_end = lambda work: self._guard(lambda: ledger.ends(host, work))
        host.workshop.failing = 0.02
        outbox = host.enactment.outbox
        let_go = outbox.on_let_go
        outbox.on_let_go = lambda ended: self._let_go(host, ended, let_go)
        rpc = host.peer.rpc
        vote = rpc._handlers[Elect]

        async def elect(sender: Contact, message: Elect) -> Elected:
            answer: Elected = await vote(sender, message)  # type: ignore[misc]
            asked = zip(message.candidacies, answer.votes, strict=True)
            if self._turncoat and any(v.granted and not a.trial for a, v in asked):
                self._turncoat = False
                loop = asyncio.get_running_loop()
                loop.call_later(0.0005, self._turn, host, sender.id, context=NOBODY)
            return answer

        rpc.on(Elect, elect)
        rpc.on_error = lambda where, error: self._fail(f"an error serving {where}: {error!r}")
        begin = rpc._start
        served: set[tuple[bytes, int]] = set()

        def start(sender: Contact, id: int | None, message: Any, remember: Any = None) -> bool:
            # (users' questions and chunks are answered anew: what they change, they change once)
            anew = message.repeatable or isinstance(message, Ask | ReadChunk)
            if id is not None and not anew:
                if (sender.id, id) in served:
                    self._fail(f"one call was carried out twice: {type(message).__name__}")
                served.add((sender.id, id))
            return begin(sender, id, message, remember)

        rpc._start = start  # type: ignore[method-assign]

    def _let_go(self, host: Host, ended: Outcome, then: Callable[[Outcome], None]) -> None:
        self._guard(lambda: self.ledger.lets_go(host, ended))
        then(ended)

    def _begins(self, host: Host, work: Work) -> None:
        self.ledger.begins(host, work)
        host.enactment.admission.sanity_check()

    def _guard(self, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            self._fail(str(error))

    def _unheard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error that nobody took care of, in a peer that lives."""
        error = context.get("exception")
        if error is not None:
            last = traceback.extract_tb(error.__traceback__)[-1:]
            where = "".join(f" at {frame.filename}:{frame.lineno}" for frame in last)
            self._fail(f"an error that nobody took care of: {error!r}{where}")

    def _fail(self, text: str) -> None:
        if self._broken is None:
            self.say(f"VIOLATION: {text}")
            self._broken = Violation(text)

    def up(self) -> list[Host]:
        return [host for host in self.hosts if host.up]

    # ----------------------------------------------------------------- the run

    async def run(self) -> WorldReport:
        plan = self.plan
        logging.getLogger("valence").setLevel(logging.CRITICAL)
        asyncio.get_running_loop().set_exception_handler(self._unheard)
        if plan.queue:
            self.queue = QueueHost(self.network, self._config, self.rng.uniform(-30, 30))
            self.queue.sync_s = self.sync_s
            self.start(self.queue)
        for _ in range(plan.peers):
            self.add_host()
        await self._until(self._all_know_all, 120.0, "the peers never found each other")
        mood = f"every {self.every_s:g} s one of {', '.join(sorted(self.faults))}"
        self.say(f"{plan.peers} peers know each other; {mood}; syncs take {self.sync_s:g} s")
        works = [self._user(), self._faults(), self._look(), self._replace()]
        tasks = [asyncio.ensure_future(work) for work in works]
        end = self._now() + plan.seconds
        await self._until(lambda: self._now() >= end, plan.seconds, None)
        for task in (*tasks[:2], tasks[3]):
            task.cancel()
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise RuntimeError("the world itself is broken") from task.exception()
        if self._broken is None:
            await self._recover()
            await self._until(self._all_over, PATIENCE_S, None)
            await asyncio.sleep(self._quiet_s())
            await self._until(self._all_free, ROOM_S, None)
            if self._broken is None:
                self._guard(self._close)
            if self._broken is None:
                await self._ask_everybody()
        for task in (*tasks, *self._users):
            task.cancel()
        await asyncio.gather(*tasks, *self._users, return_exceptions=True)
        return WorldReport(
            plan.seed,
            str(self._broken or ""),
            self._now(),
            self.network.sent,
            dict(self.ledger.counts),
            self.trace,
        )

    async def _until(self, done: Callable[[], bool], limit_s: float, why: str | None) -> None:
        end = self._now() + limit_s
        while not done() and self._broken is None:
            if self._now() > end:
                if why:
                    self._fail(why)
                return
            await asyncio.sleep(0.25)

    def _quiet_s(self) -> float:
        """Until ended journals have new keepers, too."""
        if self.plan.replaced:
            return CROWD_QUIET_S
        lost_s = self.plan.majority_lost_s
        return QUIET_S if lost_s == float("inf") else QUIET_S + lost_s + 20.0

    def _all_know_all(self) -> bool:
        count = len(self.hosts)
        enough = count if count < CROWD_PEERS else 0.9 * count
        return all(host.peer.members.count >= enough for host in self.up())

    def _all_over(self) -> bool:
        # (what was submitted and not acknowledged may run, too, and comes to its end)
        busy = any(host.enactment.home.active() for host in self.up())
        return not self._users and not busy and all(map(self.ledger.over, self.ledger.acknowledged))

    def _all_free(self) -> bool:
        """An attempt whose home is gone learns in a while that nobody wants it."""
        doors = [host.enactment.admission for host in self.up()]
        return all(door.free == door.capacity for door in doors)

    def _close(self) -> None:
        there = self.up()
        held: Counter[str] = Counter()
        for host in there:
            rows = host.database.read("select workflow from copies where here = 1")
            held.update(workflow for (workflow,) in rows)
        for workflow in self.ledger.acknowledged:
            if not self.ledger.over(workflow):
                self._copies(workflow)
                raise Violation(f"{workflow} never came to its end: {self._why(workflow)}")
            if is_queued(workflow):
                continue  # the queue's own disk has it
            if held[workflow] < majority(min(self.plan.keepers, len(there))):
                self._copies(workflow)
                raise Violation(f"{workflow} is over, and {held[workflow]} copies are left of it")
        self.ledger.close()
        if self._followed:
            self._copies(min(self._followed))
            raise Violation(f"users still wait for an answer about {sorted(self._followed)}")
        for host in self.up():
            admission = host.enactment.admission
            admission.sanity_check()
            if admission.free != admission.capacity or host.workshop.running:
                raise Violation(f"peer {host.index} has nothing to do, and not all its room free")
            self._check_bounds(host)

    async def _ask_everybody(self) -> None:
        """In the end every peer tells the same of every workflow."""
        for workflow in self.ledger.acknowledged:
            for host in [self.queue] if self.queue and is_queued(workflow) else self.up():
                assert host is not None
                asked = host.enactment.gateway.ask("", workflow, "workflow")
                view = await self._ask(host, asked, 30.0)
                listed = await self._ask(
                    host, host.enactment.gateway.ask("", workflow, "files"), 30.0
                )
                if view is None or listed is None:
                    self._copies(workflow)
                    what = f"what became of {workflow}: {self._problem}"
                    self._fail(f"peer {host.index} can't say {what}")
                    return
                files = {file["name"]: file["hash"] for file in listed["files"]}
                self._guard(lambda: self.ledger.serves(workflow, host.index, view, files))  # noqa: B023

    def _why(self, workflow: str) -> str:
        """What the peers themselves say."""
        queue = [self.queue] if self.queue is not None and self.queue.up else []
        for host in (*self.up(), *queue):
            run = host.enactment.home.remembered(workflow)
            if run is not None and not run.over:
                waits = [
                    f"{t.id} ({t.state}): {host.enactment.home.waiting_for(run, t)}"
                    for t in run.tasks.values()
                    if t.state not in ("succeeded", "failed", "skipped", "cancelled")
                ]
                return f"peer {host.index} says " + "; ".join(waits[:3])
        reasons = {
            f"peer {h.index}: {h.enactment.elections.reason(workflow)}"
            for h in self.up()
            if workflow in h.enactment.keeping.replicas
        }
        return "; ".join(sorted(reasons)) or "nobody has a copy of it"

    def _copies(self, workflow: str) -> None:
        """To the trace: what each peer has of it."""
        number = {host.id: host.index for host in self.hosts}
        for host in self.hosts:
            keeping = host.enactment.keeping
            copy = keeping.replicas.get(workflow) or keeping.storage.replica(workflow)
            if copy is None:
                continue
            keepers = [number.get(k, k.hex()[:6]) for k in copy.keepers]
            state = "up" if host.up else "gone" if host.gone else "down"
            lead = keeping.leads.get(workflow)
            self.say(
                f"peer {host.index} ({state}) has {copy.count} entries of {workflow}, "
                f"{copy.committed} count, promised {shown(copy.promised)}, "
                f"follows {number.get(copy.home, '-')}, keepers {keepers}, "
                f"epochs {[(seq, shown(epoch)) for seq, epoch in copy.starts]}"
            )
            if lead is not None:
                have = {number.get(k): v for k, v in lead.have.items()}
                sent = {number.get(k): v for k, v in lead.sent.items()}
                self.say(f"  as its home in {shown(lead.epoch)}: have {have}, sent {sent}")

    async def _look(self) -> None:
        """Between the steps: nothing grows without bounds, and what waits says for what."""
        while True:
            await asyncio.sleep(1.0 if self.plan.peers < CROWD_PEERS else 10.0)
            for host in self.up():
                self._guard(host.enactment.admission.sanity_check)
                for market in host.enactment.service(TicketsService).owner.markets.values():
                    self._guard(market.sanity_check)
                self._guard(lambda host=host: self._check_reasons(host))  # type: ignore[misc]

    def _check_reasons(self, host: Host) -> None:
        home = host.enactment.home
        for run in home.active():
            for task in run.tasks.values():
                if task.state in ("waiting", "pending", "retrying", "running"):
                    text = home.waiting_for(run, task)
                    if not text:
                        raise Violation(f"{run.id}/{task.id} is {task.state} and does not say why")

    def _check_bounds(self, host: Host) -> None:
        config, peer = self._config, host.peer
        assert len(peer.rpc._pending) <= config.pending_calls_max
        assert len(peer.rpc._served) <= config.answers_kept_max
        assert peer.records.store.count <= config.records_max
        for workflow, lead in host.enactment.keeping.leads.items():
            assert len(lead.waiters) < 1000, f"{workflow}: waiters pile up"
            assert len(lead.tail) <= config.tail_entries_max + 64, f"{workflow}: its tail grows"

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # ----------------------------------------------------------------- users

    async def _user(self) -> None:
        plan = self.plan
        for number in range(plan.workflows):
            self._spawn(self._submit(number))
            await asyncio.sleep(self.rng.random() * 1.2 * plan.seconds / plan.workflows)

    def _document(self, number: int, gangs: float) -> dict[str, Any]:
        """A few layers, of which some tasks take files from the layer above."""
        rng = self.rng
        tasks: dict[str, Any] = {}
        above: list[str] = ["words"]
        for layer in range(rng.randint(1, 4)):
            made = []
            for i in range(rng.randint(1, self.plan.width)):
                size = rng.randint(2, 3) if rng.random() < gangs else 1
                name = f"t{layer}.{i}" if size == 1 else f"t{layer}.{i}-{size}"
                output = f"{'large' if rng.random() < 0.2 else 'small'}.{layer}.{i}"
                tasks[name] = {
                    "command": ["work", f"{rng.choice((0.05, 0.3, 1.0, 3.0)):g}"],
                    "inputs": rng.sample(above, min(len(above), rng.randint(1, 2))),
                    "outputs": [output if size == 1 else f"{output}.{{rank}}"],
                    "peers": size,
                    "retries": 5,
                }
                made += [output] if size == 1 else [f"{output}.{rank}" for rank in range(size)]
            above = made
        return {
            "name": f"w{number}",
            "strategy": self.plan.strategy,
            "levels": "strict" if rng.random() < 0.2 else None,
            "inputs": {"words": {"text": "hello"}},
            "tasks": tasks,
        }

    async def _submit(self, number: int) -> None:
        queued = self.queue is not None and self.rng.random() < 0.7
        document = self._document(number, 0.0 if queued else self.plan.gangs)
        text = json.dumps(document).encode()
        key = f"key-{number}" if self.rng.random() < 0.3 else None
        for _ in range(30):
            host = self._any()
            if self.queue is not None and queued:
                host = self.queue
                if not host.up:
                    await asyncio.sleep(self.rng.random())
                    continue
            options: dict[str, Any] = {"idempotency": key} if key else {}
            found = await self._ask(
                host, host.enactment.gateway.submit(text, options, "somebody", False), 15.0
            )
            if isinstance(found, tuple):
                workflow = found[0]
                tasks = sum(task["peers"] for task in document["tasks"].values())
                self._guard(lambda: self.ledger.accepts(workflow, tasks, key))  # noqa: B023
                self.say(f"peer {host.index} acknowledges {workflow}, {tasks} tasks")
                if host is self.queue:
                    pass  # nobody else has it: see the fault `queue`
                elif self.rng.random() < self.treachery and not self._recovering.is_set():
                    await self._do_die(host)  # at once
                    self._spawn(self._do_crash(host))
                if key is not None and self.rng.random() < 0.5:  # did that get through?
                    other = host if host is self.queue else self._any()
                    asked = other.enactment.gateway.submit(text, dict(options), "somebody", False)
                    again = await self._ask(other, asked, 15.0)
                    if isinstance(again, tuple):
                        self._guard(lambda: self.ledger.accepts(again[0], tasks, key))  # noqa: B023
                self._followed.add(workflow)
                await self._follow(workflow)
                self._followed.discard(workflow)
                return
            await asyncio.sleep(self.rng.random())

    async def _follow(self, workflow: str) -> None:
        """Watch it through this peer or that one; now and then, change one's mind."""
        position = (-1, -1)
        cancel = self.rng.random() < 0.15
        while True:
            host = self._host_for(workflow)
            gateway = host.enactment.gateway
            await asyncio.sleep(self.rng.random())
            if cancel and self.rng.random() < 0.1 and host.up:
                view = await self._ask(host, gateway.ask("", workflow, "cancel"), 15.0)
                if isinstance(view, dict):
                    self.ledger.cancelled.add(workflow)
                    self.say(f"peer {host.index} acknowledges the cancel of {workflow}")
                    cancel = False
                continue
            if not host.up:
                continue
            if self.rng.random() < 0.2:
                view = await self._ask(host, gateway.ask("", workflow, "workflow"), 15.0)
                if isinstance(view, dict):
                    self._guard(lambda: self.ledger.tells(workflow, view["state"]))  # noqa: B023
                continue
            asked = gateway.ask("", workflow, "events", after=position, wait_s=3.0)
            page = await self._ask(host, asked, 20.0)
            if not isinstance(page, dict):
                continue
            for event in page["events"]:
                seq, _, index = event["id"].partition(".")
                place = (int(seq), int(index))
                if place <= position:
                    self._fail(f"{workflow}: event {event['id']} comes after {position}")
                position = place
                if event.get("final"):
                    self._guard(lambda: self.ledger.tells(workflow, event["state"]))  # noqa: B023
            if page["over"]:
                break
        state = ""
        while state not in FINAL:  # a home that was cut off may not know of the end yet
            host = self._host_for(workflow)
            asked = host.enactment.gateway.ask("", workflow, "workflow")
            view = await self._ask(host, asked, 15.0)
            state = view["state"] if isinstance(view, dict) else ""
            await asyncio.sleep(0.5)
        self._guard(lambda: self.ledger.tells(workflow, state))

    def _host_for(self, workflow: str) -> Host:
        if self.queue is not None and is_queued(workflow):
            return self.queue
        return self._any()

    def _any(self) -> Host:
        """One that is up, unless all have fallen at the same moment: then nobody answers."""
        for _ in range(1000):
            host = self.rng.choice(self.hosts)
            if host.up:
                break
        return host

    async def _ask(self, host: Host, work: Any, limit_s: float) -> Any:
        """An answer; None if none comes, or a problem that a user would try again after."""
        if not host.up:
            work.close()
            return None
        try:
            return await host.do(work, limit_s)
        except ApiError as problem:
            self._problem = f"{problem.status}: {problem.detail}"
            if problem.status not in (404, 409, 503, 507):
                self._fail(f"a user is told {problem.status}: {problem.detail}")
            return None

    # ----------------------------------------------------------------- faults

    async def _faults(self) -> None:
        while self.faults:
            await asyncio.sleep(self.rng.expovariate(1 / self.every_s))
            name = self.rng.choice(self.faults)
            self._spawn(getattr(self, "_do_" + name.replace("-", "_"))())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._users.add(task)
        task.add_done_callback(self._users.discard)

    async def _for_a_while(self, what: str, most_s: float = 15.0) -> None:
        """Harm that ends by itself, and may end early with all others."""
        self._harm[what] = self._harm.get(what, 0) + 1
        try:
            async with asyncio.timeout(most_s * self.rng.random() ** 2):
                await self._recovering.wait()
        except TimeoutError:
            pass
        finally:
            self._harm[what] -= 1
            self._calm_since = self._now()

    async def _recover(self) -> None:
        self._recovering.set()
        await asyncio.sleep(1.0)
        self.network.faults = Faults()
        self.say("the faults are over")

    async def _do_crash(self, host: Host | None = None) -> None:
        hosts = self.up()
        if len(hosts) <= max(1, self.plan.peers // 2):
            return
        owners = [h for h in hosts if h.enactment.service(TicketsService).owner.markets]
        if host is None and owners and self.rng.random() < 0.5:
            host = self.rng.choice(owners)  # with all its claims
        host = host or self.rng.choice(hosts)
        if not host.up:
            return
        self.say(f"peer {host.index} crashes")
        host.kill(whole=False)
        await self._for_a_while("crash", 12.0)
        if not host.gone:
            self.say(f"peer {host.index} starts again")
            self.start(host)

    async def _do_leave(self) -> None:
        """One says goodbye, and hands on what it has; it is back after a while."""
        hosts = self.up()
        if len(hosts) <= max(1, self.plan.peers // 2):
            return
        host = self.rng.choice(hosts)
        self.say(f"peer {host.index} leaves")
        await host.do(host.leave(LEAVE_S), 4 * LEAVE_S)
        if not host.up:
            return  # it was in the middle of that
        self.say(f"peer {host.index} is gone")
        host.kill(whole=False)
        await self._for_a_while("crash", 12.0)
        if not host.gone:
            self.say(f"peer {host.index} starts again")
            self.start(host)

    async def _do_queue(self) -> None:
        """The task queue falls, or is cut off."""
        queue = self.queue
        if queue is None or not queue.up:
            return
        if self.rng.random() < 0.5:
            self.say("the queue is cut off")
            self.network.cut.add(queue.id)
            await self._for_a_while("queue", 12.0)
            self.network.cut.discard(queue.id)
            return
        self.say("the queue crashes")
        queue.kill(whole=self.rng.random() < 0.5)
        await self._for_a_while("queue", 12.0)
        self.say("the queue starts again")
        self.start(queue)

    async def _do_power(self) -> None:
        """Many at once, and back after a while."""
        if len(self.up()) <= max(1, self.plan.peers // 2):
            return
        hosts = self.rng.sample(self.up(), self.rng.randint(1, len(self.up()) - 1))
        self.say(f"the power fails for {sorted(host.index for host in hosts)}")
        for host in hosts:
            host.kill()
            self._spawn(self._rise(host))

    async def _do_ambush(self) -> None:
        """The next time a home counts something, it falls, with all who said that they have it."""
        self._ambush = True

    def _spring(self, home: Host, workflow: str) -> None:
        lead = home.enactment.keeping.leads.get(workflow) if home.up else None
        if lead is None or len(self.up()) <= max(1, self.plan.peers // 2):
            return
        count = home.enactment.keeping.replicas[workflow].committed
        fallen = [h for h in self.up() if lead.have.get(h.id, 0) >= count or h is home]
        self.say(f"an ambush, on {sorted(host.index for host in fallen)}")
        for host in fallen:
            host.kill()
            self._spawn(self._rise(host))

    async def _do_turncoat(self) -> None:
        """Who votes next falls, and is soon back; whom it voted for is elected and cut off."""
        self._turncoat = True

    def _turn(self, voter: Host, candidate: bytes) -> None:
        if not voter.up or len(self.up()) <= max(1, self.plan.peers // 2):
            return
        self.say(f"peer {voter.index} has voted, and falls")
        voter.kill(whole=False)
        self._spawn(self._rise(voter, 1.0))
        self._spawn(self._isolate(candidate))

    async def _isolate(self, peer: bytes) -> None:
        await asyncio.sleep(0.006)  # the vote reaches it
        self.network.cut.add(peer)
        await self._for_a_while("cut", 15.0)
        self.network.cut.discard(peer)

    async def _rise(self, host: Host, most_s: float = 12.0) -> None:
        """Each at a time of its own."""
        await self._for_a_while("crash", most_s)
        self.say(f"peer {host.index} starts again")
        self.start(host)

    async def _do_die(self, host: Host | None = None) -> None:
        """For good. Only when all is well: who loses two keepers at once has lost."""
        lost = sum(host.gone for host in self.hosts)
        calm_s = 3.0 if host is not None else 20.0
        calm = not any(self._harm.values()) and self._now() - self._calm_since >= calm_s
        calm = calm and self._now() - self._died_at >= 20.0
        if not calm or lost >= self.plan.peers // 3 or len(self.up()) <= 4:
            return
        traitor = host is not None and host.up
        host = host if host is not None and host.up else self.rng.choice(self.up())
        host.gone = True
        self.say(f"peer {host.index} dies for good")
        host.kill(whole=traitor or self.rng.random() < 0.5, mute=traitor)
        self._calm_since = self._died_at = self._now()

    async def _replace(self) -> None:
        """As machines of a cloud come and go: with nothing said, and for good."""
        if not self.plan.replaced:
            return
        gc.enable()  # thousands leave much behind; what must stay of them is kept (loop._FALLEN)
        gc.freeze()
        gc.set_threshold(200_000, 20, 50)
        pause_s = 60.0 / (self.plan.replaced * self.plan.peers)
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / pause_s))
            host = self.rng.choice(self.up())
            host.kill(whole=self.rng.random() < 0.5)
            host.gone = True
            self.hosts.remove(host)
            host.bury()
            self.ledger.counts["replaced"] += 1
            self.add_host()

    async def _do_perish(self) -> None:
        """A majority of one journal's keepers, for good: only for worlds that go on without."""
        for host in self.up():
            keeping = host.enactment.keeping
            for workflow, lead in keeping.leads.items():
                copy = keeping.replicas[workflow]
                others = [h for h in self.up() if h.id in copy.keepers and h is not host]
                whole = all(lead.have.get(h.id, 0) >= copy.committed > 0 for h in others)
                if len(others) < 2 or not whole or self._perished or copy.over:
                    continue
                self._perished = True
                for victim in (host, *others[: majority(len(copy.keepers)) - 1]):
                    self.say(f"peer {victim.index}, keeper of {workflow}, dies for good")
                    victim.gone = True
                    victim.kill()
                return

    async def _do_halve(self) -> None:
        """A keeper with a part of a submission is cut off, for longer than a majority is waited
        for: only for worlds that name it."""
        end = self._now() + HALVE_S
        while self._now() < end:
            for host in self.up():
                keeping = host.enactment.keeping
                for workflow, copy in keeping.replicas.items():
                    part = copy.count and not 0 < copy.whole_at_count <= copy.count
                    if part and workflow not in keeping.leads:
                        await self._cut_off(host, 3 * self.plan.majority_lost_s)
                        return
            await asyncio.sleep(0.0005)

    async def _cut_off(self, host: Host, seconds: float) -> None:
        if host.id in self.network.cut:
            return
        self.say(f"peer {host.index} has a part of a submission, and is cut off")
        self.network.cut.add(host.id)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.network.cut.discard(host.id)

    async def _do_stop(self) -> None:
        if not self.up():
            return
        host = self.rng.choice(self.up())
        life = host.life
        assert life is not None
        if life.stopped:
            return
        self.say(f"peer {host.index} stops")
        life.stop()
        await self._for_a_while("stop", 12.0)
        if not life.dead:
            self.say(f"peer {host.index} goes on")
            life.go_on()

    async def _do_island(self) -> None:
        if self.network.island:
            return
        count = self.rng.randint(1, len(self.hosts) - 1)
        chosen = self.rng.sample(self.hosts, count)
        self.say(f"an island: {sorted(host.index for host in chosen)}")
        self.network.island = {host.id for host in chosen}
        await self._for_a_while("island", 25.0)
        self.network.island = set()
        self.say("no island any more")

    async def _links(self, what: str, one_way: bool) -> set[tuple[bytes, bytes]]:
        a, b = self.rng.sample(self.hosts, 2)
        self.say(f"{what}: {a.index} to {b.index}")
        return {(a.id, b.id)} if one_way else {(a.id, b.id), (b.id, a.id)}

    async def _do_cut(self, one_way: bool = False) -> None:
        links = await self._links("one-way cut" if one_way else "cut", one_way)
        self.network.cut_links |= links
        await self._for_a_while("cut", 20.0)
        self.network.cut_links -= links

    async def _do_one_way(self) -> None:
        await self._do_cut(one_way=True)

    async def _do_clog(self) -> None:
        links = await self._links("clogged", one_way=True)
        for link in links:
            self.network.clogged[link] = 3.0 * self.rng.random()
        await self._for_a_while("clog", 15.0)
        for link in links:
            self.network.clogged.pop(link, None)

    async def _do_lossy(self) -> None:
        rng = self.rng
        self.network.faults = Faults(
            loss=0.3 * rng.random() ** 2, duplication=0.3 * rng.random(), straggling=0.05
        )
        self.say(f"messages are lost ({self.network.faults.loss:.0%}), doubled and late")
        await self._for_a_while("lossy", 20.0)
        self.network.faults = Faults()

    async def _do_slow_disk(self) -> None:
        if not self.up():
            return
        host = self.rng.choice(self.up())
        self.say(f"peer {host.index} has a slow disk")
        host.sync_s = host.database.sync_s = 0.3 * self.rng.random()
        await self._for_a_while("slow-disk", 15.0)
        host.sync_s = host.database.sync_s = self.sync_s

    async def _do_full_disk(self) -> None:
        if not self.up():
            return
        host = self.rng.choice(self.up())
        self.say(f"peer {host.index} has a full disk")
        host.database.full = True
        await self._for_a_while("full-disk", 10.0)
        host.database.full = False


async def simulate(plan: Plan) -> WorldReport:
    random.seed(plan.seed)
    return await World(plan).run()
