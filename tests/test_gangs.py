"""Tasks that need several peers at once: all or none, none waits for another in a circle."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.host import Host
from sim.loop import run
from sim.network import Network
from tests.conftest import Cluster, wait_for
from valence.protocols.capacity.admission import Admission
from valence.protocols.config import LAN
from valence.protocols.engine.gangs import mend
from valence.protocols.engine.run import Run
from valence.protocols.wire.entries import (
    AttemptsLost,
    AttemptsStarted,
    StartedAttempt,
    TasksReopened,
    TasksSkipped,
)
from valence.protocols.wire.messages import Capacity, GangTag, Needs, Room, Traits
from valence.workflow import document
from valence.workflow.problems import DocumentError

ONE = Needs(Capacity(millicores=1000))
CORE = Capacity(millicores=1000, memory_bytes=2**30)


def room(id: int, since: float, hold: bool = True) -> Room:
    return Room(ONE, 1, hold=hold, gang=GangTag(since, id))


# --------------------------------------------------------------------------- documents


def test_a_task_for_several_peers_is_a_task_for_each_of_them() -> None:
    found = document.parse(
        "name: g\ntasks:\n"
        "  before: {command: 'true', outputs: [mesh]}\n"
        "  solve: {peers: 3, command: 'solve {rank}', inputs: [mesh], outputs: ['part.{rank}']}\n"
        "  after: {command: 'true', inputs: [part.1]}\n"
        "  sweep: {foreach: [x], peers: 2, command: 'true', after: [after]}\n"
    )
    gang = tuple(f"solve[rank={rank}]" for rank in range(3))
    assert [found.tasks[name].command for name in gang][2] == (
        "bash",
        "-euo",
        "pipefail",
        "-c",
        "solve 2",
    )
    assert all(found.tasks[name].gang == gang for name in gang)
    assert found.parents["solve[rank=2]"] == ("before",)
    assert found.parents["after"] == gang  # only all of it has made what others wait for
    assert found.tasks["sweep[x,rank=1]"].gang == ("sweep[x,rank=0]", "sweep[x,rank=1]")


def test_edges_between_gangs_are_counted_before_they_are_made() -> None:
    text = (
        "name: e\ntasks:\n"
        "  a: {foreach: 256, command: 'true'}\n"
        "  g: {foreach: 60, peers: 256, command: 'true', after: ['a[{rank}]']}\n"
    )
    with pytest.raises(DocumentError, match="more than 2,000,000 edges"):
        document.parse(text)


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        ("peers: 0, command: 'true'", "/tasks/t/peers"),
        ("peers: 300, command: 'true'", "/tasks/t/peers"),
        ("peers: 2, call: 'operator:mul'", "only a command can run on several peers"),
        ("peers: 2, command: 'true', outputs: [x]", "is already made by t[rank=0]"),
        (
            "peers: 2, command: 'true', inputs: ['x.0'], outputs: ['x.{rank}']",
            "they run at the same time",
        ),
        ("peers: 2, command: 'true', foreach: {rank: [1]}", "choose another name"),
    ],
)
def test_what_can_not_run_at_once_is_refused_by_name(task: str, problem: str) -> None:
    with pytest.raises(DocumentError) as found:
        document.parse(f"name: g\ntasks:\n  t: {{{task}}}\n")
    assert problem in str(found.value)


# --------------------------------------------------------------------------- a peer's door


def door(cores: int = 1) -> Admission:
    return Admission(Capacity(1000 * cores, 2**30), Traits(), LAN)


def busy(admission: Admission, count: int = 1) -> None:
    for lease in admission.reserve(b"x", Room(ONE, count), 0.0).leases:
        assert admission.commit(b"x", lease, f"single {lease}", 0.0) == "run"


def test_a_gang_that_holds_keeps_what_comes_free() -> None:
    admission = door()
    busy(admission)
    assert admission.reserve(b"a", room(1, 0.0, hold=False), 0.1).held is False
    assert admission.reserve(b"a", room(1, 0.0), 0.1).held is True
    admission.release("single 1")
    assert admission.reserve(b"x", Room(ONE, 1), 0.2).leases == (), "nobody overtakes it"
    assert admission.meet_gangs(0.3) == [b"a"]
    lease = admission.reserve(b"a", room(1, 0.0), 0.4).leases[0]
    assert admission.commit(b"a", lease, "rank 0", 0.5) == "run"
    admission.sanity_check()


def test_renewed_a_lease_lives_on_and_else_it_expires_with_its_hold() -> None:
    admission = door()
    lease = admission.reserve(b"a", room(1, 0.0), 0.0).leases[0]
    assert admission.reserve(b"a", room(1, 0.0), 4.0).leases == (lease,)
    assert admission.commit(b"a", lease, "rank 0", 8.0) == "run"
    assert admission.reserve(b"b", room(2, 1.0), 8.0).held
    assert admission.reserve(b"x", Room(ONE, 1), 9.0).leases == ()
    admission.release("rank 0")
    admission.expire(14.0)  # the home of the second one has said nothing more
    assert len(admission.reserve(b"x", Room(ONE, 1), 14.0).leases) == 1


def test_the_older_gang_has_it_unless_the_younger_has_begun() -> None:
    admission = door()
    young = admission.reserve(b"b", room(7, since=20.0), 0.0).leases[0]
    old = admission.reserve(b"a", room(9, since=10.0), 0.1).leases[0]
    assert admission.commit(b"b", young, "rank 0", 0.2) == "the lease has expired"
    assert admission.reserve(b"b", room(7, since=20.0), 0.3).leases == ()
    assert admission.commit(b"a", old, "rank 0", 0.4) == "run"
    assert admission.reserve(b"c", room(1, since=1.0), 0.5).leases == (), "what runs, runs"
    admission.sanity_check()


def test_a_home_that_dies_or_wants_nothing_more_keeps_nobody_waiting() -> None:
    admission = door()
    busy(admission)
    admission.reserve(b"a", room(1, 0.0), 0.0)
    admission.reserve(b"b", room(1, 0.0), 0.0)
    admission.give_back(b"a", (), (1,))
    assert admission.forsake(b"b")
    admission.release("single 1")
    assert len(admission.reserve(b"x", Room(ONE, 1), 0.1).leases) == 1


def test_the_oldest_is_never_kept_out_by_a_crowd_of_younger_ones() -> None:
    admission = door()
    busy(admission)
    for n in range(LAN.gangs_max):
        assert admission.reserve(b"b", room(n, since=100.0 + n), 0.1).held
    assert not admission.reserve(b"c", room(1, since=500.0), 0.2).held, "the youngest is refused"
    assert admission.reserve(b"a", room(1, since=1.0), 0.3).held
    admission.release("single 1")
    assert admission.meet_gangs(0.4) == [b"a"]
    assert len(admission._gangs) == LAN.gangs_max


def test_a_gang_that_gives_its_lease_back_keeps_nobody_waiting() -> None:
    admission = door()
    lease = admission.reserve(b"a", room(1, 0.0), 0.0).leases[0]
    admission.give_back(b"a", (lease,))
    assert len(admission.reserve(b"x", Room(ONE, 1), 0.1).leases) == 1


def test_one_that_was_robbed_and_took_its_lease_for_granted_goes() -> None:
    admission = door()
    robbed = admission.reserve(b"b", room(7, since=20.0), 0.0).leases[0]
    lease = admission.reserve(b"a", room(9, since=10.0), 0.1).leases[0]
    assert admission.commit(b"b", robbed, "rank 0", 0.2) == "the lease has expired"
    assert admission.commit(b"a", lease, "rank 1", 0.3) == "run"
    admission.release("rank 1")
    assert admission.meet_gangs(0.4) == [], "its home gathers anew, under another number"


@given(st.data())
def test_whatever_gangs_do_nothing_is_booked_twice(data: st.DataObject) -> None:
    admission = door(cores=3)
    now, units, leases = 0.0, 0, [(b"x", 0)]
    for _ in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.floats(0.0, 2.0))
        home = data.draw(st.sampled_from((b"a", b"b", b"c")))
        id = data.draw(st.integers(1, 3))
        what = data.draw(st.sampled_from(("gang", "single", "commit", "end", "back", "dies")))
        if what == "gang":
            found = admission.reserve(home, room(id, float(id), data.draw(st.booleans())), now)
            leases += [(home, lease) for lease in found.leases]
        elif what == "single":
            found = admission.reserve(home, Room(ONE, id, 0.1, queue=data.draw(st.booleans())), now)
            leases += [(home, lease) for lease in found.leases]
        elif what == "commit":
            units += 1
            admission.commit(*data.draw(st.sampled_from(leases)), units, now)
        elif what == "end":
            admission.release(data.draw(st.integers(0, units)))
            admission.starts(now)
            admission.meet_gangs(now)
        elif what == "back":
            admission.give_back(home, (data.draw(st.sampled_from(leases))[1],), (id,))
        else:
            admission.forsake(home)
        admission.sanity_check()
    for unit in range(units + 1):
        admission.release(unit)
    admission.expire(now + 60.0)
    for unit in [*admission.queued_units()]:
        admission.release(unit)
    assert admission.free == admission.capacity, "in the end all of it is free again"


# --------------------------------------------------------------------------- of one mind


def states(*found: str) -> tuple[Run, tuple[str, ...]]:
    workflow = document.parse(f"name: g\ntasks:\n  t: {{peers: {len(found)}, command: 'true'}}\n")
    whole = Run("w", workflow, 0.0, b"home")
    gang = tuple(workflow.tasks)
    begun = (StartedAttempt(task, 1, bytes([rank]) * 20, 1) for rank, task in enumerate(gang))
    whole.apply(AttemptsStarted(attempts=tuple(begun), placement={}), 0.0, 1)
    for task, state in zip(gang, found, strict=True):
        whole._set(whole.tasks[task], state)
    return whole, gang


def test_ranks_that_fail_in_turns_use_up_their_retries() -> None:
    whole, gang = states("succeeded", "retrying")
    for task in gang:
        whole.tasks[task].failures = 1
    reopened = tuple(mend(whole, gang).reopened)
    whole.apply(TasksReopened(tasks=reopened, gang=True), 1.0, 1)
    assert [whole.tasks[task].failures for task in gang] == [1, 1]


@pytest.mark.parametrize(
    ("before", "lost", "reopened", "skipped"),
    [
        (("running", "running", "succeeded"), 0, 0, 0),
        (("succeeded", "succeeded", "succeeded"), 0, 0, 0),
        (("retrying", "retrying", "waiting"), 0, 0, 0),
        (("retrying", "running", "succeeded"), 1, 1, 0),
        (("waiting", "succeeded", "succeeded"), 0, 2, 0),
        (("failed", "running", "succeeded"), 0, 0, 1),
        (("skipped", "retrying", "pending"), 0, 0, 2),
        (("cancelled", "cancelled", "cancelled"), 0, 0, 0),
    ],
)
def test_a_gang_is_of_one_mind(
    before: tuple[str, ...], lost: int, reopened: int, skipped: int
) -> None:
    whole, gang = states(*before)
    found = mend(whole, gang)
    assert (len(found.lost), len(found.reopened), len(found.skipped)) == (lost, reopened, skipped)
    whole.apply(AttemptsLost(attempts=tuple(found.lost)), 1.0, 1)
    whole.apply(TasksReopened(tasks=tuple(found.reopened)), 1.0, 1)
    whole.apply(TasksSkipped(tasks=tuple(found.skipped)), 1.0, 1)
    assert mend(whole, gang).lost == mend(whole, gang).reopened == [], "once is enough"


# --------------------------------------------------------------------------- whole peers


async def hosts(count: int) -> list[Host]:
    network = Network(1)
    found: list[Host] = []
    for index in range(count):
        host = Host(network, index, LAN, CORE, 0.0)
        host.start([other.peer.contact for other in found])
        found.append(host)
    await until(lambda: all(host.peer.members.count == count for host in found))
    return found


async def until(done: Callable[[], bool], limit_s: float = 60.0) -> float:
    """How long that took."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not done():
        assert loop.time() < start + limit_s, "it never comes to that"
        await asyncio.sleep(0.05)
    return loop.time() - start


async def submit(host: Host, tasks: dict[str, Any], strategy: str = "probe") -> str:
    text = json.dumps({"name": "g", "strategy": strategy, "tasks": tasks}).encode()
    found = await host.do(host.enactment.gateway.submit(text, {}, "somebody", False), 15.0)
    assert found is not None
    return found[0]


def state(host: Host, id: str) -> str:
    found = host.enactment.home.remembered(id)
    return found.state if found is not None else ""


@pytest.mark.parametrize("strategy", ["probe", "tickets"])
def test_gangs_that_each_want_all_peers_do_not_wait_for_each_other(strategy: str) -> None:
    async def scene() -> None:
        peers = await hosts(4)
        rng = random.Random(strategy)
        ids = []
        for host in peers:  # four of them at once, and a stream of small ones beside
            gang = {"peers": 4, "command": ["work", "0.5"]}
            small = {"foreach": 30, "command": ["work", "0.2"]}
            ids.append((host, await submit(host, {"gang": gang}, strategy)))
            ids.append((host, await submit(host, {"small": small}, strategy)))
            await asyncio.sleep(rng.random() / 10)
        await until(lambda: all(state(*one) == "succeeded" for one in ids))
        for host, id in ids:
            whole = host.enactment.home.remembered(id)
            assert whole is not None
            attempts = [t.attempts[-1] for t in whole.tasks.values() if "rank" in t.id]
            assert len({a.peer for a in attempts}) == len(attempts), "each at a peer of its own"
            assert len({a.at for a in attempts}) <= 1, "all at once"

    run(scene())


def test_a_gang_too_large_for_the_cluster_says_so_and_keeps_nothing() -> None:
    async def scene() -> None:
        peers = await hosts(3)
        id = await submit(peers[0], {"gang": {"peers": 4, "command": ["work", "1"]}})
        await asyncio.sleep(10.0)
        home = peers[0].enactment.home
        whole = home.remembered(id)
        assert whole is not None
        reason = home.waiting_for(whole, whole.tasks["gang[rank=0]"])
        assert reason == "needs 4 peers at once: only 3 of 3 are suitable"
        assert all(host.enactment.admission.free == CORE for host in peers)
        late = Host(peers[0]._network, 3, LAN, CORE, 0.0)
        late.start([peers[0].peer.contact])
        assert await until(lambda: state(peers[0], id) == "succeeded") < 10.0

    run(scene())


def test_if_one_dies_all_begin_anew_and_only_results_of_one_round_count() -> None:
    async def scene() -> None:
        peers = await hosts(5)
        tasks = {
            "gang": {"peers": 3, "command": ["work", "3"], "outputs": ["small.{rank}"]},
            "after": {"command": ["work", "0.1"], "inputs": ["small.*"]},
        }
        id = await submit(peers[0], tasks)
        home = peers[0].enactment.home
        whole = home.remembered(id)
        assert whole is not None
        ranks = [whole.tasks[f"gang[rank={rank}]"] for rank in range(3)]
        await until(lambda: all(task.state == "running" for task in ranks))
        await asyncio.sleep(1.0)
        others = [host for host in peers[1:] if host.id in {t.attempts[0].peer for t in ranks}]
        others[0]._network.cut.add(others[0].id)
        await until(lambda: whole.state == "succeeded")
        assert all(task.number == 2 for task in ranks), "those that had a result, too"
        assert "lost" in {task.attempts[0].state for task in ranks}
        assert len({task.attempts[-1].at for task in ranks}) == 1
        assert whole.tasks["after"].number == 1

    run(scene())


def test_a_gang_does_not_wait_for_one_long_task_when_others_are_free() -> None:
    async def scene() -> None:
        peers = await hosts(4)
        long = [await submit(host, {"long": {"command": ["work", "30"]}}) for host in peers]
        end = asyncio.get_running_loop().time() + 8.0
        gang = await submit(peers[0], {"gang": {"peers": 2, "command": ["work", "0.1"]}})
        await until(lambda: asyncio.get_running_loop().time() > end)  # it holds by now
        for host, id in zip(peers[1:3], long[1:3], strict=True):
            await host.do(host.enactment.gateway.ask("", id, "cancel"), 5.0)
        assert await until(lambda: state(peers[0], gang) == "succeeded") < 10.0

    run(scene())


def test_a_rank_whose_gang_was_given_up_does_not_run_for_ever() -> None:
    """Cut off, given up and healed: nothing tells it so, but it asks."""

    async def scene() -> None:
        peers = await hosts(5)
        network = peers[0]._network
        id = await submit(peers[0], {"gang": {"peers": 2, "command": ["work", "500"]}})
        whole = peers[0].enactment.home.remembered(id)
        assert whole is not None
        ranks = list(whole.tasks.values())
        await until(lambda: all(task.state == "running" for task in ranks))
        first = {task.attempts[0].peer for task in ranks}
        cut = next(host for host in peers[1:] if host.id in first)
        await until(lambda: bool(cut.workshop.running))  # it has heard of it
        network.cut.add(cut.id)
        await until(lambda: all(task.number == 2 and task.state == "running" for task in ranks))
        assert cut.workshop.running
        second = {task.attempts[-1].peer for task in ranks}
        assert cut.id not in second
        network.cut.discard(cut.id)
        await until(lambda: not cut.workshop.running, 120.0)
        assert all(task.number == 2 and task.state == "running" for task in ranks)

    run(scene())


def test_a_rank_that_fails_because_another_was_lost_costs_no_retry() -> None:
    async def scene() -> None:
        peers = await hosts(4)
        network = peers[0]._network
        id = await submit(peers[0], {"gang": {"peers": 2, "command": ["work", "2"]}})
        whole = peers[0].enactment.home.remembered(id)
        assert whole is not None
        ranks = list(whole.tasks.values())
        await until(lambda: all(task.state == "running" for task in ranks))
        hit, lost = sorted(ranks, key=lambda task: task.attempts[0].peer != peers[0].id)
        found = {host.id: host for host in peers}
        found[hit.attempts[0].peer].workshop.failing = 1.0  # as by a broken connection
        network.cut.add(lost.attempts[0].peer)
        await until(lambda: hit.number == 2, 60.0)
        found[hit.attempts[0].peer].workshop.failing = 0.0
        assert hit.failures == 0
        await until(lambda: whole.state == "succeeded", 60.0)

    run(scene())


def test_a_live_gang_knows_its_hosts_and_outlives_a_killed_peer(
    own_cluster: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Three processes that talk to each other by files in a directory that they share."""
    live = own_cluster(4)
    meet = tmp_path / "meet"
    meet.mkdir()
    script = (
        f"echo here > {meet}/$VALENCE_RANK.$$; "
        f"while [ $(ls {meet} | cut -d. -f1 | sort -u | wc -l) -lt $VALENCE_PEERS ]; "
        "do sleep 0.05; done; sleep 2; echo $VALENCE_RANK $VALENCE_PEERS $VALENCE_HOSTS > out.{rank}"
    )
    task = {"peers": 3, "command": script, "outputs": ["out.{rank}"]}
    workflow = live.client().submit({"name": "gang", "tasks": {"t": task}})
    wait_for(lambda: len({path.name[0] for path in meet.iterdir()}) == 3)
    ranks = [f"t[rank={rank}]" for rank in range(3)]
    at = [workflow.task(rank)["history"][0]["peer"] for rank in ranks]
    assert len(set(at)) == 3
    accepting = live.peers()[0]["id"]
    live.kill(next(peer for peer in at if peer != accepting))
    assert workflow.wait() == "succeeded"
    texts = [workflow.read(f"out.{rank}").decode().split() for rank in range(3)]
    assert [text[0] for text in texts] == ["0", "1", "2"]
    assert all(text[1] == "3" and text[2].count(",") == 2 for text in texts)
    assert all(workflow.task(rank)["attempts"] == 2 for rank in ranks)
