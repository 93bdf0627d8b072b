"""Simulated disasters: a share of what `make soak` runs, and what the simulator itself must do."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sim.loop import run_out
from sim.mutants import MUTANTS, SEEN_BY, applied
from sim.plan import FAULTS, Plan
from sim.world import World
from valence.protocols.consensus.keeping import Leadership
from valence.protocols.consensus.membership_change import MembershipChange
from valence.protocols.consensus.replica import Replica, next_epoch
from valence.protocols.engine.answers import ApiError
from valence.protocols.engine.placements import Placements
from valence.protocols.engine.run import Run
from valence.protocols.strategies.base import Placed
from valence.protocols.wire.entries import Ended, KeepersChosen, Submitted
from valence.protocols.wire.messages import Candidacy, Contact, Elect, Entry, Keep, Kept, Slice

SEEDS, PARTS = 200, 4  # side by side


def simulate(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sim", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )


async def until(condition: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + 60.0
    while not condition():
        assert loop.time() < end
        await asyncio.sleep(0.01)


@pytest.mark.long
@pytest.mark.timeout(260)
@pytest.mark.parametrize("part", range(PARTS))
def test_two_hundred_disasters_break_no_rule(part: int) -> None:
    count = SEEDS // PARTS
    done = simulate("--seed", str(1 + part * count), "--seeds", str(count), "--jobs", "1")
    assert f"{count} runs, 0 violations" in done.stdout, done.stdout[-3000:]
    assert done.returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        # a watcher had seen more of a line that did not hold than there is of the one that does
        "--seed 104 --majority-lost 10",
        # a keeper forgot which journal had broken off, and elected a copy that lacked its end
        "--seed 960126 --peers 6 --seconds 120 --every-s 1.5 --slice-bytes 1",
        # a keeper with half of an acknowledged submission is cut off
        "--seed 1 --majority-lost 10 --slice-bytes 1 --every-s 2 --peers 4 --faults halve",
    ],
)
def test_what_went_wrong_once_does_not_again(arguments: str) -> None:
    done = simulate(*arguments.split(), "--whole")
    assert done.returncode == 0, done.stdout[-2000:]


def test_a_run_is_its_seed() -> None:
    first, second = simulate("--seed", "7"), simulate("--seed", "7")
    assert first.stdout == second.stdout
    assert first.returncode == 0
    assert "acknowledges" in first.stdout
    assert simulate("--seed", "8").stdout != first.stdout


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "mutant",
    [
        "one-copy-is-a-majority",
        "copies-that-are-behind-get-votes",
        "results-are-used-before-they-count",
        "a-second-result-counts-too",
        "calls-are-carried-out-again",
    ],
)
def test_a_broken_rule_is_noticed_and_can_be_replayed(mutant: str) -> None:
    """All of them: `make soak`."""
    done = simulate("--seed", "1", "--seeds", "40", "--mutant", mutant, "--first")
    assert done.returncode == 1
    command = re.search(r"replay it: python -m (sim .*)", done.stdout)
    assert command is not None
    assert f"--mutant {mutant}" in command[1]
    again = simulate(*command[1].split()[1:], "--whole")
    assert again.returncode == 1
    assert "VIOLATION" in again.stdout


def test_a_violation_is_told_by_a_shorter_run() -> None:
    for seed in range(1, 40):  # one in which something happens before it goes wrong
        small = ("--seconds", "25", "--workflows", "2")
        arguments = ("--seed", str(seed), "--mutant", "one-copy-is-a-majority", *small)
        whole = simulate(*arguments, "--whole")
        if whole.returncode and len(whole.stdout.splitlines()) > 25:
            break
    short = simulate(*arguments)
    assert whole.returncode == short.returncode == 1
    assert len(short.stdout.splitlines()) < len(whole.stdout.splitlines())
    command = short.stdout.rpartition("replay it: python -m sim ")[2].split()
    assert "VIOLATION" in simulate(*command, "--whole").stdout


def test_ended_journals_outlive_all_their_first_keepers() -> None:
    """Half of the peers are replaced every minute; at the end every workflow has its copies."""
    arguments = ["--seeds", "4", "--peers", "12", "--seconds", "90", "--faults", "none"]
    done = simulate(*arguments, "--replaced", "0.5", "--keepers", "5", "--majority-lost", "30")
    assert "4 runs, 0 violations" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize("restarted", [False, True])
def test_an_ended_journal_gets_its_keepers_when_one_of_a_lost_majority_is_back(
    restarted: bool,
) -> None:
    """Seed 4692: nobody could change its keepers when it was looked at, so it stayed with two until
    it was looked at the next time; one of them died before that."""

    async def scenario() -> None:
        world = World(Plan(5, peers=7, faults=()))
        world._config = replace(world._config, archive_s=900.0)
        for _ in range(7):
            world.add_host()
        await world._until(world._all_know_all, 60.0, "the peers never found each other")
        home = world.hosts[4]
        text = json.dumps({"name": "w", "tasks": {"t": {"command": ["work", "1"]}}}).encode()
        submitted = home.enactment.gateway.submit(text, {}, "somebody", False)
        id, _ = await home.do(submitted, 10.0)
        await until(lambda: not any(host.enactment.keeping.replicas for host in world.up()))
        first, second, third = home.enactment.keeping.storage.replica(id).keepers
        hosts = {host.id: host for host in world.hosts}
        for lost in (second, third):
            hosts[lost].kill()
        if restarted:
            await asyncio.sleep(150.0)  # nobody tells it any more that they were ever here
            hosts[first].kill()
            await asyncio.sleep(1.0)
            world.start(hosts[first])
        await asyncio.sleep(30.0)  # it is looked at, and there is no majority
        world.start(hosts[second])
        await asyncio.sleep(10.0)
        keepers = hosts[first].enactment.keeping.storage.replica(id).keepers
        assert len(keepers) == 3
        assert third not in keepers
        copies = [host.enactment.keeping.copy(id) for host in world.up()]
        assert sum(copy is not None for copy in copies) == 3

    run_out(scenario())


def test_who_asks_between_two_homes_is_not_told_that_there_is_no_such_workflow() -> None:
    async def scenario() -> None:
        world = World(Plan(5, peers=9, faults=()))
        for _ in range(9):
            world.add_host()
        await world._until(world._all_know_all, 60.0, "the peers never found each other")
        text = json.dumps({"name": "w", "tasks": {"t": {"command": ["work", "3"]}}}).encode()
        home = world.hosts[4]
        submitted = home.enactment.gateway.submit(text, {}, "somebody", False)
        id, _ = await home.do(submitted, 10.0)
        keepers = home.enactment.keeping.replicas[id].keepers
        home.kill()
        other = next(host for host in world.up() if host.id not in keepers)
        view = await other.do(other.enactment.gateway.ask("", id, "workflow"), 60.0)
        assert view["id"] == id
        assert view["home"] != home.id.hex()

    run_out(scenario())


def test_a_workflow_that_is_over_at_once_is_not_taken_for_lost() -> None:
    """Memory lets go of it when the disk knows of its end, not a moment before: who submitted it
    would be told to submit it again."""

    async def scenario() -> None:
        world = World(Plan(5, peers=1, faults=()))
        host = world.add_host()
        await asyncio.sleep(1.0)
        enactment = host.enactment
        hears, waits = enactment.keeping.on_committed, []

        def committed(workflow: str) -> None:
            hears(workflow)
            copy, lead = (
                d.get(workflow) for d in (enactment.keeping.replicas, enactment.keeping.leads)
            )
            if copy is not None and lead is not None and copy.over:
                enactment.membership_change._tend(
                    copy, lead
                )  # as if another journal had just called it
                waits.append(asyncio.ensure_future(enactment.keeping.kept(workflow)))

        enactment.keeping.on_committed = committed
        text = json.dumps({"name": "w", "tasks": {"t": {"command": ["work", "1"]}}}).encode()
        await host.do(enactment.gateway.submit(text, {}, "somebody", False), 10.0)
        await asyncio.sleep(5.0)
        assert waits
        for kept in waits:
            await kept
        assert not enactment.keeping.leads, "and it is let go of in the end"

    run_out(scenario())


def test_what_is_put_away_of_a_failed_submission_takes_no_later_one_with_it() -> None:
    """The disk is full, a submission is refused; then there is room, and it is submitted again with
    the same key while what was left of the first is still on its way from the disk."""

    async def scenario() -> None:
        world = World(Plan(5, peers=1, faults=()))
        host = world.add_host()
        await asyncio.sleep(1.0)
        gateway = host.enactment.gateway
        text = json.dumps({"name": "w", "tasks": {"t": {"command": ["work", "30"]}}}).encode()

        async def submit() -> tuple[str, bool]:
            return await host.do(gateway.submit(text, {"idempotency": "k"}, "me", False), 10.0)

        host.database.full = True
        with pytest.raises(ApiError) as refused:
            await submit()
        assert refused.value.status == 507
        host.database.full = False
        for _ in range(100):
            try:
                id, _ = await submit()
                break
            except ApiError as problem:
                assert problem.status == 503
                await asyncio.sleep(0.01)
        await asyncio.sleep(2.0)
        kinds = [kind for (kind,) in host.database.read(
            "select kind from entries where workflow = ? order by seq", (id,)
        )]  # fmt: skip
        assert kinds[:2] == ["keepers", "submitted"]

    run_out(scenario())


def test_a_promise_that_is_not_on_disk_yet_is_not_forgotten_with_an_ended_copy() -> None:
    """Seed 3049: memory let go of a journal that was over, and with it of a promise on its way to a
    slow disk; the home before was believed once more, and two counted different entries."""

    async def scenario() -> None:
        world = World(Plan(5, peers=1, faults=()))
        host = world.add_host()
        host.database.sync_s = 0.1
        keeping, elections = host.enactment.keeping, host.enactment.elections
        first, second = (Contact(bytes([n]) * 20, "10.9.9.9", 7000) for n in (1, 2))
        said = (
            KeepersChosen(keepers=(first.id, second.id, host.id)),
            Submitted(name="w", owner="me", tasks=1, options="{}", zipped=False, document=b"{}"),
            Ended(state="succeeded", reason=""),
        )
        epoch = next_epoch(0, first.id)
        entries = tuple(Entry(n, epoch, 0.0, one.kind, one.packed()) for n, one in enumerate(said))

        def keep(sender: Contact) -> asyncio.Task[Kept]:
            whole = Slice("w1", epoch, 0, 0, 3, entries)
            return asyncio.ensure_future(keeping._keep(sender, Keep.of((whole,))))

        one = keep(first)
        await asyncio.sleep(0.01)
        higher = Candidacy("w1", next_epoch(epoch, second.id), 3, epoch, False, epoch)
        vote = asyncio.ensure_future(elections._elect(second, Elect(candidacies=(higher,))))
        assert not (await one).stored[0].refusal
        assert not vote.done(), "its promise is not on the disk yet"
        late = keep(first)
        assert (await vote).votes[0].granted
        assert (await late).stored[0].refusal == "epoch"

    run_out(scenario())


def test_a_home_that_stands_for_election_is_not_followed_any_more() -> None:
    """Seed 487 with five keepers: an entry of a home that had fallen came late, after its host was
    back; all followed it, it was there, and its copy was too old to be elected."""

    async def scenario() -> None:
        world = World(Plan(5, peers=2, faults=()))
        home, keeper = world.add_host(), world.add_host()
        await asyncio.sleep(2.0)
        epoch = next_epoch(0, home.id)
        replica = Replica("w1", promised=epoch, count=4, starts=[(0, epoch)], home=home.id)
        replica.configs = [(0, (home.id, keeper.id))]
        keeper.enactment.keeping.replicas["w1"] = replica
        asked = Candidacy("w1", next_epoch(epoch, home.id), 2, epoch, True, epoch)
        vote = keeper.enactment.elections._vote(home.id, asked, [])
        assert not vote.granted
        assert not replica.home, "and so the others stand themselves"
        assert "w1" in keeper.enactment.elections._due

    run_out(scenario())


def test_who_was_asked_in_and_can_not_keep_a_journal_is_left_out_again() -> None:
    """Seed 3524: a lone keeper asked in a second, which had another journal of that name; the two
    of them never agreed on anything any more."""
    a, b, c, x = (bytes([n]) * 20 for n in range(4))
    replica = Replica("w", count=6, starts=[(0, 1 << 32)], committed=5)
    replica.configs = [(0, (a, b, c)), (5, (a, b, c, x))]
    lead = Leadership(1 << 32)
    here = {a, b, c, x}
    membership_change = MembershipChange.__new__(MembershipChange)
    membership_change._keeping = SimpleNamespace(members=SimpleNamespace(is_here=here.__contains__))  # type: ignore[assignment]
    assert membership_change._undone(replica, lead) == (), "it may still answer"
    lead.strangers.add(x)
    assert membership_change._undone(replica, lead) == (a, b, c)
    lead.strangers.clear()
    here.discard(x)
    assert membership_change._undone(replica, lead) == (a, b, c)
    replica.committed = 0
    assert membership_change._undone(replica, lead) == (), (
        "the set before may not be the one that counts"
    )
    replica.committed, replica.configs = 5, [(0, (a, b, c)), (5, (a, b))]
    assert membership_change._undone(replica, lead) == (), "one that was let go is not brought back"


def test_a_copy_that_stayed_behind_tells_nobody_that_it_is_out() -> None:
    a, b, c, d = (bytes([n]) * 20 for n in range(4))
    old = Replica("w", count=3, starts=[(0, 1 << 32)], configs=[(0, (a, b, c))], committed=3)
    stale = Candidacy("w", 9 << 32, 3, 1 << 32, True, birth=1 << 32)
    newer = Candidacy("w", 9 << 32, 7, 2 << 32, True, birth=1 << 32)
    namesake = Candidacy("w", 9 << 32, 3, 1 << 32, True, birth=2 << 32)
    assert old.excludes(d, stale), "it has all that the other has, and the set is agreed on"
    assert not old.excludes(d, newer), "the other may have been asked in since"
    assert not old.excludes(b, stale)
    assert not old.excludes(d, namesake), "of another workflow of that name it knows nothing"
    with applied("a-namesake-tells-who-is-out"):
        assert old.excludes(d, namesake)
    old.committed = 0
    assert not old.excludes(d, stale), "that set may never count"


def test_keepers_move_to_another_site_when_there_is_one() -> None:
    async def scenario() -> None:
        world = World(Plan(5, peers=3, faults=()))
        for _ in range(3):
            world.add_host()
        await world._until(world._all_know_all, 60.0, "the peers never found each other")
        home = world.hosts[0]
        text = json.dumps({"name": "w", "tasks": {"t": {"command": ["work", "200"]}}}).encode()
        submitted = home.enactment.gateway.submit(text, {}, "somebody", False)
        id, _ = await home.do(submitted, 10.0)
        view = await home.do(home.enactment.gateway.ask("", id, "workflow"), 10.0)
        assert "at one site" in view["risk"]
        world._sites = ["there"]
        far = [world.add_host().id for _ in range(2)]
        copy = home.enactment.keeping.replicas[id]
        await world._until(lambda: any(k in copy.keepers for k in far), 60.0, "none moved")
        await asyncio.sleep(10.0)
        assert len(copy.keepers) == 3
        here = [k for k in copy.keepers if k not in far]
        assert here, "not all of them"
        assert len(here) < 3
        view = await home.do(home.enactment.gateway.ask("", id, "workflow"), 10.0)
        assert "all 3 keepers" not in view["risk"]

    run_out(scenario())


def test_a_lost_majority_is_not_waited_for_for_ever() -> None:
    """Two of three keepers die at once: the third goes on, and says so."""
    done = simulate("--seed", "1", "--seeds", "10", "--faults", "perish", "--majority-lost", "20")
    assert "10 runs, 0 violations" in done.stdout, done.stdout[-3000:]
    one = simulate("--seed", "2", "--faults", "perish", "--majority-lost", "20")
    assert "dies for good" in one.stdout
    assert "forced" in one.stdout


@pytest.mark.parametrize("mutant", ["", "keys-are-answered-for-before-they-count"])
def test_a_key_is_answered_for_only_when_its_submission_is_committed(mutant: str) -> None:
    """The accepting peer has the submission on its own disk alone, and another peer is asked with the
    same key: an answer would be an acknowledgement of what may be lost with that disk. (Broken, the
    rule is seen to be: it takes more luck than a thousand random worlds have.)"""

    async def scenario() -> None:
        world = World(Plan(5, peers=5, faults=()))
        hosts = [world.add_host() for _ in range(5)]
        await until(lambda: all(host.peer.members.count == 5 for host in hosts))
        home, others = hosts[0], hosts[1:]
        text = json.dumps({"name": "w", "tasks": {"t": {"command": ["work", "1"]}}}).encode()
        options = {"idempotency": "k"}
        links = world.network.cut_links
        create = home.enactment.keeping.create

        def cut_off(*arguments: Any) -> Any:
            links.update((home.id, other.id) for other in others)
            return create(*arguments)

        home.enactment.keeping.create = cut_off  # type: ignore[method-assign]
        accepting = asyncio.ensure_future(
            home.do(home.enactment.gateway.submit(text, dict(options), "ada", False), 20.0)
        )
        replicas = home.enactment.keeping.replicas
        await until(lambda: replicas)
        [(workflow, replica)] = replicas.items()
        asker = next(other for other in others if other.id not in replica.keepers)
        links.discard((home.id, asker.id))
        submitted = asker.enactment.gateway.submit(text, dict(options), "ada", False)
        try:
            answer = await asker.do(submitted, 8.0)
        except ApiError as problem:
            assert problem.status == 503
            answer = None
        assert not accepting.done(), "and the first one was not told either"
        assert (answer is None) is not bool(mutant)
        links.clear()
        assert await accepting == (workflow, True)

    with applied(mutant):
        run_out(scenario())


@pytest.mark.parametrize("test", sorted(set(SEEN_BY.values())))
def test_a_rule_that_random_worlds_do_not_check_has_a_test(test: str) -> None:
    path, _, name = test.partition("::")
    text = Path(path).read_text()
    begin = text.index(f"def {name}(")
    body = text[max(0, begin - 200) : text.find("\ndef ", begin + 1)]
    assert any(mutant in body for mutant, seen in SEEN_BY.items() if seen == test)


def test_mutants_leave_nothing_behind() -> None:
    for name in MUTANTS:
        patches = MUTANTS[name]()
        before = [getattr(owner, attribute) for owner, attribute, _ in patches]
        with applied(name):
            assert any(
                getattr(owner, attribute) is not old
                for (owner, attribute, _), old in zip(patches, before, strict=True)
            )
        after = [getattr(owner, attribute) for owner, attribute, _ in patches]
        assert before == after


def test_a_plan_says_how_it_is_run_again() -> None:
    plan = Plan(7, peers=9, faults=FAULTS[:2], majority_lost_s=30.0)
    command = plan.command()
    assert command == ("python -m sim --seed 7 --peers 9 --faults crash,power --majority-lost 30")


def rash(self: Placements, run: Run, one: Placed) -> Any:
    """A mutant of `Placements.make_work`: whatever is there is sent along."""
    task = run.tasks[one.unit.key.task]
    missing, task.missing = task.missing, 0
    made = MAKE_WORK(self, run, one)
    task.missing = missing
    return made


MAKE_WORK = Placements.make_work


@pytest.mark.parametrize("mutant", [None, rash])
def test_what_is_made_again_while_its_reader_is_on_its_way_is_read_when_it_counts(
    mutant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader's start is being agreed on when the only holder of what it reads dies; its maker has
    run again by then, but that result is not agreed on yet."""

    async def scenario() -> str:
        world = World(Plan(5, peers=3, faults=()))
        for _ in range(3):
            world.add_host()
        await world._until(world._all_know_all, 60.0, "the peers never found each other")
        for host in world.hosts:
            host.workshop.failing = 0.0
        host = world.hosts[0]
        home, dispatch = host.enactment.home, host.enactment.home.dispatch
        send, met = dispatch._send, []

        async def late(run: Run, rows: list[Placed]) -> None:
            if not met and any(row.unit.key.task == "t1.0" for row in rows):
                met.append(run.id)
                with home.deciding(run) as decide:
                    decide.reopen([("t0.0", "its holder died")])
                while run.tasks["t0.0"].state != "succeeded":
                    await asyncio.sleep(0.0002)
                assert run.tasks["t1.0"].missing, "it does not count yet"
            await send(run, rows)

        dispatch._send = late  # type: ignore[method-assign]
        full = host.enactment.admission.capacity.millicores // 1000
        maker = {"command": ["work", "0.2"], "outputs": ["small.0.0"]}
        reader = {"command": ["work", "0.2"], "inputs": ["small.0.0"], "outputs": ["small.1.0"]}

        async def submit(tasks: dict[str, Any]) -> str:
            text = json.dumps({"name": "w", "tasks": tasks}).encode()
            gateway = host.enactment.gateway
            id, _ = await host.do(gateway.submit(text, {}, "somebody", False), 10.0)
            return str(id)

        await submit({f"f{i}": {"command": ["work", "20"]} for i in range(full)})
        await asyncio.sleep(0.5)  # nothing more fits at home
        id = await submit({"t0.0": maker, "t1.0": reader})
        await asyncio.sleep(40.0)
        found = home.remembered(id)
        assert met == [id]
        assert mutant or (found is not None and found.state == "succeeded")
        return str(world._broken or "")

    if mutant:
        monkeypatch.setattr(Placements, "make_work", mutant)
    broken = run_out(scenario())
    assert ("which t0.0 is not agreed to have" in broken) == bool(mutant), broken
