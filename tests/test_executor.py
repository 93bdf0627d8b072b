"""The executing side, over the wire: door, executor, outbox and fencing of one whole peer, against a
home that is a test. Rules: nothing starts twice, nothing runs that was not leased, an outcome is told
until it is acknowledged, and of two homes the newer one's word holds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from sim.host import Host
from sim.loop import run_out
from sim.network import SimPeer
from sim.world import Plan, World
from valence.protocols.engine.explain import FENCED
from valence.protocols.engine.outbox import REPORT_RETRY_S_MAX
from valence.protocols.wire.messages import (
    Abort,
    AttemptKey,
    Capacity,
    Commit,
    Committed,
    Contact,
    Done,
    Inquire,
    Inquired,
    Needs,
    Offers,
    Outcome,
    Report,
    Reported,
    Reserve,
    ReturnLeases,
    Room,
    Work,
)

CORE = Needs(Capacity(millicores=1000))


def key(number: int = 1, task: str = "t") -> AttemptKey:
    return AttemptKey("w", task, number)


class Home:
    """It leases, commits, and acknowledges what is reported, or does not."""

    def __init__(self, world: World, index: int, host: Host, epoch: int = 1) -> None:
        self.peer = SimPeer(world.network, index)
        self.host, self.epoch = host, epoch
        self.reported: list[Outcome] = []
        self.reports = 0
        self.acknowledges = True
        self.knows = True
        self.peer.rpc.on(Report, self._report)

    def _report(self, sender: Contact, message: Report) -> Reported:
        self.reports += 1
        self.reported += message.outcomes
        keys = tuple(ended.key for ended in message.outcomes)
        if not self.knows:
            return Reported(kept=(), unknown=keys)
        return Reported(kept=keys if self.acknowledges else ())

    @property
    def at(self) -> Contact:
        return self.host.peer.contact

    async def lease(
        self, count: int = 1, queue: bool = False, runtime_s: float = 0.2
    ) -> tuple[int, ...]:
        message = Reserve(asks=(Room(CORE, count, runtime_s, queue=queue),))
        answer = await self.peer.rpc.call(self.at, message, Offers)
        return answer.grants[0].leases

    async def commit(self, lease: int, key: AttemptKey, seconds: float = 4.0) -> str:
        """Empty: it is there now."""
        work = Work(
            key, lease, CORE, command=("work", str(seconds)), outputs=("o",), epoch=self.epoch,
            owner="ada",
        )  # fmt: skip
        answer = await self.peer.rpc.call(self.at, Commit.of((work,)), Committed)
        return dict(answer.refused).get(key, "")

    async def ask(self, *keys: AttemptKey) -> tuple[str, ...]:
        message = Inquire(keys=keys, epochs=(("w", self.epoch),))
        return (await self.peer.rpc.call(self.at, message, Inquired)).states

    async def abort(self, *keys: AttemptKey) -> None:
        message = Abort(keys=keys, epochs=(("w", self.epoch),))
        await self.peer.rpc.call(self.at, message, Done)

    async def hears(self, key: AttemptKey, within_s: float = 30.0) -> Outcome:
        end = asyncio.get_running_loop().time() + within_s
        while True:
            for ended in self.reported:
                if ended.key == key:
                    return ended
            assert asyncio.get_running_loop().time() < end, "it was not reported"
            await asyncio.sleep(0.05)


Scenario = Callable[[World, Host, Home], Awaitable[None]]


def executing(scenario: Scenario) -> None:
    async def run() -> None:
        world = World(Plan(5, peers=1, faults=()))
        host = world.add_host()
        home = await another_home(world, 500, host)
        await scenario(world, host, home)

    run_out(run())


async def another_home(world: World, index: int, host: Host, epoch: int = 1) -> Home:
    made = Home(world, index, host, epoch)
    await made.peer.join(host.peer)
    return made


@contextmanager
def begun(host: Host) -> Iterator[list[AttemptKey]]:
    keys: list[AttemptKey] = []
    host.workshop.on_begin = lambda work: keys.append(work.key)
    yield keys


def free(host: Host) -> bool:
    admission = host.enactment.admission
    admission.sanity_check()
    return bool(admission.free == admission.capacity)


def test_an_attempt_runs_once_and_its_outcome_is_reported_and_its_capacity_free_again() -> None:
    async def scenario(world: World, host: Host, home: Home) -> None:
        with begun(host) as keys:
            [lease] = await home.lease()
            assert await home.commit(lease, key()) == ""
            assert await home.ask(key()) == ("running",)
            ended = await home.hears(key())
            assert ended.kind == "ok"
            assert [file.name for file in ended.outputs] == ["o"]
            assert ended.enclosed, "a small output travels along"
            await asyncio.sleep(5.0)
            assert keys == [key()]
            assert home.reports == 1
            assert await home.ask(key()) == ("unknown",)
            assert free(host)

    executing(scenario)


def test_a_commit_that_comes_again_under_another_id_starts_nothing() -> None:
    async def scenario(world: World, host: Host, home: Home) -> None:
        with begun(host) as keys:
            one, other = await home.lease(2)
            assert await home.commit(one, key()) == ""
            assert await home.commit(other, key()) == "", "it is seen to"
            await home.hears(key())
            assert await home.commit(other, key()) != "", "its lease went long ago, it ran already"
            await asyncio.sleep(20.0)
            assert keys == [key()]
            assert free(host)

    executing(scenario)


def test_nothing_runs_without_a_lease_with_a_strangers_or_with_one_that_was_returned() -> None:
    async def scenario(world: World, host: Host, home: Home) -> None:
        stranger = await another_home(world, 501, host)
        with begun(host) as keys:
            [lease] = await home.lease()
            assert await home.commit(lease + 1000, key())
            assert await stranger.commit(lease, key(1, "theirs"))
            home.peer.rpc.tell(home.at, ReturnLeases(leases=(lease,)))
            await asyncio.sleep(1.0)
            assert await home.commit(lease, key())
            [late] = await home.lease()
            await asyncio.sleep(30.0)
            assert await home.commit(late, key()), "it has expired"
            assert not keys
            assert free(host)

    executing(scenario)


def test_an_outcome_is_told_until_it_is_acknowledged_and_kept_meanwhile() -> None:
    async def scenario(world: World, host: Host, home: Home) -> None:
        home.acknowledges = False
        [lease] = await home.lease()
        await home.commit(lease, key())
        await home.hears(key())
        await asyncio.sleep(4 * REPORT_RETRY_S_MAX)
        assert 4 <= home.reports <= 40, "with back-off"
        assert await home.ask(key()) == ("reporting",)
        home.acknowledges = True
        await asyncio.sleep(2 * REPORT_RETRY_S_MAX)
        assert await home.ask(key()) == ("unknown",)
        told = home.reports
        await asyncio.sleep(60.0)
        assert home.reports == told

    executing(scenario)


def test_an_outcome_outlives_its_peers_death() -> None:
    async def scenario(world: World, host: Host, home: Home) -> None:
        home.acknowledges = False
        [lease] = await home.lease()
        await home.commit(lease, key())
        first = await home.hears(key())
        await asyncio.sleep(1.0)
        host.kill()
        await asyncio.sleep(5.0)
        home.reported.clear()
        home.acknowledges = True
        host.start([home.peer.contact])
        again = await home.hears(key(), 60.0)
        assert again.outputs == first.outputs

    executing(scenario)


def test_what_was_running_when_its_peer_died_is_unknown_there() -> None:
    async def scenario(world: World, host: Host, home: Home) -> None:
        with begun(host) as keys:
            [lease] = await home.lease()
            await home.commit(lease, key(), 60.0)
            await asyncio.sleep(2.0)
            host.kill()
            await asyncio.sleep(1.0)
            host.start([home.peer.contact])
            await asyncio.sleep(10.0)
            assert await home.ask(key()) == ("unknown",)
            assert keys == [key()]
            assert free(host)

    executing(scenario)


def test_an_attempt_that_is_not_wanted_ends_and_reports_nothing() -> None:
    async def scenario(world: World, host: Host, home: Home) -> None:
        leases = await home.lease(host.slots)
        for n, lease in enumerate(leases):
            assert await home.commit(lease, key(1, f"t{n}"), 60.0) == ""
        [queued] = await home.lease(1, queue=True)
        assert await home.commit(queued, key(1, "later"), 60.0) == ""
        assert await home.ask(key(1, "t0"), key(1, "later")) == ("running", "queued")
        await home.abort(key(1, "later"), *(key(1, f"t{n}") for n in range(len(leases))))
        await asyncio.sleep(1.0)
        assert await home.ask(key(1, "t0"), key(1, "later")) == ("unknown", "unknown")
        assert not home.reported
        assert free(host)

    executing(scenario)


def test_the_newer_home_is_heeded_the_older_one_is_fenced_and_outcomes_go_to_the_newer() -> None:
    async def scenario(world: World, host: Host, home: Home) -> None:
        newer = await another_home(world, 501, host, epoch=2)
        [lease] = await home.lease()
        await home.commit(lease, key())
        assert await newer.ask(key()) == ("running",)
        [second] = await home.lease()
        assert await home.commit(second, key(2)) == FENCED
        await home.abort(key())
        assert await newer.ask(key()) == ("running",), "it has no say any more"
        ended = await newer.hears(key())
        assert ended.epoch == 1, "of whom it was given out, for the newer home to judge"
        assert not home.reported

    executing(scenario)


def test_two_homes_that_gave_out_one_number_do_not_share_an_attempt() -> None:
    async def scenario(world: World, host: Host, home: Home) -> None:
        newer = await another_home(world, 501, host, epoch=2)
        [lease] = await home.lease()
        await home.commit(lease, key(), 60.0)
        [other] = await newer.lease()
        assert "earlier home" in await newer.commit(other, key())

    executing(scenario)


def test_what_no_home_knows_of_is_reported_on_and_given_up_in_the_end() -> None:
    async def scenario(world: World, host: Host, home: Home) -> None:
        home.knows = False
        [lease] = await home.lease()
        await home.commit(lease, key())
        await home.hears(key())
        await asyncio.sleep(300.0)
        assert await home.ask(key()) == ("reporting",)
        await asyncio.sleep(400.0)
        assert await home.ask(key()) == ("unknown",)

    executing(scenario)


def test_a_full_disk_delays_outcomes_and_loses_none() -> None:
    async def scenario(world: World, host: Host, home: Home) -> None:
        host.database.full = True
        leases = await home.lease(host.slots)
        for n, lease in enumerate(leases):
            await home.commit(lease, key(1, f"t{n}"))
        await asyncio.sleep(30.0)
        assert not home.reported, "only what is on disk is reported"
        host.database.full = False
        for n in range(len(leases)):
            await home.hears(key(1, f"t{n}"), 60.0)

    executing(scenario)


def test_a_peer_that_leaves_hands_back_what_has_not_begun_and_lets_the_rest_end() -> None:
    async def scenario(world: World, host: Host, home: Home) -> None:
        leases = await home.lease(host.slots)
        for n, lease in enumerate(leases):
            await home.commit(lease, key(1, f"t{n}"))
        [queued] = await home.lease(1, queue=True)
        await home.commit(queued, key(1, "later"))
        leaving = asyncio.ensure_future(host.enactment.executor.leave(60.0))
        await asyncio.sleep(0.5)
        assert (await home.hears(key(1, "later"))).kind == "returned"
        assert await home.lease() == (), "it takes nothing in"
        await leaving
        kinds = {ended.key.task: ended.kind for ended in home.reported}
        assert kinds == {"later": "returned", **{f"t{n}": "ok" for n in range(len(leases))}}

    executing(scenario)
