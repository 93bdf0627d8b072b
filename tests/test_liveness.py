"""The failure detector's rules, one by one: whom it asks, when it doubts itself, what it takes for
proof. Crowds, partitions and waves are in `tests/test_overlay.py`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from sim.loop import run_out
from sim.network import Network, SimPeer, cluster
from valence.protocols.config import LAN, Config
from valence.protocols.membership.members import State
from valence.protocols.wire.codec import pack_member
from valence.protocols.wire.messages import Ack, Contact, Ping, PingedFor, PingFor

Scenario = Callable[[list[SimPeer]], Awaitable[None]]


def peers(count: int, scenario: Scenario, config: Config = LAN) -> None:
    async def run() -> None:
        made = await cluster(Network(3), count, config)
        await until(lambda: all(peer.members.count == count for peer in made))
        await scenario(made)
        for peer in made:
            assert not peer.errors, peer.errors

    run_out(run())


async def until(condition: Callable[[], object], within_s: float = 60.0) -> float:
    """How long it took, in virtual seconds."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        assert loop.time() < start + within_s
        await asyncio.sleep(0.05)
    return loop.time() - start


def pings(peer: SimPeer) -> list[tuple[float, bytes]]:
    """Who pings this peer, and when."""
    seen: list[tuple[float, bytes]] = []
    answer = peer.liveness._ping

    def note(sender: Contact, message: Ping) -> Ack:
        seen.append((asyncio.get_running_loop().time(), sender.id))
        return answer(sender, message)

    peer.rpc.on(Ping, note)
    return seen


def state(of: SimPeer, to: SimPeer) -> State | None:
    member = to.members.get(of.contact.id)
    return None if member is None else State(member.state)


def test_a_peer_that_is_accused_objects_and_is_believed() -> None:
    async def scenario(made: list[SimPeer]) -> None:
        accused, judge = made[1], made[0]
        boot, incarnation = accused.members.me.boot, accused.members.me.incarnation
        judge.members.judge(accused.contact.id, State.SUSPECT, 0.0)
        assert state(accused, judge) is State.SUSPECT
        await until(lambda: state(accused, judge) is State.ALIVE, LAN.suspicion_s + 1)
        assert accused.members.me.boot == boot
        assert accused.members.me.incarnation == incarnation + 1
        await until(lambda: all(state(accused, peer) is State.ALIVE for peer in made))

    peers(4, scenario)


def test_a_suspect_that_says_nothing_is_dead_when_its_time_is_over_and_not_before() -> None:
    async def scenario(made: list[SimPeer]) -> None:
        await made[1].crash()
        await until(lambda: state(made[1], made[0]) is not State.ALIVE)
        suspected_s = await until(lambda: state(made[1], made[0]) is State.DEAD)
        assert suspected_s >= 0.9 * LAN.suspicion_s
        await until(lambda: all(state(made[1], p) is State.DEAD for p in made if p is not made[1]))

    peers(4, scenario)


def test_an_old_rumour_does_not_bring_a_newer_belief_back() -> None:
    async def scenario(made: list[SimPeer]) -> None:
        gone = made[1].members.me
        await made[1].crash()
        await until(lambda: state(made[1], made[0]) is State.DEAD)
        for stale in (gone, gone._replace(state=State.SUSPECT)):
            made[0].members.hear((pack_member(stale),), 100.0)
            assert state(made[1], made[0]) is State.DEAD
        made[0].members.hear((pack_member(gone._replace(boot=gone.boot + 1)),), 100.0)
        assert state(made[1], made[0]) is State.ALIVE, "it was started anew"

    peers(4, scenario)


@pytest.mark.parametrize(
    ("done", "expected"),
    [("nothing", (True, False)), ("cut", (False, False)), ("closed", (False, True))],
)
def test_a_helper_says_what_it_has_seen_of_a_third_one(
    done: str, expected: tuple[bool, bool]
) -> None:
    async def scenario(made: list[SimPeer]) -> None:
        asker, helper, target = made[:3]
        if done == "cut":
            target.network.cut.add(target.contact.id)
        if done == "closed":
            target.network.closed.add(target.contact.id)  # its host says that nobody listens
            await target.close()
        message = PingFor(target=target.contact)
        answer = await asker.rpc.call(helper.contact, message, PingedFor, 5.0)
        assert (answer.alive, answer.refused) == expected

    peers(4, scenario)


def test_what_has_given_work_to_a_peer_pings_it_every_other_second() -> None:
    async def scenario(made: list[SimPeer]) -> None:
        home, worker = made[0], made[1]
        seen = pings(worker)
        await asyncio.sleep(60.0)
        quiet = sum(1 for _, who in seen if who == home.contact.id)
        home.liveness.watched = lambda: [worker.contact.id]
        home.liveness.stir()
        seen.clear()
        await asyncio.sleep(60.0)
        watched = [at for at, who in seen if who == home.contact.id]
        assert len(watched) >= 25 > 2 * quiet
        gaps = [b - a for a, b in itertools.pairwise(watched)]
        assert max(gaps) < 4 * LAN.probe_s

    peers(12, scenario)


def test_a_quiet_cluster_says_less_and_a_change_wakes_it() -> None:
    async def scenario(made: list[SimPeer]) -> None:
        seen = [pings(peer) for peer in made[:5]]

        async def rate(during_s: float) -> float:
            for some in seen:
                some.clear()
            await asyncio.sleep(during_s)
            return sum(map(len, seen)) / (5 * during_s)

        await asyncio.sleep(2 * LAN.probe_quiet_after_s)
        quiet = await rate(100.0)
        assert quiet <= 1.5 / LAN.probe_quiet_s
        await made[-1].crash()
        await until(lambda: state(made[-1], made[0]) is State.DEAD)
        assert await rate(0.8 * LAN.probe_quiet_after_s) > 1.5 * quiet

    peers(6, scenario)


def test_a_peer_whose_own_pings_fail_doubts_itself_before_it_accuses_others() -> None:
    """It hears nobody for a while, as if its own network were gone: the first to be suspected by it
    are suspected later than by a peer that hears all others."""

    async def first_suspicion(deaf: bool) -> float:
        made = await cluster(Network(3), 8)
        await until(lambda: all(peer.members.count == 8 for peer in made))
        me, others = made[0], made[1:]
        gone = others if deaf else others[:1]
        start = asyncio.get_running_loop().time()
        me.network.cut |= {peer.contact.id for peer in gone}
        for peer in gone:
            me.liveness.suspect(peer.contact)
        await until(lambda: State.DEAD in {state(peer, me) for peer in gone}, 120.0)
        return asyncio.get_running_loop().time() - start

    sure = run_out(first_suspicion(False))
    doubtful = run_out(first_suspicion(True))
    assert doubtful > 1.3 * sure


def test_late_timers_of_its_own_make_a_peer_patient() -> None:
    async def scenario(made: list[SimPeer]) -> None:
        liveness = made[0].liveness
        assert liveness._patience() == 1.0
        liveness._late(1.0)
        assert liveness._patience() > 2.0
        assert liveness._interval_s() > 1.5 * LAN.probe_s
        for _ in range(30):
            liveness._late(0.0)
        assert liveness._patience() < 1.2, "and it comes back to itself"

    peers(3, scenario)


def test_views_that_differ_come_together_by_their_digests_alone() -> None:
    """A peer that missed all rumours: gossip is off, and pings tell only that something differs."""
    silent = replace(LAN, gossip_per_ping=1, gossip_per_message=1)

    async def scenario(made: list[SimPeer]) -> None:
        network, late = made[0].network, made[-1]
        others = made[:-2]
        network.cut_links |= {(p.contact.id, late.contact.id) for p in made} | {
            (late.contact.id, p.contact.id) for p in made
        }
        await made[-2].crash()
        await until(lambda: all(state(made[-2], p) is State.DEAD for p in others))
        await asyncio.sleep(60.0)
        network.cut_links.clear()
        await until(
            lambda: (
                all(late.members.digest == p.members.digest for p in others)
                and state(late, made[0]) is State.ALIVE
            ),
            300.0,
        )
        assert state(made[-2], late) in (State.DEAD, None)

    peers(8, scenario, silent)
