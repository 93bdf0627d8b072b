"""`pilots`: regions, lists by differences, the assignment, rounds, masters that are lost."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from typing import Any

import pytest

from valence.protocols.strategies.pilots import assignment, ranking
from valence.protocols.strategies.pilots.listing import Copy, List
from valence.protocols.strategies.pilots.messages import Line
from valence.protocols.strategies.pilots.regions import divide
from valence.protocols.wire.messages import Needs

LOW, HIGH = bytes(20), b"\xff" * 20


# --------------------------------------------------------------------------- the assignment


def value_of(rows: list[tuple[int, int, int]], ranks: list[tuple[int, int, float]]) -> float:
    table = {(p, line): rank for p, line, rank in ranks}
    return sum(count * table[p, line] for p, line, count in rows)


def as_ranks(rows: list[tuple[int, int, float]]) -> assignment.Ranks:
    made = assignment.Ranks()
    for row in rows:
        made.add(*row)
    return made


def by_trying_all(seats: list[int], units: list[int], ranks: list[tuple[int, int, float]]) -> float:
    table = {(p, line): rank for p, line, rank in ranks}
    rows = [p for p, n in enumerate(seats) for _ in range(n)]
    goods = [line for line, n in enumerate(units) for _ in range(n)]
    goods += [-1] * len(rows)
    best = 0.0
    for chosen in set(itertools.permutations(goods, len(rows))):
        pairs = [(p, g) for p, g in zip(rows, chosen, strict=True) if g >= 0]
        if all(pair in table for pair in pairs):
            best = max(best, sum(table[pair] for pair in pairs))
    return best


def test_the_sum_of_ranks_is_as_large_as_can_be() -> None:
    rng = random.Random(4)
    better = 0
    for _ in range(300):
        pilots, lines = rng.randint(1, 3), rng.randint(1, 3)
        seats = [rng.randint(1, 2) for _ in range(pilots)]
        units = [rng.randint(1, 2) for _ in range(lines)]
        ranks = [
            (p, line, rng.randint(1, 50) / 2)
            for p in range(pilots)
            for line in range(lines)
            if rng.random() < 0.8
        ]
        chosen, exactly = assignment.assign(seats, units, as_ranks(ranks))
        assert exactly
        for p in range(pilots):
            assert sum(n for q, _, n in chosen if q == p) <= seats[p]
        for line in range(lines):
            assert sum(n for _, k, n in chosen if k == line) <= units[line]
        found = value_of(chosen, ranks)
        assert found == pytest.approx(by_trying_all(seats, units, ranks))
        better += found > value_of(assignment.greedy(seats, units, as_ranks(ranks)), ranks) + 1e-9
    assert better > 10, "the paper's way is not always best"


def test_few_rows_by_hand_are_as_many_by_the_library() -> None:
    from scipy.optimize import linear_sum_assignment

    rng = random.Random(2)
    for _ in range(200):
        rows, columns = rng.randint(1, 12), rng.randint(1, 12)
        matrix = [[rng.uniform(-5, 5) for _ in range(columns)] for _ in range(rows)]
        own = sum(matrix[r][c] for r, c in assignment._best_of_few(matrix))
        theirs = sum(
            matrix[r][c] for r, c in zip(*linear_sum_assignment(matrix, True), strict=True)
        )
        assert own == pytest.approx(theirs)


def test_thousands_of_ranks_in_arrays_are_as_few_without(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(8)
    for _ in range(40):
        seats = [rng.randint(0, 3) for _ in range(12)]
        units = [rng.choice((0, 1, 2, 100)) for _ in range(15)]
        rows = [(p, i, rng.randint(-20, 50) / 2) for p in range(12) for i in range(15)]
        monkeypatch.setattr(assignment, "FEW", 10**9)
        few, _ = assignment.assign(seats, units, as_ranks(rows))
        monkeypatch.setattr(assignment, "FEW", 0)
        many, _ = assignment.assign(seats, units, as_ranks(rows))
        assert sum(n for *_, n in few) == sum(n for *_, n in many)
        assert value_of(few, rows) == pytest.approx(value_of(many, rows))


def test_what_is_too_large_goes_by_the_largest_first() -> None:
    rng = random.Random(1)
    ranks = [(p, line, rng.random()) for p in range(30) for line in range(30)]
    exact, exactly = assignment.assign([1] * 30, [1] * 30, as_ranks(ranks))
    greedy, not_exactly = assignment.assign([1] * 30, [1] * 30, as_ranks(ranks), cells_max=10)
    assert exactly
    assert not not_exactly
    assert value_of(exact, ranks) >= value_of(greedy, ranks) > 0.9 * value_of(exact, ranks)


# --------------------------------------------------------------------------- ranking


def test_what_is_held_counts_most_then_speed_then_waiting() -> None:
    rank = ranking.by_default
    assert (
        rank(1, 0, 1, 0, 0) > rank(0, 0, 50, 9000, 0) > rank(0, 0, 1, 9000, 0) > rank(0, 0, 1, 0, 0)
    )
    assert rank(0, 0, 1, 0, 0) > rank(0, 5, 1, 0, 0), "what must be fetched is left to others"


def test_an_expression_of_ones_own() -> None:
    found = ranking.ranking("speed * 100 - remote")
    assert found(5, 3, 2, 0, 0) == 197
    assert ranking.problem("local / 1e3 + max(speed, 2)") is None
    for wrong in ("", "local +", "nothing", '"text"', "x" * 300, "1 if 2", "local, remote"):
        assert ranking.problem(wrong), wrong
    assert ranking.ranking("1 / (local - 1)")(1, 0, 0, 0, 0) == 0.0, "counts for nothing"


# --------------------------------------------------------------------------- regions


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 100, 1500])
def test_regions_reach_everybody_once_and_nobody_has_more_than_eight(count: int) -> None:
    rng = random.Random(count)
    ids = [rng.randbytes(20) for _ in range(count)]
    reached: list[bytes] = []
    depths = []

    def spread(low: bytes, high: bytes, above: frozenset[bytes], depth: int) -> None:
        known = [id for id in ids if id not in above and low <= id <= high]
        regions = divide(low, high, known)
        assert len(regions) <= 8
        for region in regions:
            delegate = rng.choice(region.peers)
            reached.append(delegate)
            depths.append(depth)
            spread(region.low, region.high, above | {delegate}, depth + 1)

    spread(LOW, HIGH, frozenset(), 1)
    assert sorted(reached) == sorted(ids)
    assert max(depths, default=0) <= 5


# --------------------------------------------------------------------------- lists


def line(number: int) -> Line:
    return Line(number, Needs())


def test_copies_follow_a_list_by_differences_whatever_is_lost() -> None:
    rng = random.Random(9)
    whole, copies = List(1000), [Copy() for _ in range(5)]
    told = 0
    sent = 0
    for step in range(1, 400):
        if whole.lines and rng.random() < 0.45:
            whole.drop(rng.choice(list(whole.lines)))
        else:
            whole.put(line(step))
        if rng.random() < 0.3:
            base, came, went = whole.since(told)
            told = whole.version
            for copy in copies:
                if rng.random() < 0.3:
                    continue  # lost
                if not copy.follow(base, whole.version, came, went, 0.0):
                    _, every, _ = whole.since(0)
                    assert copy.follow(0, whole.version, every, (), 0.0)
                    sent += len(every)
                sent += len(came)
                assert copy.lines.keys() == whole.lines.keys()
                assert copy.follow(base, whole.version, came, went, 0.0), "twice does no harm"
                assert copy.lines.keys() == whole.lines.keys()


def test_who_is_too_far_behind_gets_all_of_it() -> None:
    whole = List()
    for number in range(30_000):
        whole.put(line(number))
        if number >= 10:
            whole.drop(number - 10)
    base, came, went = whole.since(5)
    assert (base, len(came), went) == (0, 10, ())
    base, came, went = whole.since(whole.version - 4)
    assert base == whole.version - 4
    assert len(came) == 2
    assert len(went) == 2


# --------------------------------------------------------------------------- under faults


@pytest.mark.parametrize("more", [("--strategy", "pilots"), ("--queue",)], ids=lambda m: m[-1])
def test_whole_worlds_with_pilots_and_with_a_queue(more: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "sim", "--seed", "2001", "--seeds", "24", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert "24 runs, 0 violations" in done.stdout, done.stdout[-3000:]


def computed(expression: str) -> Any:
    """In a process of its own: these simulations leave their loops as they are."""
    text = (
        "import json; from bench.papers.pilots.broadcast import broadcast; "
        "from bench.papers.pilots.field import Experiment, experiment; "
        f"print(json.dumps({expression}))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_broadcast_reaches_all_and_nobody_sends_to_more_than_eight() -> None:
    calm, dead, lossy = computed(
        "[broadcast(300), broadcast(300, dead=0.1), broadcast(300, loss=0.05)]"
    )
    assert calm["reached"] == calm["bids"] == 1.0
    assert calm["regions sent to, at most"] <= 8
    assert calm["lists received, at most"] == 1
    assert dead["reached"] == 1.0
    assert lossy["reached"] >= 0.99


def test_a_serial_workflow_through_the_queue_stays_where_its_files_are() -> None:
    made = "(lambda r: [r.hits, r.local, r.delay_s])(experiment(Experiment(60, 180, 'serial')))"
    hits, local, delay_s = computed(made)
    assert hits == 1.0
    assert local >= 0.9
    assert delay_s < 1.0
