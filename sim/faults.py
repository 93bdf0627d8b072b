"""Fault injection: the faults of one simulated run, and their end.

Peers crash and come back, die for good, stop and resume; links are cut, cut in one direction,
clogged; islands form and heal; messages are lost, duplicated and late; disks are slow or full; the
power fails for many peers at once. Some faults wait for their moment: an *ambush* for an entry that
becomes committed, a *turncoat* for a vote.

Rules:
- Each world has a share of these faults only, at a rate of its own (swarm testing: a bug that one
  fault hides shows where that fault is missing).
- A peer dies for good only when all is well: losing two keepers at once loses a majority, which no
  journal survives. `perish` and `halve` break this rule; only plans that name them have them.
- All harm but a death ends by itself, and at the latest when the world recovers.
- Every number is drawn from the world's own generator, in the order of events: a run is its seed.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from valence.protocols.consensus.keeping import Keeping
from valence.protocols.consensus.replica import majority
from valence.protocols.strategies.tickets.service import TicketsService
from valence.protocols.wire.messages import Elect, Elected

from .host import Host
from .loop import NOBODY
from .network import Faults

if TYPE_CHECKING:
    from .world import World

LEAVE_S = 2.0
HALVE_S = 5.0  # for so long `halve` looks for a keeper that has only a part of a submission
CALM_S = 20.0  # without harm, and since the last death, before a peer dies for good
CALM_AFTER_PROMISE_S = 3.0  # before a home dies that has just acknowledged a submission


class FaultInjector:
    def __init__(self, world: World) -> None:
        plan, rng = world.plan, world.rng
        self._world = world
        self._plan = plan
        self._rng = rng
        self._network = world.network
        # the share of the faults that this world has
        count = rng.randint(3, len(plan.faults)) if len(plan.faults) > 3 else len(plan.faults)
        self.kinds = rng.sample(plan.faults, count)
        if plan.queue:
            self.kinds += ["queue"] * 2
        self.every_s = plan.every_s * rng.choice((0.3, 1.0, 1.0, 2.0))
        self.over = asyncio.Event()
        self._ambush = self._turncoat = False
        self._perished = False
        self._harm: dict[str, int] = {}
        self._calm_since = self._died_at = 0.0
        self._inflict: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "crash": self.crash,
            "power": self._cut_power,
            "leave": self._leave,
            "ambush": self._lay_ambush,
            "turncoat": self._await_vote,
            "die": self.die,
            "stop": self._stop,
            "island": self._isolate_some,
            "cut": self._cut_link,
            "one-way": self._cut_one_way,
            "clog": self._clog,
            "lossy": self._lose_messages,
            "slow-disk": self._slow_disk,
            "full-disk": self._fill_disk,
            "queue": self._fail_queue,
            "perish": self._perish,
            "halve": self._halve,
        }

    async def run(self) -> None:
        while self.kinds:
            await asyncio.sleep(self._rng.expovariate(1 / self.every_s))
            self._world.spawn(self._inflict[self._rng.choice(self.kinds)]())

    async def replace_peers(self) -> None:
        """Replace peers as a cloud does its machines: without notice, and for good."""
        plan, rng, world = self._plan, self._rng, self._world
        if not plan.replaced:
            return
        gc.enable()  # thousands of dead peers are much garbage; `loop` itself keeps what must stay
        gc.freeze()
        gc.set_threshold(200_000, 20, 50)
        pause_s = 60.0 / (plan.replaced * plan.peers)
        while True:
            await asyncio.sleep(rng.expovariate(1 / pause_s))
            host = rng.choice(world.up())
            host.kill(whole=rng.random() < 0.5)
            host.gone = True
            world.hosts.remove(host)
            host.bury()
            world.ledger.counts["replaced"] += 1
            world.add_host()

    async def end(self) -> None:
        """End all harm, so that the world can come to its end."""
        self.over.set()
        await asyncio.sleep(1.0)
        self._network.faults = Faults()
        self._world.say("the faults are over")

    async def betray(self, home: Host) -> None:
        """Kill a home that has just acknowledged a submission."""
        await self.die(home)
        self._world.spawn(self.crash(home))

    # ----------------------------------------------------------------- for a while

    async def _for_a_while(self, harm: str, most_s: float = 15.0) -> None:
        """Wait while this harm lasts; it may end early, together with all others."""
        self._harm[harm] = self._harm.get(harm, 0) + 1
        try:
            async with asyncio.timeout(most_s * self._rng.random() ** 2):
                await self.over.wait()
        except TimeoutError:
            pass
        finally:
            self._harm[harm] -= 1
            self._calm_since = self._world.now()

    def _is_calm(self, calm_s: float) -> bool:
        now = self._world.now()
        healed = not any(self._harm.values()) and now - self._calm_since >= calm_s
        return healed and now - self._died_at >= CALM_S

    def _too_few_up(self) -> bool:
        return len(self._world.up()) <= max(1, self._plan.peers // 2)

    def _any_up(self) -> Host | None:
        up = self._world.up()
        return self._rng.choice(up) if up else None

    # ----------------------------------------------------------------- peers

    async def _restart(self, host: Host, most_s: float = 12.0) -> None:
        """Start a killed peer again, at a time of its own."""
        await self._for_a_while("crash", most_s)
        if not host.gone:
            self._world.say(f"peer {host.index} starts again")
            self._world.start(host)

    async def crash(self, host: Host | None = None) -> None:
        if self._too_few_up():
            return
        hosts = self._world.up()
        owners = [h for h in hosts if h.enactment.service(TicketsService).owner.markets]
        if host is None and owners and self._rng.random() < 0.5:
            host = self._rng.choice(owners)  # with all its claims
        host = host or self._rng.choice(hosts)
        if not host.up:
            return
        self._world.say(f"peer {host.index} crashes")
        host.kill(whole=False)
        await self._restart(host)

    async def _leave(self) -> None:
        """A peer says goodbye and hands on what it holds; after a while it is back."""
        if self._too_few_up():
            return
        host = self._rng.choice(self._world.up())
        self._world.say(f"peer {host.index} leaves")
        await host.do(host.leave(LEAVE_S), 4 * LEAVE_S)
        if not host.up:
            return  # it crashed while it was leaving
        self._world.say(f"peer {host.index} is gone")
        host.kill(whole=False)
        await self._restart(host)

    async def die(self, host: Host | None = None) -> None:
        """A peer dies for good: this one if it is up, else any; only when all is well."""
        lost = sum(other.gone for other in self._world.hosts)
        calm = self._is_calm(CALM_AFTER_PROMISE_S if host is not None else CALM_S)
        if not calm or lost >= self._plan.peers // 3 or len(self._world.up()) <= 4:
            return
        traitor = host is not None and host.up
        if host is None or not host.up:
            host = self._rng.choice(self._world.up())
        host.gone = True
        self._world.say(f"peer {host.index} dies for good")
        host.kill(whole=traitor or self._rng.random() < 0.5, mute=traitor)
        self._calm_since = self._died_at = self._world.now()

    async def _stop(self) -> None:
        host = self._any_up()
        if host is None:
            return
        life = host.life
        assert life is not None
        if life.stopped:
            return
        self._world.say(f"peer {host.index} stops")
        life.stop()
        await self._for_a_while("stop", 12.0)
        if not life.dead:
            self._world.say(f"peer {host.index} resumes")
            life.go_on()

    async def _cut_power(self) -> None:
        """Many peers crash at once; each is back after a while."""
        if self._too_few_up():
            return
        up = self._world.up()
        hosts = self._rng.sample(up, self._rng.randint(1, len(up) - 1))
        self._world.say(f"the power fails for {sorted(host.index for host in hosts)}")
        self._kill_for_a_while(hosts)

    def _kill_for_a_while(self, hosts: list[Host]) -> None:
        for host in hosts:
            host.kill()
            self._world.spawn(self._restart(host))

    async def _fail_queue(self) -> None:
        """The task queue crashes, or is cut off."""
        queue = self._world.queue
        if queue is None or not queue.up:
            return
        if self._rng.random() < 0.5:
            self._world.say("the queue is cut off")
            self._network.cut.add(queue.id)
            await self._for_a_while("queue", 12.0)
            self._network.cut.discard(queue.id)
            return
        self._world.say("the queue crashes")
        queue.kill(whole=self._rng.random() < 0.5)
        await self._for_a_while("queue", 12.0)
        self._world.say("the queue starts again")
        self._world.start(queue)

    # ----------------------------------------------------------------- at the worst moment

    async def _lay_ambush(self) -> None:
        """The next home that counts an entry as committed crashes, with all keepers who have it."""
        self._ambush = True

    def agreed(self, home: Host, workflow: str) -> None:
        """A home counts more entries as committed."""
        if self._ambush:
            self._ambush = False
            loop = asyncio.get_running_loop()
            loop.call_soon(self._spring, home, workflow, context=NOBODY)

    def _spring(self, home: Host, workflow: str) -> None:
        lead = home.enactment.keeping.leads.get(workflow) if home.up else None
        if lead is None or self._too_few_up():
            return
        count = home.enactment.keeping.replicas[workflow].committed
        victims = [h for h in self._world.up() if lead.have.get(h.id, 0) >= count or h is home]
        self._world.say(f"an ambush: these crash: {sorted(host.index for host in victims)}")
        self._kill_for_a_while(victims)

    async def _await_vote(self) -> None:
        """The next voter crashes, and is soon back; its candidate is elected, and cut off."""
        self._turncoat = True

    def voted(self, voter: Host, candidate: bytes, asked: Elect, answer: Elected) -> None:
        """A keeper is about to answer a candidate."""
        votes = zip(asked.candidacies, answer.votes, strict=True)
        if self._turncoat and any(vote.granted and not c.trial for c, vote in votes):
            self._turncoat = False
            loop = asyncio.get_running_loop()
            loop.call_later(0.0005, self._turn, voter, candidate, context=NOBODY)

    def _turn(self, voter: Host, candidate: bytes) -> None:
        if not voter.up or self._too_few_up():
            return
        self._world.say(f"peer {voter.index} has voted, and crashes")
        voter.kill(whole=False)
        self._world.spawn(self._restart(voter, 1.0))
        self._world.spawn(self._isolate(candidate))

    async def _isolate(self, peer: bytes) -> None:
        await asyncio.sleep(0.006)  # the vote reaches it
        self._network.cut.add(peer)
        await self._for_a_while("cut", 15.0)
        self._network.cut.discard(peer)

    async def _perish(self) -> None:
        """A majority of one journal's keepers dies for good, once: only in worlds that go on
        without a majority."""
        for home in self._world.up():
            for workflow in home.enactment.keeping.leads:
                others = self._other_keepers(home, workflow)
                if self._perished or others is None:
                    continue
                self._perished = True
                keepers = len(home.enactment.keeping.replicas[workflow].keepers)
                for victim in (home, *others[: majority(keepers) - 1]):
                    self._world.say(f"peer {victim.index}, keeper of {workflow}, dies for good")
                    victim.gone = True
                    victim.kill()
                return

    def _other_keepers(self, home: Host, workflow: str) -> list[Host] | None:
        """The journal's other keepers; None if some are down or behind, or the workflow is over."""
        keeping = home.enactment.keeping
        copy, have = keeping.replicas[workflow], keeping.leads[workflow].have
        others = [h for h in self._world.up() if h.id in copy.keepers and h is not home]
        whole = all(have.get(host.id, 0) >= copy.committed > 0 for host in others)
        return others if len(others) >= 2 and whole and not copy.over else None

    async def _halve(self) -> None:
        """A keeper that has a part of a submission is cut off, for longer than a majority is waited
        for: only in worlds that go on without a majority."""
        end = self._world.now() + HALVE_S
        while self._world.now() < end:
            for host in self._world.up():
                if _has_half_a_submission(host.enactment.keeping):
                    await self._cut_off(host, 3 * self._plan.majority_lost_s)
                    return
            await asyncio.sleep(0.0005)

    async def _cut_off(self, host: Host, seconds: float) -> None:
        if host.id in self._network.cut:
            return
        self._world.say(f"peer {host.index} has a part of a submission, and is cut off")
        self._network.cut.add(host.id)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._network.cut.discard(host.id)

    # ----------------------------------------------------------------- the network

    async def _isolate_some(self) -> None:
        if self._network.island:
            return
        hosts = self._world.hosts
        count = self._rng.randint(1, len(hosts) - 1)
        chosen = self._rng.sample(hosts, count)
        self._world.say(f"an island: {sorted(host.index for host in chosen)}")
        self._network.island = {host.id for host in chosen}
        await self._for_a_while("island", 25.0)
        self._network.island = set()
        self._world.say("the island is connected again")

    def _two_hosts(self, harm: str) -> tuple[Host, Host]:
        a, b = self._rng.sample(self._world.hosts, 2)
        self._world.say(f"{harm}: {a.index} to {b.index}")
        return a, b

    async def _cut_link(self) -> None:
        a, b = self._two_hosts("cut")
        await self._cut({(a.id, b.id), (b.id, a.id)})

    async def _cut_one_way(self) -> None:
        a, b = self._two_hosts("one-way cut")
        await self._cut({(a.id, b.id)})

    async def _cut(self, links: set[tuple[bytes, bytes]]) -> None:
        self._network.cut_links |= links
        await self._for_a_while("cut", 20.0)
        self._network.cut_links -= links

    async def _clog(self) -> None:
        a, b = self._two_hosts("clogged")
        self._network.clogged[a.id, b.id] = 3.0 * self._rng.random()
        await self._for_a_while("clog", 15.0)
        self._network.clogged.pop((a.id, b.id), None)

    async def _lose_messages(self) -> None:
        rng = self._rng
        self._network.faults = Faults(
            loss=0.3 * rng.random() ** 2, duplication=0.3 * rng.random(), straggling=0.05
        )
        loss = self._network.faults.loss
        self._world.say(f"messages are lost ({loss:.0%}), duplicated and late")
        await self._for_a_while("lossy", 20.0)
        self._network.faults = Faults()

    # ----------------------------------------------------------------- disks

    async def _slow_disk(self) -> None:
        host = self._any_up()
        if host is None:
            return
        self._world.say(f"peer {host.index} has a slow disk")
        host.sync_s = host.database.sync_s = 0.3 * self._rng.random()
        await self._for_a_while("slow-disk", 15.0)
        host.sync_s = host.database.sync_s = self._world.sync_s

    async def _fill_disk(self) -> None:
        host = self._any_up()
        if host is None:
            return
        self._world.say(f"peer {host.index} has a full disk")
        host.database.full = True
        await self._for_a_while("full-disk", 10.0)
        host.database.full = False


def _has_half_a_submission(keeping: Keeping) -> bool:
    return any(
        copy.count and not 0 < copy.whole_at_count <= copy.count
        for workflow, copy in keeping.replicas.items()
        if workflow not in keeping.leads
    )
