"""What every strategy keeps to, whoever wrote it: one suite, for all that are registered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sim.loop import run
from sim.network import Faults
from tests.lab import CORE, Lab, unit
from valence.protocols.strategies.base import Placed
from valence.protocols.strategies.registry import MADE_BY
from valence.protocols.strategies.service import Context, Service
from valence.protocols.wire.messages import AttemptKey, Capacity, Needs

STRATEGIES = sorted(MADE_BY)
every = pytest.mark.parametrize("strategy", STRATEGIES)

Scenario = Callable[[Lab], Awaitable[None]]


def play(lab: Callable[[], Lab], scenario: Scenario) -> Lab:
    found: list[Lab] = []

    async def whole() -> None:
        found.append(lab())
        await scenario(found[0])
        await found[0].close()

    run(whole())
    return found[0]


@every
def test_each_unit_is_placed_once_and_many_peers_share_them(strategy: str) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.open(8)
        lab.add(unit(f"t{n}", runtime_s=0.2) for n in range(60))
        await lab.all_ran()
        assert set(lab.ran.values()) == {1}
        assert len(set(lab.at.values())) >= 7
        assert not any(lab.home.strategy.waiting_for(key) for key in lab.units)

    play(lambda: Lab(strategy), scenario)


@every
@pytest.mark.parametrize("seed", range(3))
def test_messages_that_are_lost_late_or_doubled_lose_no_unit(strategy: str, seed: int) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.open(6)
        lab.network.faults = Faults(loss=0.15, duplication=0.1, jitter_s=0.05)
        lab.add(unit(f"t{n}", runtime_s=0.2) for n in range(40))
        await lab.all_ran(300.0)
        lab.network.faults = Faults()

    play(lambda: Lab(strategy, seed), scenario)


@every
def test_what_is_withdrawn_is_not_placed_any_more(strategy: str) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.open(3, cores=1)
        lab.runtime_s = 3.0
        lab.add(unit(f"t{n}") for n in range(3))
        await lab.until(lambda: len(lab.begun) == 3)
        more = [unit(f"more{n}") for n in range(10)]
        lab.home.strategy.add(more)
        await asyncio.sleep(1.0)
        lab.home.strategy.withdraw([u.key for u in more] + [AttemptKey("w", "unknown", 1)])
        assert not any(lab.home.strategy.waiting_for(u.key) for u in more)
        await asyncio.sleep(10.0)
        # what was being placed at that moment may have been given out; the rest never is
        assert len({one.unit.key for one in lab.placed} & {u.key for u in more}) == 0

    play(lambda: Lab(strategy), scenario)


@every
def test_it_says_what_a_unit_waits_for(strategy: str) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.open(4, cores=1)
        lab.runtime_s = 5.0
        strange = unit("gpu", Needs(Capacity(millicores=1000, gpus=1)))
        lab.add([strange])
        await asyncio.sleep(3.0)
        said = lab.home.strategy.waiting_for(strange.key)
        assert said is not None
        assert "needs 1 GPU, but none of the 4 peers has one" in said
        lab.add(unit(f"t{n}") for n in range(12))
        await asyncio.sleep(2.0)
        waiting = [lab.home.strategy.waiting_for(key) for key in lab.units]
        assert sum(bool(words) for words in waiting) >= 8, "full peers are a reason, too"
        await lab.peer(cores=1, gpus=1)
        await lab.all_ran()
        assert lab.at["gpu"] == lab.peers[-1].contact.id

    play(lambda: Lab(strategy), scenario)


@every
def test_peers_that_die_take_no_unit_with_them(strategy: str) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.open(8, cores=1)
        lab.runtime_s = 0.5
        lab.add(unit(f"t{n}", runtime_s=0.5) for n in range(40))
        await lab.until(lambda: sum(lab.ran.values()) > 5)
        for peer in lab.peers[-3:]:
            await peer.die()
        gone = {peer.contact.id for peer in lab.peers[-3:]}
        await lab.give_up_at(gone)
        await lab.all_ran()
        assert set(lab.at.values()) >= {p.contact.id for p in lab.peers[:5]}

    play(lambda: Lab(strategy), scenario)


@every
def test_peers_that_refuse_are_passed_over(strategy: str) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.open(6, cores=1)
        closed = lab.peers[3:]
        for peer in closed:
            peer.admission.closed = "leaving"
        lab.add(unit(f"t{n}", runtime_s=0.2) for n in range(20))
        await lab.all_ran()
        assert not set(lab.at.values()) & {peer.contact.id for peer in closed}

    play(lambda: Lab(strategy), scenario)


@every
def test_needs_are_obeyed(strategy: str) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.open(4)
        arm = await lab.peer(arch="aarch64")
        far = await lab.peer(site="there")
        large = await lab.peer(cores=6)
        lab.add(
            [
                *(unit(f"arm{n}", CORE._replace(arch="aarch64")) for n in range(4)),
                *(unit(f"far{n}", CORE._replace(site="there")) for n in range(4)),
                *(unit(f"large{n}", Needs(Capacity(millicores=5000))) for n in range(3)),
                *(unit(f"any{n}") for n in range(10)),
            ]
        )
        await lab.all_ran()
        where = {name: at for name, at in lab.at.items() if not name.startswith("any")}
        wanted = {"arm": arm, "far": far, "large": large}
        for name, at in where.items():
            assert at == wanted[name.rstrip("0123456789")].contact.id, name

    play(lambda: Lab(strategy), scenario)


@every
def test_what_is_due_first_goes_first_then_what_much_work_hangs_on(strategy: str) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.open(2, cores=1)
        now = lab.now()
        lab.add([unit("first", runtime_s=1.0), unit("second", runtime_s=1.0)])
        await lab.until(lambda: len(lab.begun) == 2)
        lab.add(
            [
                *(unit(f"idle{n}", runtime_s=1.0) for n in range(4)),
                *(unit(f"rank{n}", runtime_s=1.0, rank=100.0) for n in range(4)),
                *(unit(f"due{n}", runtime_s=1.0, deadline_at=now + 60.0) for n in range(4)),
            ]
        )
        lab.runtime_s = 1.0
        await lab.all_ran()
        order = [name.rstrip("0123456789") for name in lab.order[2:]]
        places = {kind: order.index(kind) for kind in ("due", "rank", "idle")}
        last = {kind: 11 - order[::-1].index(kind) for kind in ("due", "rank", "idle")}
        assert places["due"] < places["rank"] < places["idle"], order
        assert last["due"] < last["rank"] < last["idle"], order

    play(lambda: Lab(strategy), scenario)


@every
def test_where_it_has_failed_it_goes_only_if_there_is_no_other(strategy: str) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.open(3, cores=4)
        bad = frozenset({lab.peers[0].contact.id, lab.peers[1].contact.id})
        lab.add(unit(f"t{n}", avoid=bad, runtime_s=0.2) for n in range(4))
        await lab.all_ran()
        assert set(lab.at.values()) == {lab.peers[2].contact.id}
        everywhere = frozenset(peer.contact.id for peer in lab.peers)
        lab.add([unit("anyway", avoid=everywhere, runtime_s=0.2)])
        await lab.all_ran()

    play(lambda: Lab(strategy), scenario)


@every
def test_owners_who_wait_share_what_there_is(strategy: str) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.open(4)
        lab.add(unit(f"ada{n}", owner="ada", runtime_s=0.2) for n in range(120))
        await asyncio.sleep(1.0)
        lab.add(unit(f"bob{n}", owner="bob", runtime_s=0.2) for n in range(40))
        await asyncio.sleep(1.0)
        before = len(lab.order)
        await lab.until(lambda: len(lab.order) > before + 40)
        some = lab.order[before : before + 40]
        bobs = sum(name.startswith("bob") for name in some)
        assert 12 <= bobs <= 28, bobs
        await lab.all_ran()

    play(lambda: Lab(strategy), scenario)


@every
def test_a_strategy_is_begun_and_ended_with_its_peer(strategy: str) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.open(2)
        service = lab.home.service
        assert service.strategy.name == strategy
        names = [name for name, _ in service.works()]
        assert names
        assert len(names) == len(set(names))
        for metric in service.metrics():
            assert metric.name.isidentifier()
            assert metric.help
            assert all(isinstance(value, int | float) for value in metric.counts().values())
        lab.home.strategy.vacancy(b"?" * 20, Capacity(millicores=1000))  # of a peer nobody knows

    play(lambda: Lab(strategy), scenario)


# --------------------------------------------------------------------------- of the suite itself


def forgetful(strategy: Any, context: Context) -> None:
    add = strategy.add
    strategy.add = lambda units: add([u for n, u in enumerate(units) if n % 10 != 9])


def deaf(strategy: Any, context: Context) -> None:
    strategy.withdraw = lambda keys: None


def silent(strategy: Any, context: Context) -> None:
    strategy.waiting_for = lambda key: None


def changed(**more: Any) -> Callable[[Any, Context], None]:
    """All units are taken for such."""

    def change(strategy: Any, context: Context) -> None:
        add = strategy.add
        strategy.add = lambda units: add([u._replace(**more) for u in units])

    return change


def double(strategy: Any, context: Context) -> None:
    """What it has placed it goes on to place."""
    placed = context.on_placed
    add = strategy.add

    def twice(batch: list[Placed]) -> None:
        placed(batch)
        again = [one.unit for one in batch if one.unit.rank >= 0]
        add([u._replace(rank=-1.0, key=u.key._replace(number=u.key.number + 1)) for u in again])

    strategy._on_placed = twice


BROKEN: list[tuple[Callable[[Any, Context], None], Callable[[str], None]]] = [
    (forgetful, test_each_unit_is_placed_once_and_many_peers_share_them),
    (double, test_each_unit_is_placed_once_and_many_peers_share_them),
    (deaf, test_what_is_withdrawn_is_not_placed_any_more),
    (silent, test_it_says_what_a_unit_waits_for),
    (changed(needs=CORE), test_needs_are_obeyed),
    (
        changed(deadline_at=None, rank=0.0),
        test_what_is_due_first_goes_first_then_what_much_work_hangs_on,
    ),
    (changed(owner=""), test_owners_who_wait_share_what_there_is),
    (changed(avoid=frozenset()), test_where_it_has_failed_it_goes_only_if_there_is_no_other),
]


@pytest.mark.parametrize(("breaks", "test"), BROKEN, ids=lambda v: v.__name__[:40])
def test_the_suite_notices_a_strategy_that_breaks_a_rule(
    breaks: Callable[[Any, Context], None],
    test: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(context: Context) -> Service:
        service = MADE_BY["probe"](context)
        breaks(service.strategy, context)
        return service

    monkeypatch.setitem(MADE_BY, "broken", make)
    monkeypatch.setattr(Lab, "PATIENCE_S", 20.0)
    with pytest.raises(AssertionError):
        test("broken")
