"""The chemical layer: order on the ring, spread, questions under churn; and the strategy on it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.loop import run
from sim.network import Faults, Network, SimPeer
from tests.conftest import Cluster
from valence.protocols.config import LAN, Config
from valence.protocols.strategies.chemical.config import ChemicalConfig
from valence.protocols.strategies.chemical.holder import Stretch, Wish, alike, rest_of, room
from valence.protocols.strategies.chemical.kinds import ALL, kind_of
from valence.protocols.strategies.chemical.layer import Layer, load
from valence.protocols.strategies.chemical.messages import Meta, Scale
from valence.protocols.strategies.chemical.questions import Questions
from valence.protocols.strategies.chemical.scale import (
    FIRST,
    STEPS,
    fit,
    key,
    order,
    order_at,
    place,
    tie,
)
from valence.protocols.wire.messages import Capacity, Contact, Member, Needs, Ticket

ONE = Needs(Capacity(1000))


def peer_id(number: int) -> bytes:
    return random.Random(number).randbytes(20)


# --------------------------------------------------------------------------- the scale

orders = st.floats(0, STEPS + 0.999, allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(st.lists(orders, min_size=4, max_size=60), st.lists(orders, min_size=2, max_size=30))
def test_a_scale_keeps_order(sample: list[float], values: list[float]) -> None:
    for scale in (FIRST, fit(1, sample)):
        assert scale is not None
        places = [place(scale, value) for value in sorted(values)]
        assert places == sorted(places)
        assert all(0 <= p < 1 for p in places)


def test_equal_values_are_spread_as_far_as_they_are_many() -> None:
    rng = random.Random(1)
    sample = [order(0.45, rng.randbytes(20)) for _ in range(96)]
    scale = fit(1, sample)
    assert scale is not None
    places = sorted(place(scale, order(0.45, rng.randbytes(20))) for _ in range(1000))
    counts = Counter(int(16 * p) for p in places)
    assert max(counts.values()) < 3 * 1000 / 16, "all have one value, and the whole ring"


def test_the_other_way_round() -> None:
    for at in (0.01, 0.3, 0.5, 0.77, 0.99):
        assert place(FIRST, order_at(FIRST, at)) == pytest.approx(at, abs=1e-6)


# --------------------------------------------------------------------------- a node's stretch


def meta(number: int, value: float, version: int = 1, cores: int = 2) -> Meta:
    peer = peer_id(number)
    return Meta(peer, order(value, peer), version, Capacity(1000 * cores), False)


def test_a_node_holds_few_and_the_last_in_order_go_on() -> None:
    stretch = Stretch(LAN)
    for number in range(10):
        assert stretch.put(meta(number, number / 10), 0.0)
    passed = stretch.surplus(1.0)
    assert len(stretch) == ChemicalConfig().rows_max
    kept = stretch.between(0, STEPS, 1.0)
    assert [m.order for m in kept] == sorted(m.order for m in kept)
    assert max(m.order for m in kept) < min(m.order for m in passed) == stretch.gone_on(1.0)
    assert not stretch.surplus(1.0, most=0.5), "where the ring begins anew nothing goes on"


def test_of_two_the_later_version_and_all_expire() -> None:
    stretch = Stretch(LAN)
    stretch.put(meta(1, 0.5, version=3), 0.0)
    stretch.put(meta(1, 0.1, version=2), 0.0)
    assert [m.version for m in stretch.between(0, STEPS, 0.0)] == [3]
    assert not stretch.take(peer_id(1), 2)
    assert stretch.take(peer_id(1), 3)
    stretch.put(meta(2, 0.5), 0.0)
    assert not stretch.between(0, STEPS, ChemicalConfig().ttl_s + 1)


def test_what_one_is_told_is_not_told_to_the_next() -> None:
    """Section 3.3.3: a resource is consumed, and no other task is given it before it is back."""
    stretch = Stretch(LAN)
    stretch.put(meta(1, 0.0, cores=2), 0.0)
    found = stretch.between(0, STEPS, 0.0)[0]
    assert room(found, ONE, 5, False) == 2
    assert stretch.take(found.peer, found.version)
    assert not stretch.between(0, STEPS, 0.0)


def test_wishes_are_bounded_and_end() -> None:
    stretch = Stretch(LAN.having(ChemicalConfig(wishes_max=3)))
    for number in range(10):
        stretch.wish(Wish(peer_id(number), ONE, 1, 1, False, 5.0), 0.0)
    assert len(stretch.wishes) == 3
    stretch.wish(Wish(peer_id(99), ONE, 1, 1, False, 20.0), 10.0)
    assert len(stretch.wishes) == 1


def test_load_says_whether_there_is_room() -> None:
    member = type("M", (), {"capacity": Capacity(4000, 2**30)})
    assert load(Ticket(Capacity(4000, 2**30), 0.5, 9), member, 0.5) == 0.0  # type: ignore[arg-type]
    half = load(Ticket(Capacity(2000, 2**30), 0.5, 9), member, 0.5)  # type: ignore[arg-type]
    assert half == 0.45
    full = load(Ticket(Capacity(0, 2**30), 0.0, 0), member, 0.5)  # type: ignore[arg-type]
    assert full == 1.0
    assert half < load(Ticket(Capacity(0, 2**30), 0.25, 9), member, 0.5) < full  # type: ignore[arg-type]


# --------------------------------------------------------------------------- whole clusters


class Resource(SimPeer):
    """A peer whose load a test sets."""

    def __init__(
        self, network: Network, index: int, config: Config = LAN, large: bool = True
    ) -> None:
        self.memory = 2**40 if large else 2**33
        super().__init__(network, index, config, Capacity(100_000, self.memory))
        self.large = large
        self.used = 0
        self.layer = Layer(self.rpc, self.members, self.liveness, self.rng, config, self.ticket)
        self.questions = Questions(self.rpc, self.members, self.layer, self.rng, config)
        self._tasks.append(asyncio.ensure_future(self.layer.run()))

    def ticket(self) -> Ticket:
        free = Capacity(100_000 - 1000 * self.used, self.memory)
        return Ticket(free, 0.5 if self.used < 100 else 0.0)

    def use(self, cores: int) -> None:
        self.used = cores
        self.layer.changed()

    @property
    def held(self) -> int:
        return len(self.layer.kinds[ALL].stretch)

    async def ask(self, needs: Needs, count: int) -> list[bytes]:
        """Whom the layer names, in their order; of what is said twice the newer word. (What says
        anew where it stands while the question is on its way may come to it as a wish.)"""
        found: dict[bytes, Meta] = {}

        def add(meta: Meta) -> bool:
            if meta.peer not in found or meta.version > found[meta.peer].version:
                found[meta.peer] = meta
            return True

        before, self.layer.on_appeared = self.layer.on_appeared, lambda meta, *_: add(meta)
        async for rows in self.questions.ask(needs, count, None):
            for meta, _ in rows:
                add(meta)
        self.layer.on_appeared = before
        return sorted(found, key=lambda peer: found[peer].order)

    async def crash(self) -> None:
        await self.questions.close()
        await self.layer.close()
        await super().crash()

    async def close(self) -> None:
        await self.questions.close()
        await self.layer.close()
        await super().close()


async def resources(
    network: Network, count: int, config: Config = LAN, large_each: int = 1
) -> list[Resource]:
    peers = [Resource(network, i, config, i % large_each == 0) for i in range(count)]
    for peer in peers[1:]:
        await peer.join(peers[0])
    loop = asyncio.get_running_loop()
    end = loop.time() + 60
    while not all(p.members.count == count for p in peers):
        assert loop.time() < end
        await asyncio.sleep(0.1)
    return peers


@pytest.mark.parametrize("seed", range(4))
def test_a_question_is_answered_as_a_plain_list_would_also_after_churn(seed: int) -> None:
    config = LAN.having(ChemicalConfig(walk_max=200, empty_max=200, fit_s=1.0))

    async def scenario() -> None:
        network = Network(seed, Faults(loss=0.01))
        peers = await resources(network, 30, config)
        rng = random.Random(seed)
        for step in range(4):
            for peer in peers:  # half of them have the same load
                peer.use(rng.choice((0, 30, 30, 30, 77, 100)) if rng.random() < 0.9 else 5)
            if step % 2:
                victim = peers.pop(rng.randrange(1, len(peers)))
                await victim.crash()
                newcomer = Resource(network, 40 + step, config)
                await newcomer.join(peers[0])
                peers.append(newcomer)
            for _ in range(8):
                await peers[0].layer.want()
                await asyncio.sleep(5)
            asker = rng.choice(peers)
            found = await asker.ask(ONE, 100_000)
            loads = {p.contact.id: p.used for p in peers}
            free = [p.contact.id for p in peers if p.used < 100]
            assert Counter(found) == Counter(free), "exactly those that match"
            named = [loads[peer] for peer in found]
            assert named == sorted(named), "the least loaded first"
            await asyncio.sleep(12)  # what was told is said anew
        for peer in peers:
            assert not peer.errors
            await peer.close()

    run(scenario())


@pytest.mark.parametrize("kind", ["equal", "zipf", "half"])
def test_no_node_holds_more_than_four_times_the_mean(kind: str) -> None:
    async def scenario() -> tuple[int, float]:
        network = Network(5)
        peers = await resources(network, 120, LAN.having(ChemicalConfig(fit_s=2.0)))
        rng = random.Random(5)
        for peer in peers:
            zipf = min(99, int(rng.paretovariate(1.0)))
            value = {"equal": 40, "zipf": zipf, "half": rng.choice((60, rng.randrange(100)))}[kind]
            peer.use(value)
        await peers[3].layer.want()
        await asyncio.sleep(60)
        held = [p.held for p in peers]
        for peer in peers:
            assert not peer.errors
            await peer.close()
        return max(held), sum(held) / len(held)

    most, mean = run(scenario())
    assert mean > 0.95, "all are there"
    assert most <= 4 * max(1.0, mean)


def test_who_waits_is_told_when_a_resource_appears() -> None:
    async def scenario() -> None:
        network = Network(6)
        peers = await resources(network, 12)
        for peer in peers:
            peer.use(100)
        home = peers[4]
        told: list[bytes] = []
        home.layer.on_appeared = lambda meta, needs, count: told.append(meta.peer) is None
        await home.layer.want()
        await asyncio.sleep(12)  # until the scale fits
        assert await home.ask(ONE, 1) == []
        start = network.sent
        await asyncio.sleep(1.0)
        assert not told
        peers[7].use(99)
        await asyncio.sleep(0.2)
        assert told == [peers[7].contact.id]
        assert network.sent - start < 80, "nobody asks again and again"
        for peer in peers:
            await peer.close()

    run(scenario())


def test_nobody_says_anything_while_nobody_wants_the_layer() -> None:
    async def scenario() -> None:
        peers = await resources(Network(7), 8)
        for peer in peers:
            peer.use(50)
        await asyncio.sleep(30)
        assert not any(p.layer.counts["published"] for p in peers)
        await peers[2].layer.want()
        await asyncio.sleep(2)
        assert all(p.layer.counts["published"] for p in peers)
        await asyncio.sleep(ChemicalConfig().active_s + 2 * ChemicalConfig().ttl_s)
        before = sum(p.layer.counts["published"] for p in peers)
        await asyncio.sleep(30)
        assert sum(p.layer.counts["published"] for p in peers) == before
        for peer in peers:
            await peer.close()

    run(scenario())


def test_garbage_about_the_layer_is_counted_and_changes_nothing() -> None:
    async def scenario() -> None:
        peer = Resource(Network(8), 0)
        for about in (b"", b"x", b"\x93\xa1a\xa1b\xa1c", b"\x93\x01\x05\x92\xcb" + bytes(7)):
            peer.layer._announced(about)
        assert peer.layer.scale == FIRST
        wrong = Scale(9, (5.0, 1.0))
        peer.layer.adopt(wrong)
        assert peer.layer.scale == FIRST, "its points do not rise"
        await peer.close()

    run(scenario())


def test_hostile_scales_and_orders_change_nothing() -> None:
    full = fit(1, [1000.2, 1000.4, 1000.6, 1000.9])
    assert full is not None
    assert all(0 <= place(full, found) < 1 for found in (0.0, 1000.5, 1001.0, 5000.0, 1e6))

    async def scenario() -> None:
        peer = Resource(Network(8), 0)
        for hostile in (Scale(2**60, (1.0,)), Scale(3, (1.0, 5000.0)), Scale(3, (2.0, 1.0))):
            peer.layer.adopt(hostile)
            assert peer.layer.scale == FIRST
        peer.layer.adopt(Scale(3, (1.0, 2.0)))
        peer.layer.adopt(Scale(3, (1.0, 4.0)))
        peer.layer.adopt(Scale(3, (1.0, 3.0)))
        assert peer.layer.scale == Scale(3, (1.0, 4.0)), "of two all choose the same"
        assert await peer.ask(ONE, 500_000) == []
        await peer.close()

    run(scenario())


def test_places_are_where_the_ring_says() -> None:
    ring = [Contact(peer_id(n), "h", 1) for n in range(5)]
    assert {len(key(bytes(20), FIRST, order(0.5, c.id))) for c in ring} == {20}
    assert all(0 <= tie(c.id) < 1 for c in ring)


def test_what_is_taken_of_a_molecule_leaves_a_rest() -> None:
    """Section 3.3.3: what was consumed is not given to another task; what is left may be."""
    capacity = Capacity(4000, 2**32)
    whole = Meta(peer_id(1), order(0.0, peer_id(1)), 7, capacity)
    rest = rest_of(whole, capacity, Needs(Capacity(1000, 2**30)), 2)
    assert rest is not None
    assert rest.free == Capacity(2000, 2**31)
    assert rest.version == 7
    assert int(rest.order) == 450
    assert rest_of(rest, capacity, Needs(Capacity(1000)), 2) is None, "there is no room any more"
    assert rest_of(rest, capacity, Needs(Capacity(1000)), 3) is None, "nobody knows"
    assert alike(Capacity(64_000), Capacity(63_000), Capacity(64_000)), "not worth a word"
    assert not alike(Capacity(4000), Capacity(3000), Capacity(4000))


def test_similar_needs_that_few_meet_are_of_one_kind() -> None:
    """Section 3.2: queries with several criteria."""
    large, small = Capacity(8000, 2**38), Capacity(4000, 2**33)
    here = [
        Member(Contact(peer_id(n), "h", 1), capacity=large if n % 10 == 0 else small)
        for n in range(100)
    ]
    assert kind_of(ONE, here) == ALL, "all meet them"
    few = kind_of(Needs(Capacity(1000, 2**37)), here)
    assert few == kind_of(Needs(Capacity(1000, 2**37 + 5)), here) != ALL
    assert kind_of(Needs(Capacity(1000, 2**40)), here) == ALL, "nobody does: no ring of nobody"


@pytest.mark.parametrize("seed", range(3))
def test_several_criteria_are_one_walk_over_those_that_meet_them(seed: int) -> None:
    """Section 3.2: a query such as cpu < 80 % with others; here: a memory that one in eight has,
    the least loaded first, also after one of them has died."""
    scarce = Needs(Capacity(1000, 2**38))

    async def scenario() -> None:
        network = Network(seed, Faults(loss=0.01))
        peers = await resources(network, 40, LAN.having(ChemicalConfig(fit_s=1.0)), large_each=8)
        rng = random.Random(seed)
        for peer in peers:
            peer.use(rng.choice((0, 30, 77, 100)) if peer.large else 0)
        home = peers[3]
        for crash in (False, True):
            if crash:
                victim = next(p for p in peers if p.large)
                peers.remove(victim)
                await victim.crash()
            for _ in range(5):
                await home.layer.want(home.questions.kind_of(scarce)[0])
                await asyncio.sleep(5)
            before = sum(p.layer.counts["asked"] for p in peers)
            found = await home.ask(scarce, 100_000)
            asked = sum(p.layer.counts["asked"] for p in peers) - before
            loads = {p.contact.id: p.used for p in peers}
            free = [p.contact.id for p in peers if p.large and p.used < 100]
            assert Counter(found) == Counter(free)
            assert [loads[p] for p in found] == sorted(loads[p] for p in found)
            assert asked <= 5 * 5, "five nodes hold them, whatever the others do"
            await asyncio.sleep(12)
        for peer in peers:
            assert not peer.errors
            await peer.close()

    run(scenario())


# --------------------------------------------------------------------------- live


def test_a_workflow_by_chemistry(own_cluster: Callable[..., Cluster]) -> None:
    live = own_cluster(4, "--cpus", "2")
    workflow = live.client().submit(
        {
            "name": "chemistry",
            "strategy": "chemical",
            "tasks": {
                "w": {"foreach": 24, "command": "sleep 0.2; echo {item} > o.{item}",
                      "outputs": ["o.{item}"]},
                "total": {"command": "cat o.* | sort -n | tail -1 > top", "inputs": ["o.*"],
                          "outputs": ["top"]},
            },
        }
    )  # fmt: skip
    assert workflow.wait() == "succeeded"
    assert workflow.read("top") == b"23\n"
    placement = workflow.task("w[3]")["history"][0]["placement"]
    assert placement["strategy"] == "chemical"
    assert "least loaded" in placement["why"]
