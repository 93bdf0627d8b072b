"""The checks of a simulated world: while it runs, and when everything has come to its end.

While it runs: capacity adds up, and whatever waits says for what. In the end: every acknowledged
workflow is over and has its copies, all capacity is free, nothing has grown without bounds, and
every peer tells the same of every workflow. (What each home agrees on, runs and tells is checked as
it happens, by the ledger.)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from valence.protocols.consensus.keeping import Leadership
from valence.protocols.consensus.placement import is_queued
from valence.protocols.consensus.replica import Replica, majority, shown
from valence.protocols.strategies.tickets.service import TicketsService

from .host import Host
from .ledger import Violation

if TYPE_CHECKING:
    from .world import World

WAITERS_MAX = 1000
UNFINISHED = ("waiting", "pending", "retrying", "running")
ENDED = ("succeeded", "failed", "skipped", "cancelled")


class Checks:
    def __init__(self, world: World) -> None:
        self._world = world
        self._ledger = world.ledger

    # ----------------------------------------------------------------- while it runs

    async def watch(self) -> None:
        """Between the steps: capacity adds up, and whatever waits says for what."""
        world = self._world
        while True:
            await asyncio.sleep(10.0 if world.plan.crowded else 1.0)
            for host in world.up():
                world.guard(host.enactment.admission.sanity_check)
                bookings = host.enactment.admission.bookings
                world.guard(lambda: bookings.sanity_check(world.now()))  # noqa: B023
                for market in host.enactment.service(TicketsService).owner.markets.values():
                    world.guard(market.sanity_check)
                world.guard(lambda host=host: self._check_reasons(host))  # type: ignore[misc]

    def _check_reasons(self, host: Host) -> None:
        home = host.enactment.home
        for run in home.active():
            for task in run.tasks.values():
                if task.state in UNFINISHED and not home.waiting_for(run, task):
                    raise Violation(f"{run.id}/{task.id} is {task.state} and does not say why")

    # ----------------------------------------------------------------- in the end

    def close(self) -> None:
        for workflow in self._ledger.acknowledged:
            if not self._ledger.over(workflow):
                self._show_copies(workflow)
                raise Violation(f"{workflow} never came to its end: {self._why(workflow)}")
        self._check_copies()
        self._ledger.close()
        following = self._world.users.following
        if following:
            self._show_copies(min(following))
            raise Violation(f"users still wait for an answer about {sorted(following)}")
        for host in self._world.up():
            self._check_idle(host)
            self._check_bounds(host)

    def _check_copies(self) -> None:
        """Every workflow has copies at a majority of the keepers."""
        hosts = self._world.up()
        copies: Counter[str] = Counter()
        for host in hosts:
            rows = host.database.read("select workflow from copies where here = 1")
            copies.update(workflow for (workflow,) in rows)
        needed = majority(min(self._world.plan.keepers, len(hosts)))
        for workflow in self._ledger.acknowledged:
            if is_queued(workflow):
                continue  # it is on the queue's own disk
            if copies[workflow] < needed:
                self._show_copies(workflow)
                raise Violation(f"{workflow} is over, and {copies[workflow]} copies are left of it")

    def _check_idle(self, host: Host) -> None:
        admission = host.enactment.admission
        admission.sanity_check()
        if admission.free != admission.capacity or host.workshop.running:
            raise Violation(f"peer {host.index} has nothing to do, and not all its capacity free")
        if admission.bookings:
            raise Violation(f"peer {host.index} keeps bookings of workflows that are over")

    def _check_bounds(self, host: Host) -> None:
        config, peer = host.peer.config, host.peer
        assert peer.rpc.calls_pending <= config.pending_calls_max
        assert peer.rpc.answers_kept <= config.answers_kept_max
        assert peer.records.store.count <= config.records_max
        for workflow, lead in host.enactment.keeping.leads.items():
            assert len(lead.waiters) < WAITERS_MAX, f"{workflow}: waiters pile up"
            assert len(lead.tail) <= config.tail_entries_max + 64, f"{workflow}: its tail grows"

    async def ask_everybody(self) -> None:
        """Every peer tells the same of every workflow."""
        world = self._world
        for workflow in self._ledger.acknowledged:
            for host in [world.queue] if world.queue and is_queued(workflow) else world.up():
                assert host is not None
                gateway = host.enactment.gateway
                view = await world.users.ask(host, gateway.ask("", workflow, "workflow"), 30.0)
                listed = await world.users.ask(host, gateway.ask("", workflow, "files"), 30.0)
                if view is None or listed is None:
                    self._show_copies(workflow)
                    problem = f"what became of {workflow}: {world.users.problem}"
                    world.fail(f"peer {host.index} can't say {problem}")
                    return
                files = {file["name"]: file["hash"] for file in listed["files"]}
                world.guard(lambda: self._ledger.serves(workflow, host.index, view, files))  # noqa: B023

    # ----------------------------------------------------------------- why it went wrong

    def _why(self, workflow: str) -> str:
        """The reasons that the peers themselves give."""
        queue, up = self._world.queue, self._world.up()
        homes = [*up, queue] if queue is not None and queue.up else up
        said = next(filter(None, (_waiting_at(host, workflow) for host in homes)), "")
        reasons = {
            f"peer {host.index}: {host.enactment.elections.reason(workflow)}"
            for host in up
            if workflow in host.enactment.keeping.replicas
        }
        return said or "; ".join(sorted(reasons)) or "nobody has a copy of it"

    def _show_copies(self, workflow: str) -> None:
        """Write each peer's copy of the journal to the trace."""
        for host in self._world.hosts:
            keeping = host.enactment.keeping
            copy = keeping.replicas.get(workflow) or keeping.storage.replica(workflow)
            if copy is None:
                continue
            self._show_copy(host, workflow, copy)
            lead = keeping.leads.get(workflow)
            if lead is not None:
                self._show_lead(lead)

    def _numbers(self) -> dict[bytes, int]:
        return {host.id: host.index for host in self._world.hosts}

    def _show_copy(self, host: Host, workflow: str, copy: Replica) -> None:
        number = self._numbers()
        keepers = [number.get(keeper, keeper.hex()[:6]) for keeper in copy.keepers]
        state = "up" if host.up else "gone" if host.gone else "down"
        self._world.say(
            f"peer {host.index} ({state}) has {copy.count} entries of {workflow}, "
            f"{copy.committed} committed, promised {shown(copy.promised)}, "
            f"follows {number.get(copy.home, '-')}, keepers {keepers}, "
            f"epochs {[(seq, shown(epoch)) for seq, epoch in copy.starts]}"
        )

    def _show_lead(self, lead: Leadership) -> None:
        number = self._numbers()
        have = {number.get(keeper): count for keeper, count in lead.have.items()}
        sent = {number.get(keeper): count for keeper, count in lead.sent.items()}
        self._world.say(f"  as its home in {shown(lead.epoch)}: have {have}, sent {sent}")


def _waiting_at(host: Host, workflow: str) -> str:
    """The first tasks that a home is waiting for; empty if it is not its home, or it is over."""
    home = host.enactment.home
    run = home.remembered(workflow)
    if run is None or run.over:
        return ""
    waits = [
        f"{task.id} ({task.state}): {home.waiting_for(run, task)}"
        for task in run.tasks.values()
        if task.state not in ENDED
    ]
    return f"peer {host.index} says " + "; ".join(waits[:3])
