"""Assigns tasks to pilots so that the sum of ranks is as large as possible. Pure.

Seed 003 calls this NP-complete and takes the largest value of the matrix again and again. It is
the linear assignment problem, solved exactly in polynomial time (`exact`); the paper's algorithm
(`greedy`) serves for matrices too large for the time a round has.

A line of the list may stand for many tasks, and a pilot may have several seats. Lines with more
units than all pilots together have seats compete with no other line, and are left out of the
matrix.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

#: size of the matrix up to which the exact solution takes some tens of milliseconds
CELLS_MAX = 300_000
#: a matrix this small is solved here, without loading a library
SMALL_CELLS = 256
FEW = 2000

#: pilot, line, and how many units
Chosen = list[tuple[int, int, int]]


@dataclass(slots=True)
class Ranks:
    """The values that pilots give to lines, as three parallel lists."""

    pilots: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, pilot: int, line: int, value: float) -> None:
        self.pilots.append(pilot)
        self.lines.append(line)
        self.values.append(value)

    def __len__(self) -> int:
        return len(self.values)


def assign(
    seats: Sequence[int], units: Sequence[int], ranks: Ranks, cells_max: int = CELLS_MAX
) -> tuple[Chosen, bool]:
    """The assignment, and whether it is exact. `seats` of each pilot, `units` of each line."""
    if not len(ranks):
        return [], True
    # a taken seat is better than an empty one, whatever its value
    lowest, highest = min(ranks.values), max(ranks.values)
    lift = 1e-6 * (1.0 + highest - lowest) - min(0.0, lowest)
    if len(ranks) > FEW:
        chosen = _assign_many(seats, units, ranks, lift, cells_max)
        if chosen is not None:
            return chosen, True
    return _assign_few(seats, units, ranks, lift, cells_max)


def _assign_few(
    seats: Sequence[int], units: Sequence[int], ranks: Ranks, lift: float, cells_max: int
) -> tuple[Chosen, bool]:
    plenty, scarce = _plenty_and_scarce(seats, units, ranks)
    # a scarce line counts by its gain over the plentiful one; without a gain it is never chosen
    gains = Ranks()
    for pilot, line, value in scarce:
        gain = value - plenty[pilot][0] if pilot in plenty else value + lift
        if gain > 0:
            gains.add(pilot, line, gain)
    chosen, exactly = _choose(seats, units, gains, cells_max)
    left = list(seats)
    for pilot, _, count in chosen:
        left[pilot] -= count
    chosen += [(p, line, left[p]) for p, (_, line) in plenty.items() if left[p] > 0]
    return chosen, exactly


def _choose(
    seats: Sequence[int], units: Sequence[int], gains: Ranks, cells_max: int
) -> tuple[Chosen, bool]:
    pilots, lines = set(gains.pilots), set(gains.lines)
    if min(len(pilots), len(lines)) <= 1:
        return greedy(seats, units, gains), True  # greedy is exact in this case
    rows = sum(seats[pilot] for pilot in pilots)
    columns = sum(min(units[line], rows) for line in lines)
    if rows * columns <= cells_max:
        return exact(seats, units, gains), True
    return greedy(seats, units, gains), False


def _plenty_and_scarce(
    seats: Sequence[int], units: Sequence[int], ranks: Ranks
) -> tuple[dict[int, tuple[float, int]], list[tuple[int, int, float]]]:
    """Each pilot's best line of those with enough units for all seats, as its fallback; and the
    ranks of all other lines."""
    free = sum(seats)
    plenty: dict[int, tuple[float, int]] = {}
    scarce: list[tuple[int, int, float]] = []
    for pilot, line, value in zip(ranks.pilots, ranks.lines, ranks.values, strict=True):
        if units[line] >= free:
            if pilot not in plenty or value > plenty[pilot][0]:
                plenty[pilot] = (value, line)
        elif units[line] > 0 and seats[pilot] > 0:
            scarce.append((pilot, line, value))
    return plenty, scarce


def greedy(seats: Sequence[int], units: Sequence[int], ranks: Ranks) -> Chosen:
    """The largest value first, as in the paper; all units of a line and pilot at once."""
    seats_left, units_left = list(seats), list(units)
    chosen = []
    for index in sorted(range(len(ranks)), key=ranks.values.__getitem__, reverse=True):
        pilot, line = ranks.pilots[index], ranks.lines[index]
        count = min(seats_left[pilot], units_left[line])
        if count > 0:
            seats_left[pilot] -= count
            units_left[line] -= count
            chosen.append((pilot, line, count))
    return chosen


def exact(seats: Sequence[int], units: Sequence[int], ranks: Ranks) -> Chosen:
    """A row for each seat, a column for each unit; a pair without a rank is worth nothing."""
    pairs = zip(ranks.pilots, ranks.lines, strict=True)
    worth = dict(zip(pairs, ranks.values, strict=True))
    owners = _repeated(ranks.pilots, seats)
    goods = _repeated(ranks.lines, [min(count, len(owners)) for count in units])
    matrix = [[worth.get((pilot, line), 0.0) for line in goods] for pilot in owners]
    chosen = ((owners[row], goods[column]) for row, column in best(matrix))
    counts = Counter(pair for pair in chosen if pair in worth)
    return [(pilot, line, count) for (pilot, line), count in counts.items()]


def _repeated(numbers: Iterable[int], counts: Sequence[int]) -> list[int]:
    """Each of these numbers once, repeated as often as its count says."""
    return [number for number in sorted(set(numbers)) for _ in range(counts[number])]


def best(matrix: list[list[float]]) -> list[tuple[int, int]]:
    """Rows and columns whose values have the largest sum."""
    if len(matrix) * len(matrix[0]) <= SMALL_CELLS:
        return _best_of_few(matrix)
    import numpy as np  # here: of all peers only a site's master needs them
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(np.array(matrix), maximize=True)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def preload() -> None:
    """Load the library that a master needs for its first large round: that takes a moment."""
    import scipy.optimize  # noqa: F401


def _assign_many(
    seats: Sequence[int], units: Sequence[int], ranks: Ranks, lift: float, cells_max: int
) -> Chosen | None:
    """`_assign_few` for thousands of ranks, in arrays; None if the matrix is too large."""
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    pilots, lines, values = map(np.array, (ranks.pilots, ranks.lines, ranks.values))
    places, goods = np.array(seats), np.array(units)
    abundant = goods[lines] >= int(places.sum())
    otherwise = np.full(len(places), -np.inf)
    np.maximum.at(otherwise, pilots[abundant], values[abundant])
    theirs = otherwise[pilots]
    gains = np.where(np.isfinite(theirs), values - theirs, values + lift)
    scarce = ~abundant & (goods[lines] > 0) & (gains > 0) & (places[pilots] > 0)
    some, among = np.unique(pilots[scarce]), np.unique(lines[scarce])
    rows = int(places[some].sum())
    width = np.minimum(goods[among], rows)
    if rows * int(width.sum()) > cells_max:
        return None
    assigned: Chosen = []
    left = places.copy()
    if rows:
        table = np.zeros((len(some), len(among)))
        at = np.searchsorted(some, pilots[scarce]), np.searchsorted(among, lines[scarce])
        table[at] = gains[scarce]
        owners, wares = np.repeat(some, places[some]), np.repeat(among, width)
        whole = np.repeat(np.repeat(table, places[some], 0), width, 1)
        row, column = linear_sum_assignment(whole, maximize=True)
        good = whole[row, column] > 0
        pairs = np.stack((owners[row[good]], wares[column[good]]), 1)
        chosen, counts = np.unique(pairs, axis=0, return_counts=True)
        for (pilot, line), count in zip(chosen.tolist(), counts.tolist(), strict=True):
            assigned.append((pilot, line, count))
            left[pilot] -= count
    first: dict[int, int] = {}
    top = abundant & (values >= theirs)
    for pilot, line in zip(pilots[top].tolist(), lines[top].tolist(), strict=True):
        first.setdefault(pilot, line)
    return assigned + [(p, line, int(left[p])) for p, line in first.items() if left[p] > 0]


def _best_of_few(matrix: list[list[float]]) -> list[tuple[int, int]]:
    """Solved by shortest augmenting paths."""
    if len(matrix) > len(matrix[0]):
        turned = [list(column) for column in zip(*matrix, strict=True)]
        return [(row, column) for column, row in _best_of_few(turned)]
    count, width = len(matrix), len(matrix[0])
    by_row, by_column = [0.0] * (count + 1), [0.0] * (width + 1)  # potentials
    taken = [0] * (width + 1)  # the row that has this column, counted from 1; 0: none
    for row in range(1, count + 1):
        taken[0] = row
        at = 0
        least = [math.inf] * (width + 1)
        before = [0] * (width + 1)
        seen = [False] * (width + 1)
        while True:
            seen[at] = True
            costs = matrix[taken[at] - 1]
            step, following = math.inf, 0
            for column in range(1, width + 1):
                if seen[column]:
                    continue
                cost = -costs[column - 1] - by_row[taken[at]] - by_column[column]
                if cost < least[column]:
                    least[column], before[column] = cost, at
                if least[column] < step:
                    step, following = least[column], column
            for column in range(width + 1):
                if seen[column]:
                    by_row[taken[column]] += step
                    by_column[column] -= step
                else:
                    least[column] -= step
            at = following
            if not taken[at]:
                break
        while at:
            taken[at] = taken[before[at]]
            at = before[at]
    return [(taken[column] - 1, column - 1) for column in range(1, width + 1) if taken[column]]
