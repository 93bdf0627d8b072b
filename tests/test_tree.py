"""The tree of summaries: reference points, cells, branches, its shape, and whole peers in it."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.papers.deadline.crowd import Crowd
from bench.papers.deadline.models import fork_join, laplace
from sim.loop import run_out
from sim.mutants import applied
from sim.plan import Plan
from sim.world import World
from tests.test_promises import booked, document, over, steady, submitted
from valence.protocols.capacity.bookings import Bookings, length_here
from valence.protocols.capacity.calendar import BookingAsk
from valence.protocols.strategies.deadline import summary
from valence.protocols.strategies.deadline.branch import CELL_BYTES, UPDATE_BYTES, Branch, divided
from valence.protocols.strategies.deadline.config import DeadlineConfig
from valence.protocols.strategies.deadline.leaf import Leaf
from valence.protocols.strategies.deadline.messages import TreePlace
from valence.protocols.strategies.deadline.points import dyadic, paper
from valence.protocols.strategies.deadline.service import DeadlineService
from valence.protocols.strategies.deadline.shape import Shape, height
from valence.protocols.strategies.deadline.summary import (
    HoleCell,
    Sort,
    Sought,
    bounded,
    cell_of,
    end_in,
    sort_of,
    summarised,
)
from valence.protocols.strategies.deadline.tree import _cells, _message
from valence.protocols.wire.codec import FrameKind, encode
from valence.protocols.wire.messages import Capacity, Contact, Member, Needs, Traits

CORE = Capacity(1000)
SORT = Sort(1000, 0, 0, 1.0)
CONFIG = DeadlineConfig()


# --------------------------------------------------------------------------- reference points


@pytest.mark.parametrize(
    ("made", "points"),
    [
        ("4:33", "4:40 4:50 5:00 5:30 6:00 8:00 12:00 16:00 24:00 48:00"),
        ("5:48", "5:55 6:00 6:15 6:30 7:00 8:00 12:00 16:00 24:00 48:00"),
        ("17:17", "17:25 17:30 17:45 18:00 19:00 20:00 24:00 32:00 40:00 48:00"),
    ],
)
def test_table_one(made: str, points: str) -> None:
    def seconds(text: str) -> float:
        hours, minutes = map(int, text.split(":"))
        return 60.0 * (60 * hours + minutes)

    assert paper(seconds(made))[1:] == [seconds(point) for point in points.split()]


def test_the_papers_points_fall_together_and_ours_never_do() -> None:
    double = sum(len(paper(60.0 * minute)) < 11 for minute in range(24 * 60))
    assert double / (24 * 60) == pytest.approx(1 / 6, abs=0.01)
    for now in (0.0, 17.3, 1e6 + 0.7):
        points = dyadic(now)
        assert points == sorted(set(points))


@given(st.floats(0, 1e9), st.floats(0, 1e5))
@settings(max_examples=200, deadline=None)
def test_a_far_point_stays_one_as_it_comes_nearer(now: float, later: float) -> None:
    points = set(dyadic(now + later)[1:])
    kept = [p for p in dyadic(now)[1:] if p > now + later + 1.0]
    grid = [min(p for p in points if p >= q) - q for q in kept if q <= max(points)]
    assert all(gap == 0 or gap < q - now for gap, q in zip(grid, kept, strict=False))


# --------------------------------------------------------------------------- cells


def sought(*rows: tuple[float, float, float]) -> list[Sought]:
    return [Sought(Needs(CORE), length, start, end) for length, start, end in rows]


@pytest.mark.parametrize("mutant", ["", "summaries-round-up"])
def test_what_fits_into_a_cell_fits_into_every_hole_of_it(mutant: str) -> None:
    rng = random.Random(5)
    invented = 0
    with applied(mutant):
        for _ in range(3000):
            now = 1000.0 + rng.random() * 50
            start = now + rng.choice((0.0, rng.uniform(0, 40)))
            end = rng.choice((math.inf, start + rng.uniform(0.5, 60)))
            cell = cell_of((SORT, start, end), dyadic(now), now)
            line = now + rng.uniform(0, 30)
            tasks = sought(*[
                (rng.uniform(0.1, 8), line, line + rng.uniform(5, 80))
                for _ in range(rng.randint(1, 3))
            ])  # fmt: skip
            if cell is None or end_in(cell, tasks) == math.inf:
                continue
            at = start
            for task in tasks:
                at = max(at, task.start) + length_here(task.length_s, 1.0)
                invented += at > task.end + 1e-6 or at > end + 1e-6
    assert (invented == 0) is not bool(mutant)


def test_a_summary_hides_the_rarest_cells() -> None:
    cells = Counter({HoleCell(SORT, 0.0, float(n), 1.0): n for n in range(1, 200)})
    few = bounded(cells, 96)
    assert len(few) == 96
    assert min(few.values()) == 104


def test_sorts_are_rounded_down() -> None:
    sort = sort_of(Capacity(7000, 3 * 2**30 + 5, 0, 1), Traits(arch="x86_64", speed=1.3))
    assert sort.millicores == 4000
    assert sort.memory_bytes == 2 * 2**30
    assert 1.1 < sort.speed <= 1.3
    assert sort.meets(Needs(Capacity(4000, 2**31), arch="x86_64"))
    assert not sort.meets(Needs(Capacity(1000), arch="arm64"))
    assert not sort.meets(Needs(Capacity(1000), labels=("fast",)))


def test_a_leaf_tells_of_its_holes_for_one_core_and_for_more() -> None:
    peer = Bookings(Capacity(4000), 1.0, 15.0, 120.0, 100)
    leaf = Leaf(peer, Traits(), CONFIG, dyadic)
    peer.hold(b"h", "w", "o", [BookingAsk(Capacity(3000), 10.0, 1000.0, math.inf, 10.0)], 1000.0)
    holes = {(sort.millicores, start, end) for sort, start, end in leaf.holes(1000.0)}
    assert holes == {
        (1000, 1000.0, math.inf), (2000, 1010.0, math.inf), (4000, 1010.0, math.inf),
    }  # fmt: skip


# --------------------------------------------------------------------------- branches


def test_best_fit_is_the_shortest_hole_that_suffices() -> None:
    branch = Branch(CONFIG)
    for child, end in (("short", 1016.0), ("long", 1064.0)):
        cells = summarised([(SORT, 1000.0, end)], dyadic(1000.0), 1000.0)
        branch.heard(child, 1, cells, 1000.0)
    branch.heard("idle", 1, summarised([(SORT, 0.0, math.inf)], dyadic(1000.0), 1000.0), 1000.0)
    assert branch.choose(sought((5, 1000, 1100)), frozenset()) == "short"
    assert branch.choose(sought((20, 1000, 1100)), frozenset()) == "long"
    assert branch.choose(sought((20, 1000, 1100)), frozenset()) == "idle"


@pytest.mark.parametrize("mutant", ["", "routed-room-stays-on-offer"])
def test_what_was_routed_is_deducted_until_the_next_summary(mutant: str) -> None:
    branch = Branch(CONFIG)
    cells = summarised([(SORT, 0.0, math.inf)], dyadic(1000.0), 1000.0)
    branch.heard("child", 1, cells, 1000.0)
    with applied(mutant):
        assert branch.choose(sought((5, 1000, 1100)), frozenset()) == "child"
        assert (branch.choose(sought((5, 1000, 1100)), frozenset()) is None) is not bool(mutant)
    assert not branch.heard("child", 1, cells, 1001.0), "an old summary"
    assert branch.heard("child", 2, cells, 1001.0)
    assert branch.choose(sought((5, 1000, 1100)), frozenset()) == "child"


@pytest.mark.parametrize("mutant", ["", "updates-without-limit"])
def test_updates_keep_their_distance(mutant: str) -> None:
    branch, sent = Branch(CONFIG), []
    with applied(mutant):
        for n in range(1000):
            now = 1000.0 + n / 100
            branch.heard("child", n + 1, Counter({HoleCell(SORT, now, math.inf, math.inf): 1}), now)
            if branch.update(now) is not None:
                sent.append(now)
    gaps = [b - a for a, b in itertools.pairwise(sent)]
    assert (min(gaps) >= CONFIG.update_gap_s - 0.001) is not bool(mutant)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=60))
@settings(max_examples=200, deadline=None)
def test_a_branch_has_what_its_children_have_less_what_was_routed(steps: list[Any]) -> None:
    branch, told = Branch(CONFIG), dict[int, Counter[HoleCell]]()
    for seq, (child, count, is_seek) in enumerate(steps, 1):
        if is_seek:
            chosen = branch.choose(sought((1, 0, 1e6)), frozenset())
            if chosen is not None:
                told[chosen].subtract([HoleCell(SORT, 0.0, math.inf, math.inf)])  # type: ignore[index]
        else:
            cells = Counter({HoleCell(SORT, 0.0, math.inf, math.inf): count} if count else {})
            branch.heard(child, seq, Counter(cells), 0.0)
            told[child] = cells
    total = sum(max(0, n) for cells in told.values() for n in cells.values())
    assert sum(branch.summary().values()) == total


def test_a_sequence_is_divided_where_its_halves_are_about_equal() -> None:
    tasks = sought((4, 0, 99), (1, 0, 99), (1, 0, 99), (2, 0, 99))
    pieces = divided(tasks)
    assert pieces is not None
    assert [[t.length_s for t in piece] for piece in pieces] == [[4], [1, 1, 2]]
    assert divided(tasks[:1]) is None


def test_the_size_of_an_update_is_counted_as_it_is_encoded() -> None:
    now = 1_700_000_000.3
    rng = random.Random(2)
    holes = [(SORT, now + rng.uniform(0, 3000), math.inf) for _ in range(20)]
    holes += [(SORT, h[1], h[1] + rng.uniform(1, 900)) for h in holes]
    cells = summarised(holes, dyadic(now), now)
    place = TreePlace(1, b"c" * 20)
    message = _message(place, TreePlace(2, b"p" * 20), 77, cells, now)
    real = len(encode(FrameKind.REQUEST, 2**40, message))
    assert real == pytest.approx(UPDATE_BYTES + CELL_BYTES * len(cells), rel=0.35)
    assert _cells(message) == cells


# --------------------------------------------------------------------------- the shape


def members(count: int, site: str = "here") -> list[Member]:
    rng = random.Random(count)
    return [
        Member(
            Contact(rng.randbytes(20), f"10.0.{n // 250}.{n % 250}", 1), traits=Traits(site=site)
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 8, 300, 3000])
def test_every_peer_is_below_one_root(count: int) -> None:
    some = members(count)
    shape = Shape(some)
    root = shape.order[0]
    sizes: Counter[bytes] = Counter()
    for member in some:
        place = member.contact.id
        for level in range(1, shape.levels + 1):
            place = shape.branch(level, place)
        assert place == root
        sizes[shape.branch(1, member.contact.id)] += 1
    assert max(sizes.values()) < 16 * 12
    assert shape.levels <= 5


def test_a_death_moves_only_what_is_beside_it() -> None:
    some = members(1000)
    before = Shape(some)
    for victim in some[::97]:
        after = Shape([m for m in some if m is not victim])
        moved = [peer for peer in after.order if before.branch(1, peer) != after.branch(1, peer)]
        assert len(moved) < 150
        if height(victim.contact.id) == 0 and before.order[0] != victim.contact.id:
            assert not moved


def test_neighbours_share_a_branch() -> None:
    shape = Shape([*members(200, "one"), *members(201, "two")])
    heads = [shape.branch(1, peer) for peer in shape.order]
    assert heads == sorted(heads, key=shape.order.index)
    assert all(shape.host(1, head) in shape for head in set(heads))


# --------------------------------------------------------------------------- whole peers


async def forest(peers: int) -> World:
    world = World(Plan(5, peers=peers, faults=(), strategy="deadline"))
    world._config = world._config.having(DeadlineConfig(direct_max=0))
    for _ in range(peers):
        world.add_host()
    for host in world.hosts:
        steady(host)
    await world._until(world._all_know_all, 60.0, "the peers never found each other")
    await asyncio.sleep(90.0)  # what was told to hosts of other shapes is forgotten
    return world


def trees(world: World) -> list[Any]:
    return [host.enactment.service(DeadlineService).tree for host in world.up()]


def test_homes_find_slots_through_the_tree_and_promises_are_kept() -> None:
    async def scenario() -> None:
        world = await forest(24)
        ids = [(h, await submitted(h, document("90s", 1.0))) for h in world.hosts[::3]]
        counts: Counter[str] = Counter()
        for tree in trees(world):
            counts.update(tree.counts)
        assert counts["found"] >= 8 * 4  # of each workflow, four sequences
        assert counts["stale"] < counts["found"] / 5
        for host, workflow in ids:
            assert (await over(host, workflow))["promise"]["state"] == "kept"
        await asyncio.sleep(20.0)
        assert booked(world) == 0

    run_out(scenario())


def test_in_a_quiet_world_no_summary_counts_more_than_there_is() -> None:
    async def scenario() -> None:
        world = await forest(24)
        for host in world.hosts[::4]:
            await submitted(host, document("500s", 60.0))
        await asyncio.sleep(45.0)
        all_trees = trees(world)
        shape = all_trees[0].shape
        for tree in all_trees:
            for place, branch in tree.branches.items():
                below = [
                    t for t in all_trees
                    if shape.branch(place.level, t._me.head) == place.head
                ]  # fmt: skip
                truth: Counter[float] = Counter()
                for other in below:
                    truth.update(cell.sort.millicores for cell in other.leaf._told.elements())
                told: Counter[float] = Counter()
                for cell, count in branch.summary().items():
                    told[cell.sort.millicores] += count
                assert all(count <= truth[size] for size, count in told.items()), (
                    place,
                    told,
                    truth,
                )

    run_out(scenario())


def test_requests_survive_the_hosts_of_the_top() -> None:
    async def scenario() -> None:
        world = await forest(24)
        shape = trees(world)[0].shape
        top = shape.host(shape.levels, shape.order[0])
        victims = [h for h in world.hosts if h.id in (top, shape.order[0])][:2]
        asker = next(h for h in world.hosts if h not in victims)
        for victim in victims:
            victim.kill()
            victim.gone = True
        loop = asyncio.get_running_loop()
        start = loop.time()
        workflow = await submitted(asker, document("200s", 1.0))
        assert loop.time() - start < 2 * 2.0  # its two stages, one after the other
        assert (await over(asker, workflow))["promise"]["state"] == "kept"

    run_out(scenario())


# --------------------------------------------------------------------------- a crowd


@pytest.mark.parametrize(("graph", "stages"), [(fork_join(8), 2), (laplace(3), 3)])
def test_a_crowd_is_allocated_within_a_few_round_trips(graph: Any, stages: int) -> None:
    results = Crowd(2000, lambda: graph).run(60.0)
    took = sorted(results.allocated_s)
    assert len(took) > 5
    assert took[len(took) // 2] < 0.4 * stages
    assert sum(results.hops.values()) > 9 * len(took) / 3


def test_a_crowd_is_its_seed() -> None:
    runs = [Crowd(300, lambda: fork_join(4), seed=3).run(60.0) for _ in range(2)]
    assert runs[0].allocated_s == runs[1].allocated_s
    assert summary.BEGUN == 0.0
