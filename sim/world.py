"""One simulated disaster: hosts, users and faults, all drawn from one seed.

A world starts its hosts, lets users (`users`) submit and follow workflows while faults (`faults`)
occur, then ends the faults, after which everything must come to its end (`checks`). All the while
the ledger (`ledger`) is told what homes agree on, what runs, and what users are told.
"""

from __future__ import annotations

import asyncio
import logging
import random
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from valence.protocols.config import LAN, Config
from valence.protocols.strategies.deadline.config import DeadlineConfig
from valence.protocols.wire.messages import (
    Ask,
    Capacity,
    Contact,
    Elect,
    Elected,
    Message,
    Outcome,
    ReadChunk,
    Work,
)

from .checks import Checks
from .faults import FaultInjector
from .host import Host, QueueHost
from .ledger import Ledger, Violation
from .loop import NOBODY
from .network import Network
from .plan import Plan, WorldReport
from .users import Users

SIM = logging.getLogger("valence.sim")
SEEDS_MAX = 20
QUOTAS = (2**40, 2**40, 300_000)
MEET_S = 120.0  # for all peers to know each other
PATIENCE_S = 240.0  # for everything to come to its end
FREE_S = 60.0  # for what nobody wants any more to be given up
QUIET_S = 15.0  # after the last end: time for leases to expire
CROWD_QUIET_S = 120.0


class World:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.network = Network(self.rng.getrandbits(64))
        self.ledger = Ledger()
        self.ledger.lax = plan.majority_lost_s < float("inf")
        self.hosts: list[Host] = []
        self.queue: QueueHost | None = None
        self.trace: list[str] = []
        # (what follows draws from the one generator: its order is a part of every seed)
        self._config = _drawn_config(plan, self.rng)
        self._sites: tuple[str, ...] = ("here",)
        if plan.strategy == "pilots":
            self._sites = self.rng.choice((("here",), ("here", "there")))
        self._next_host = 0
        self._broken: Violation | None = None
        self._spawned: set[asyncio.Task[None]] = set()
        self.faults = FaultInjector(self)
        self.sync_s = self.rng.choice((0.001, 0.001, 0.02, 0.2))
        # a few of the larger files fill it: results wait for space until others are consumed (but
        # all that is submitted while the faults last fits, even if nobody was told of it)
        longer = max(1, round(plan.seconds / Plan(0).seconds))
        self.quota_bytes = 2**40 if plan.crowded else self.rng.choice(QUOTAS) * longer
        self.users = Users(self)
        self.checks = Checks(self)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def say(self, text: str) -> None:
        now = self.now()
        self.trace.append(f"{now:9.3f}  {text}")
        SIM.info("%9.3f  %s", now, text)

    def fail(self, text: str) -> None:
        """The first violation ends the run."""
        if self._broken is None:
            self.say(f"VIOLATION: {text}")
            self._broken = Violation(text)

    def guard(self, check: Callable[[], None]) -> None:
        try:
            check()
        except AssertionError as error:
            self.fail(str(error))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    # ----------------------------------------------------------------- hosts

    def up(self) -> list[Host]:
        return [host for host in self.hosts if host.up]

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
        self._observe(host)
        for task in host.tasks:
            task.add_done_callback(self._ended, context=NOBODY)

    def _observe(self, host: Host) -> None:
        """Have the peer's own parts tell the ledger, and the faults that wait for their moment."""
        ledger, keeping = self.ledger, host.enactment.keeping
        home_hears = keeping.on_committed
        assert host.life is not None

        def agreed(workflow: str) -> None:
            self.guard(lambda: ledger.agreed(host, workflow))
            home_hears(workflow)
            self.faults.agreed(host, workflow)

        keeping.on_committed = agreed
        host.workshop.on_begin = lambda work: self.guard(lambda: self._begins(host, work))
        host.workshop.on_end = lambda work: self.guard(lambda: ledger.ends(host, work))
        host.workshop.failing = 0.02
        if self.plan.strategy == "deadline":
            host.workshop.overruns = 0.05
            self._observe_evictions(host)
        outbox = host.enactment.outbox
        let_go = outbox.on_let_go
        outbox.on_let_go = lambda ended: self._let_go(host, ended, let_go)
        self._observe_calls(host)

    def _observe_evictions(self, host: Host) -> None:
        """No promised unit makes way for another before its time is over."""
        executor, bookings = host.enactment.executor, host.enactment.admission.bookings
        make_way = executor.make_way

        def observed(unit: Any, reason: str) -> None:
            promised = bookings.promise_of(unit)
            if promised is not None and promised.over_at > self.now():
                self.fail(f"{unit} was promised its place and must make way")
            self.ledger.counts["made_way"] += 1
            make_way(unit, reason)

        executor.make_way = observed  # type: ignore[method-assign]

    def _observe_calls(self, host: Host) -> None:
        rpc = host.peer.rpc
        vote = rpc.handlers[Elect]

        async def elect(sender: Contact, message: Elect) -> Elected:
            answer: Elected = await vote(sender, message)  # type: ignore[misc]
            self.faults.voted(host, sender.id, message, answer)
            return answer

        rpc.on(Elect, elect)
        rpc.on_error = lambda where, error: self.fail(f"error while serving {where}: {error!r}")
        served: set[tuple[bytes, int]] = set()

        def request(sender: Contact, call: int, message: Message) -> None:
            # (users' questions and chunks may be answered twice: that changes nothing more)
            if message.repeatable or isinstance(message, Ask | ReadChunk):
                return
            if (sender.id, call) in served:
                self.fail(f"one call was carried out twice: {type(message).__name__}")
            served.add((sender.id, call))

        rpc.on_request = request

    def _let_go(self, host: Host, ended: Outcome, then: Callable[[Outcome], None]) -> None:
        self.guard(lambda: self.ledger.lets_go(host, ended))
        then(ended)

    def _begins(self, host: Host, work: Work) -> None:
        self.ledger.begins(host, work)
        host.enactment.admission.sanity_check()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that should run for as long as its peer has ended."""
        if not task.cancelled() and task.exception() is not None:
            self._unhandled(asyncio.get_running_loop(), {"exception": task.exception()})

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An unhandled error in a peer that is alive."""
        error = context.get("exception")
        if error is not None:
            last = traceback.extract_tb(error.__traceback__)[-1:]
            where = "".join(f" at {frame.filename}:{frame.lineno}" for frame in last)
            self.fail(f"unhandled error: {error!r}{where}")

    # ----------------------------------------------------------------- the run

    async def run(self) -> WorldReport:
        plan = self.plan
        logging.getLogger("valence").setLevel(logging.CRITICAL)
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        await self._assemble()
        tasks = [
            asyncio.ensure_future(work)
            for work in (
                self.users.run(),
                self.faults.run(),
                self.checks.watch(),
                self.faults.replace_peers(),
            )
        ]
        end = self.now() + plan.seconds
        await self._until(lambda: self.now() >= end, plan.seconds, None)
        users, faults, _, replacing = tasks  # the checks go on
        for task in (users, faults, replacing):
            task.cancel()
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise RuntimeError("the world itself is broken") from task.exception()
        if self._broken is None:
            await self._finish()
        for task in (*tasks, *self._spawned):
            task.cancel()
        await asyncio.gather(*tasks, *self._spawned, return_exceptions=True)
        return WorldReport(
            plan.seed,
            str(self._broken or ""),
            self.now(),
            self.network.sent,
            dict(self.ledger.counts),
            self.trace,
        )

    async def _assemble(self) -> None:
        """Start all hosts, and wait until they know each other."""
        plan, faults = self.plan, self.faults
        if plan.queue:
            self.queue = QueueHost(self.network, self._config, self.rng.uniform(-30, 30))
            self.queue.sync_s = self.sync_s
            self.start(self.queue)
        for _ in range(plan.peers):
            self.add_host()
        await self._until(self._all_know_all, MEET_S, "the peers never found each other")
        mood = f"every {faults.every_s:g} s one of {', '.join(sorted(faults.kinds))}"
        self.say(f"{plan.peers} peers know each other; {mood}; syncs take {self.sync_s:g} s")

    async def _finish(self) -> None:
        """End the faults; then everything must come to its end."""
        await self.faults.end()
        await self._until(self._all_over, PATIENCE_S, None)
        await asyncio.sleep(self._quiet_s())
        await self._until(self._all_free, FREE_S, None)
        if self._broken is None:
            self.guard(self.checks.close)
        if self._broken is None:
            await self.checks.ask_everybody()

    async def _until(self, done: Callable[[], bool], limit_s: float, why: str | None) -> None:
        """Wait until it is done, or a rule is broken; fail after the limit if there is a `why`."""
        end = self.now() + limit_s
        while not done() and self._broken is None:
            if self.now() > end:
                if why:
                    self.fail(why)
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
        enough = count if not self.plan.crowded else 0.9 * count
        return all(host.peer.members.count >= enough for host in self.up())

    def _all_over(self) -> bool:
        # (workflows that were submitted but not acknowledged may run, too, and come to their end)
        busy = any(host.enactment.home.active() for host in self.up())
        over = self.ledger.over
        return not self._spawned and not busy and all(map(over, self.ledger.acknowledged))

    def _all_free(self) -> bool:
        """An attempt whose home is gone learns after a while that nobody wants it."""
        admissions = [host.enactment.admission for host in self.up()]
        return all(a.free == a.capacity and not a.bookings for a in admissions)


def _drawn_config(plan: Plan, rng: random.Random) -> Config:
    config = replace(
        plan.config,
        keepers=plan.keepers,
        overlay=plan.overlay,
        majority_lost_s=plan.majority_lost_s,
        stand_step_s=rng.choice((plan.config.stand_step_s, 0.0)),  # 0: all at once
        archive_after_s=2.0,
        follow_s=LAN.follow_s if plan.crowded else 5.0,
        archive_s=60.0 if plan.crowded else 5.0,
        booking_affirm_s=45.0,
    )
    slice_bytes = plan.slice_bytes or _drawn_slice_bytes(plan)
    if slice_bytes < LAN.keep_bytes_max:  # copies and documents arrive bit by bit
        config = replace(config, keep_bytes_max=slice_bytes, document_part_bytes=200)
    if plan.strategy == "deadline" and random.Random(f"tree {plan.seed}").random() < 0.5:
        config = config.having(DeadlineConfig(direct_max=0))  # a tree of a few peers
    if plan.seed % 2 and not plan.crowded:  # news spread as in a large cluster
        config = replace(config, wave_min=3, wave_width=2)
    return config


def _drawn_slice_bytes(plan: Plan) -> int:
    if plan.crowded:
        return LAN.keep_bytes_max
    own = random.Random(f"slices {plan.seed}")  # so that all other draws stay the same
    return own.choice((LAN.keep_bytes_max, LAN.keep_bytes_max, 2000, 1))


async def simulate(plan: Plan) -> WorldReport:
    random.seed(plan.seed)
    return await World(plan).run()
