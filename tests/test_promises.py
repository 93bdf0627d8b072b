"""Promises: planned, kept through deaths, restarts and takeovers, and told as they are."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from sim.host import Host
from sim.loop import run_out
from sim.mutants import applied
from sim.plan import Plan
from sim.world import World
from tests.conftest import Cluster, wait_for
from valence.client import Problem
from valence.gantt import chart
from valence.protocols.engine.answers import ApiError
from valence.protocols.engine.lengths import Lengths
from valence.protocols.engine.promise import (
    DATA_LATE,
    OVERRUN,
    PEER_LOST,
    RemainingWork,
    Trouble,
    WorkflowPromise,
    due_of,
    survives,
)
from valence.protocols.strategies.base import BookedSlot, PlanRequest
from valence.protocols.strategies.deadline.bargain import BACKWARD, FORWARD, Bargain
from valence.protocols.strategies.deadline.messages import Confirm
from valence.protocols.wire.messages import Contact, Needs
from valence.workflow.document import from_value
from valence.workflow.sequences import Graph, Slot

DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}
PEER = Contact(b"p" * 20, "host", 1)


# --------------------------------------------------------------------------- a bargain


def request(deadline_at: float, slots: dict[str, Slot] | None = None) -> PlanRequest:
    graph = Graph.of(dict.fromkeys(DIAMOND, 1.0), DIAMOND)
    return PlanRequest("w", "o", graph, dict.fromkeys(DIAMOND, Needs()), slots or {}, deadline_at)


def bargained(bargain: Bargain, now: float = 0.0) -> list[list[tuple[str, ...]]]:
    """Every sequence gets the first slots of its windows; returns what was asked, by stage."""
    asked = []
    while wanted := bargain.wanted(now):
        asked.append([one.tasks for one in wanted])
        for one in wanted:
            free_at, slots = 0.0, []
            for window in one.windows:
                start = max(free_at, window.start)
                free_at = start + 1.3
                slots.append(BookedSlot(PEER, 1, start, free_at))
            bargain.took(one, slots)
    return asked


def test_backward_the_longest_sequence_goes_first() -> None:
    bargain = Bargain(request(60.0), 0.1)
    assert bargain.way == BACKWARD
    assert bargained(bargain) == [[("a", "b", "d")], [("c",)]]
    assert bargain.is_in_time


def test_forward_goes_level_by_level_and_keeps_chains_together() -> None:
    bargain = Bargain(request(float("inf")), 0.1)
    assert bargain.way == FORWARD
    assert bargained(bargain) == [[("a",)], [("b",), ("c",)], [("d",)]]
    assert bargain.ends_at == pytest.approx(3 * 1.3 + 2 * 0.1)
    chain = {"a": [], "b": ["a"], "c": ["b"]}
    graph = Graph.of(dict.fromkeys(chain, 1.0), chain)
    one = Bargain(PlanRequest("w", "o", graph, {}, {}, float("inf")), 0.1)
    assert [wanted.tasks for wanted in one.wanted(0.0)] == [("a", "b", "c")]


def test_a_deadline_that_is_too_close_leaves_no_window() -> None:
    bargain = Bargain(request(3.0), 0.1)
    assert bargain.wanted(0.0) == []
    assert not bargain.is_complete


def test_what_runs_keeps_its_place() -> None:
    bargain = Bargain(request(60.0, {"a": Slot(0.0, 5.0)}), 0.1)
    bargained(bargain)
    assert min(bargain.slots["b"].start_at, bargain.slots["c"].start_at) == pytest.approx(5.1)


# --------------------------------------------------------------------------- how it stands


def graph() -> Graph:
    return Graph.of(dict.fromkeys(DIAMOND, 1.0), DIAMOND)


def test_a_task_may_end_when_its_children_are_to_begin() -> None:
    slots = {"a": Slot(0, 1), "b": Slot(2, 3), "c": Slot(5, 6), "d": Slot(8, 9)}
    due = due_of(graph(), slots, 20.0, 0.5)
    assert due == {"a": 1.5, "b": 7.5, "c": 7.5, "d": 20.0}


@pytest.mark.parametrize(("deadline", "survived"), [(20.0, True), (8.0, False)])
def test_a_plan_survives_a_death_if_the_longest_task_can_be_done_again(
    deadline: float, survived: bool
) -> None:
    slots = {"a": Slot(0, 1), "b": Slot(1, 2), "c": Slot(1, 2), "d": Slot(2, 3)}
    assert survives(graph(), slots, 0.0, deadline, 0.1) is survived


def test_the_end_is_foreseen_from_what_runs_and_what_is_booked() -> None:
    rest = RemainingWork(graph(), {"a": Slot(0, 4), "b": Slot(1, 2)}, frozenset({"a"}))
    ends = rest.ends(0.0, 0.0)
    assert ends["a"] == 4
    assert ends["b"] == 5  # it takes as long as its slot, behind what it waits for
    assert ends["d"] == pytest.approx(ends["c"] + 1.3)


def test_what_cost_most_is_the_cause() -> None:
    promise = WorkflowPromise(100.0, 0)
    assert promise.worst().cause == DATA_LATE
    promise.trouble(PEER_LOST, "a peer died", 6.0)
    promise.trouble(OVERRUN, "a took too long", 9.0)
    assert promise.worst().cause == OVERRUN
    assert promise.worst(Trouble(PEER_LOST, "another one died", 30.0)).why == "another one died"


def test_lengths_are_stated_or_learned_or_limits() -> None:
    from types import SimpleNamespace as Made

    lengths = Lengths()
    spec = from_value({"name": "w", "tasks": {"t": {"command": ["x"], "timeout": 9}}}).tasks["t"]
    assert lengths.of("ada", "w", spec) == 9
    for seconds in (2.0, 3.0):
        done: Any = Made(runtimes={"t": seconds}, owner="ada", workflow=Made(name="w"))
        lengths.learn(done)
    assert lengths.of("ada", "w", spec) == 3.0
    assert lengths.of("bob", "w", spec) == 9


# --------------------------------------------------------------------------- whole peers


def document(deadline: str = "60s", seconds: float = 2.0, **more: Any) -> dict[str, Any]:
    def task(*inputs: str) -> dict[str, Any]:
        return {"command": ["work", f"{seconds:g}"], "inputs": list(inputs), "runtime": seconds}

    tasks = {
        "a": {**task(), "outputs": ["f"]},
        **{f"m{i}": {**task("f"), "outputs": [f"f{i}"]} for i in range(4)},
        "z": task("f0", "f1", "f2", "f3"),
    }
    return {"name": "w", "strategy": "deadline", "deadline": deadline, "tasks": tasks, **more}


def steady(host: Host) -> None:
    """Tasks there never fail, and take no longer than they said."""
    host.workshop.failing, host.workshop.overruns = 0.0, 1e-9


async def assembled(peers: int = 6) -> World:
    world = World(Plan(5, peers=peers, faults=(), strategy="deadline"))
    for _ in range(peers):
        world.add_host()
    for host in world.hosts:
        steady(host)
    await world._until(world._all_know_all, 60.0, "the peers never found each other")
    return world


async def submitted(host: Host, text: dict[str, Any], offer: str = "") -> str:
    options = {"accept": offer} if offer else {}
    work = host.enactment.gateway.submit(json.dumps(text).encode(), options, "ada", False)
    answer = await host.do(work, 20.0)
    assert answer is not None
    return str(answer[0])


async def view(host: Host, workflow: str) -> dict[str, Any]:
    seen = await host.do(host.enactment.gateway.ask("", workflow, "workflow"), 20.0)
    assert isinstance(seen, dict)
    return seen


async def over(host: Host, workflow: str) -> dict[str, Any]:
    for _ in range(400):
        seen = await view(host, workflow)
        if seen["state"] not in ("pending", "running"):
            return seen
        await asyncio.sleep(0.5)
    raise AssertionError("it does not end")


def booked(world: World) -> int:
    return sum(len(host.enactment.admission.bookings) for host in world.up())


@pytest.mark.parametrize("mutant", ["", "a-new-home-forgets-bookings"])
def test_a_new_home_affirms_the_bookings_of_the_old_one(mutant: str) -> None:
    async def scenario() -> None:
        world = await assembled()
        home, other = world.hosts[:2]
        workflow = await submitted(home, document("400s", 40.0))
        home.kill()
        await asyncio.sleep(55.0)  # longer than a booking lives that nobody affirms
        seen = await view(other, workflow)
        assert seen["promise"]["state"] == "made"
        assert seen["promise"]["confirmed"] is not bool(mutant)
        if not mutant:
            assert (await over(other, workflow))["promise"]["state"] == "kept"

    with applied(mutant):
        run_out(scenario())


@pytest.mark.parametrize("mutant", ["", "a-restart-loses-bookings"])
def test_a_restarted_peer_has_its_bookings_still(mutant: str) -> None:
    async def scenario() -> None:
        world = await assembled(4)
        workflow = await submitted(world.hosts[0], document("300s", 5.0))
        await asyncio.sleep(2.0)
        before = {
            h.index: {
                n for n, p in h.enactment.admission.bookings.promises.items() if not p.running
            }
            for h in world.hosts
        }
        asked, again = world.hosts[0], next(h for h in world.hosts[1:] if before[h.index])
        again.kill()
        world.start(again)
        steady(again)
        here = set(again.enactment.admission.bookings.promises)
        assert (here == before[again.index]) is not bool(mutant)
        if not mutant:
            seen = await over(asked, workflow)
            assert seen["promise"]["state"] == "kept", seen["promise"]
            await asyncio.sleep(60.0)
            assert booked(world) == 0

    with applied(mutant):
        run_out(scenario())


@pytest.mark.parametrize("mutant", ["", "earliest-is-a-guess"])
def test_the_earliest_end_is_accepted_when_it_is_asked_for(mutant: str) -> None:
    async def scenario() -> None:
        world = await assembled()
        host = world.hosts[0]
        with pytest.raises(ApiError, match="the deadline can't be met: its longest") as refused:
            await submitted(host, document("3s"))
        assert refused.value.status == 409
        await asyncio.sleep(20.0)
        assert booked(world) == 0, "the offer has expired, and nothing of it is left"
        earliest_s = refused.value.more["earliest_in_s"]
        if mutant:
            with pytest.raises(ApiError, match="can't be met"):
                await submitted(host, document(f"{earliest_s:.3f}s"))
        else:
            workflow = await submitted(host, document(f"{earliest_s:.3f}s"))
            kept = await over(host, workflow)
            assert kept["promise"]["state"] == "kept", kept["promise"]

    with applied(mutant):
        run_out(scenario())


def test_an_offer_is_accepted_once_by_its_owner_for_its_document() -> None:
    async def scenario() -> None:
        world = await assembled()
        host = world.hosts[0]
        with pytest.raises(ApiError) as refused:
            await submitted(host, document("3s"))
        offer = refused.value.more["offer"]
        with pytest.raises(ApiError, match="was made for another document"):
            await submitted(host, document("4s"), offer)
        work = host.enactment.gateway.submit(
            json.dumps(document("3s")).encode(), {"accept": offer}, "bob", False
        )
        with pytest.raises(ApiError, match="does not exist or has expired"):
            await host.do(work, 20.0)
        await asyncio.sleep(8.0)
        workflow = await submitted(host, document("3s"), offer)
        seen = await view(host, workflow)
        takes_s = seen["promise"]["deadline_at"] - seen["submitted_at"]
        assert takes_s == pytest.approx(refused.value.more["earliest_in_s"], abs=0.1)
        with pytest.raises(ApiError, match="expired"):
            await submitted(host, document("3s"), offer)
        kept = await over(host, workflow)
        assert kept["promise"]["state"] == "kept", kept["promise"]

    run_out(scenario())


@pytest.mark.parametrize("mutant", ["", "the-old-booking-stays"])
def test_a_task_is_booked_again_when_its_peer_dies(mutant: str) -> None:
    async def scenario() -> None:
        world = await assembled()
        workflow = await submitted(world.hosts[0], document("300s", 20.0))
        await asyncio.sleep(2.0)
        run = world.hosts[0].enactment.home.active()[0]
        victim = next(
            h for h in world.hosts[1:]
            if any(slot.peer == h.id for slot in run.promise.slots.values())  # type: ignore[union-attr]
        )  # fmt: skip
        victim.kill()
        victim.gone = True
        await asyncio.sleep(12.0)
        assert run.promise is not None
        assert run.promise.rebooked > 0
        assert all(slot.peer != victim.id for slot in run.promise.slots.values())
        bookings = sum(len(h.enactment.admission.bookings) for h in world.up())
        assert (bookings == len(run.promise.slots)) is not bool(mutant)
        if not mutant:
            seen = await over(world.hosts[0], workflow)
            assert seen["promise"]["state"] == "kept", seen["promise"]

    if mutant:  # then nothing is given back: neither what was too much, nor what is in the way
        with applied(mutant):
            run_out(scenario())
    else:
        run_out(scenario())


@pytest.mark.parametrize("on_broken", ["go-on", "cancel"])
def test_a_broken_promise_has_its_cause_and_goes_on_or_not(on_broken: str) -> None:
    async def scenario() -> None:
        world = await assembled()
        host = world.hosts[0]
        text = document("25s", 2.0, promise={"on_broken": on_broken, "survive": 0})
        text["tasks"]["a"]["command"] = ["work", "60"]
        workflow = await submitted(host, text)
        seen = await over(host, workflow)
        assert seen["promise"]["state"] == "broken"
        assert seen["promise"]["cause"] == "overrun"
        assert seen["promise"]["why"].startswith("a has run for ")
        assert seen["state"] == ("succeeded" if on_broken == "go-on" else "cancelled")
        page = await host.do(
            host.enactment.gateway.ask("", workflow, "events", after=(-1, -1), wait_s=0), 9.0
        )
        states = [e["state"] for e in page["events"] if e["type"] == "promise"]
        assert states[0] == "made"
        assert "at-risk" in states
        assert states[-1] == "broken"

    run_out(scenario())


@pytest.mark.parametrize(
    ("terms", "state"),
    [({"infeasible": "earliest"}, "made"), ({"infeasible": "best-effort"}, "none")],
)
def test_what_can_not_be_promised_may_run_all_the_same(terms: dict[str, str], state: str) -> None:
    async def scenario() -> None:
        world = await assembled()
        workflow = await submitted(world.hosts[0], document("3s", promise=terms))
        seen = await view(world.hosts[0], workflow)
        assert seen["promise"]["state"] == state
        if state == "none":
            assert "could not be promised" in seen["promise"]["why"]
        assert (await over(world.hosts[0], workflow))["state"] == "succeeded"

    run_out(scenario())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"deadline": None}, None),
        ({"strategy": "probe"}, "the strategy probe makes none"),
        ({"strategy": "auto", "tasks": {"t": {"command": ["work", "1"]}}}, "t has no run time"),
        (
            {
                "strategy": "auto",
                "tasks": {"t": {"command": ["work", "1"], "peers": 2, "runtime": 1}},
            },
            "tasks that need several peers at once can't be promised yet",
        ),
        ({"strategy": "auto", "levels": "strict"}, "strict levels can't be promised yet"),
        (
            {
                "strategy": "auto",
                "tasks": {"t": {"command": ["work", "0"], "foreach": 20_001, "runtime": 0.001}},
            },
            "at most 20,000 tasks can be promised",
        ),
    ],
)
def test_where_nothing_is_promised_it_is_said_why(change: dict[str, Any], why: str | None) -> None:
    async def scenario() -> None:
        world = await assembled(3)
        text = {k: v for k, v in (document() | change).items() if v is not None}
        workflow = await submitted(world.hosts[0], text)
        promise = (await view(world.hosts[0], workflow))["promise"]
        assert promise is None if why is None else promise["why"] == why

    run_out(scenario())


def test_who_names_the_strategy_wants_a_promise_or_nothing() -> None:
    async def scenario() -> None:
        world = await assembled(3)
        with pytest.raises(ApiError, match="strict levels can't be promised yet") as refused:
            await submitted(world.hosts[0], document(levels="strict"))
        assert refused.value.status == 422
        assert [row.pointer for row in refused.value.errors] == ["/strategy"]

    run_out(scenario())


def test_a_chain_longer_than_a_message_is_promised_in_parts() -> None:
    async def scenario() -> None:
        world = await assembled(3)
        tasks = {
            f"t{n}": {
                "command": ["work", "0.1"], "runtime": 0.1, "inputs": [f"f{n - 1}"] if n else [],
                "outputs": [f"f{n}"],
            }
            for n in range(1100)
        }  # fmt: skip
        text = {"name": "w", "strategy": "deadline", "deadline": "1h", "tasks": tasks}
        workflow = await submitted(world.hosts[0], text)
        seen = await view(world.hosts[0], workflow)
        assert seen["promise"]["state"] == "made"
        assert seen["promise"]["booked"] == 1100

    run_out(scenario())


def test_slots_are_not_called_confirmed_while_a_peer_is_silent() -> None:
    async def scenario() -> None:
        world = await assembled()
        home = world.hosts[0]
        answers = {host: host.peer.rpc.handlers[Confirm] for host in world.hosts}

        async def silent(sender: Contact, message: Confirm) -> None:
            await asyncio.sleep(3600.0)

        for host in world.hosts:
            host.peer.rpc.on(Confirm, silent)
        workflow = await submitted(home, document("400s", 30.0))
        await asyncio.sleep(8.0)
        run = home.enactment.home.runs.active[workflow]
        assert run.promise is not None
        assert not run.promise.confirmed
        for host, answer in answers.items():
            host.peer.rpc.on(Confirm, answer)
        await asyncio.sleep(20.0)
        assert run.promise.confirmed

    run_out(scenario())


def test_a_task_without_a_run_time_is_named() -> None:
    async def scenario() -> None:
        world = await assembled(3)
        text = document()
        del text["tasks"]["m1"]["runtime"]
        with pytest.raises(ApiError, match="m1 needs a runtime") as refused:
            await submitted(world.hosts[0], text)
        assert refused.value.status == 422
        assert [row.pointer for row in refused.value.errors] == ["/tasks/m1"]

    run_out(scenario())


def test_a_submission_that_broke_off_before_its_promise_is_cancelled() -> None:
    """Its user was never answered; another home must not run it without the promise."""

    async def scenario() -> None:
        world = await assembled()
        home = world.hosts[0]
        workflow = await submitted(home, document("100s", 20.0))
        run = home.enactment.home.active()[0]
        run.promise = None  # as if its journal ended before the plan
        home.enactment.home.runs.forget(workflow)
        home.enactment.home._take_up(workflow, (workflow, (b"", {}, 0.0, ""), []), run)
        assert run.cancelling.startswith("its submission was interrupted")

    run_out(scenario())


def test_a_plan_that_is_only_looked_at_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        world = await assembled()
        host = world.hosts[0]
        text = json.dumps(document("30s")).encode()
        plan = await host.do(host.enactment.gateway.plan(text, {}, "ada"), 9.0)
        assert plan is not None
        assert plan.feasible
        assert len(plan.tasks) == 6
        tight = await host.do(
            host.enactment.gateway.plan(json.dumps(document("2s")).encode(), {}, "ada"), 9.0
        )
        assert tight is not None
        assert not tight.feasible
        assert tight.ends_at is not None
        await asyncio.sleep(1.0)
        assert booked(world) == 0

    run_out(scenario())


# --------------------------------------------------------------------------- a chart


def test_a_chart_has_a_row_for_each_task_or_each_peer() -> None:
    rows = [
        {"task": "b", "peer": "2" * 40, "start_at": 5.0, "end_at": 10.0},
        {"task": "a", "peer": "1" * 40, "start_at": 0.0, "end_at": 5.0},
    ]
    assert chart(rows, 0.0, 36) == [
        "TASK  PEER      0·············10.0 s",
        "a     11111111  ██████████",
        "b     22222222            ██████████",
    ]
    many = [{**rows[n % 2], "task": f"t{n}"} for n in range(60)]
    assert chart(many, 0.0, 38) == [
        "PEER       TASKS  0·············10.0 s",
        "11111111      30  ++++++++++",
        "22222222      30            ++++++++++",
    ]


# --------------------------------------------------------------------------- live


def live(seconds: float, deadline: str) -> dict[str, Any]:
    def task(command: str, **more: Any) -> dict[str, Any]:
        return {"command": f"sleep {seconds:g}; {command}", "runtime": seconds, **more}

    return {
        "name": "live",
        "deadline": deadline,
        "tasks": {
            "a": task("echo 1 > a", outputs=["a"]),
            "b": task("cat a > b.{item}", foreach=3, inputs=["a"], outputs=["b.{item}"]),
            "c": task("cat b.* | wc -l > c", inputs=["b.*"], outputs=["c"]),
        },
    }


def test_from_the_command_line(cluster: Cluster, tmp_path: Any) -> None:
    path = tmp_path / "live.yaml"
    path.write_text(json.dumps(live(0.2, "60s")))
    planned = cluster.cli("plan", str(path))
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.splitlines()[0].startswith("5 tasks, done in ")
    assert "b[2]" in planned.stdout
    done = cluster.cli("submit", str(path), "--watch")
    assert done.returncode == 0, done.stderr
    assert "before its deadline, as promised" in done.stdout
    path.write_text(json.dumps(live(0.3, "300ms")))
    refused = cluster.cli("submit", str(path))
    assert refused.returncode == 4
    assert "the deadline can't be met: its longest chain of tasks takes" in refused.stderr
    assert "Traceback" not in refused.stderr
    offer = refused.stderr.partition("--accept ")[2].split()[0]
    taken = cluster.cli("submit", str(path), "--accept", offer, "--watch")
    assert taken.returncode == 0, taken.stderr
    path.write_text(json.dumps(live(0.3, "300ms")).replace("sleep 0.3", "sleep 2.5"))
    refused = cluster.cli("submit", str(path))
    offer = refused.stderr.partition("--accept ")[2].split()[0]
    late = cluster.cli("submit", str(path), "--accept", offer, "--watch")
    assert late.returncode == 4, late.stdout
    assert "its promise was broken (overrun): a " in late.stdout
    wrong = cluster.cli("submit", str(path), "--accept", "0" * 16)
    assert wrong.returncode == 4
    assert "does not exist or has expired" in wrong.stderr


def test_status_and_why_show_the_promise(cluster: Cluster) -> None:
    client = cluster.client(1)
    workflow = client.submit(live(1.0, "10m"))
    seen = cluster.client(2).workflow(workflow.id).view()
    assert seen["strategy"] == "deadline"
    assert seen["promise"]["state"] == "made"
    assert seen["promise"]["slack_s"] > 500
    wait_for(lambda: client.workflow(workflow.id).view()["promise"]["confirmed"])
    why = cluster.cli("why", workflow.id, "c")
    assert "booked on peer " in why.stdout
    assert "promised: due in " in cluster.cli("status", workflow.id).stdout
    task = client.workflow(workflow.id).task("c")
    assert task["slot"]["end_at"] < time.time() + 60
    assert workflow.wait() == "succeeded"
    metrics = "".join(cluster.client(n).metrics() for n in range(8))
    assert 'valence_home_total{kind="promises_kept"}' in metrics


def test_a_promise_outlives_the_peer_that_made_it(own_cluster: Any) -> None:
    cluster = own_cluster(4, "--cpus", "2")
    accepting = cluster.peers()[0]
    workflow = cluster.client(0).submit(live(1.0, "2m"))
    cluster.kill(accepting["id"])
    other = cluster.client(1).workflow(workflow.id)

    def ended() -> Any:
        try:
            seen = other.view()
        except Problem:
            return None
        return seen if seen["state"] not in ("pending", "running") else None

    assert wait_for(ended)["promise"]["state"] == "kept"
