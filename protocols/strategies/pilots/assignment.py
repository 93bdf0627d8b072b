"""Which pilot gets which task: so that the sum of ranks is as large as can be. Pure.

Seed 003 calls this NP-complete and takes the largest value of the matrix again and again. It is the
linear assignment problem, solved exactly in polynomial time (`exact`); the paper's way (`greedy`)
is for matrices too large for the time a round has.

A line of the list may stand for many tasks, and a pilot may have room for several: lines that all
pilots together can't exhaust compete with nobody, and are left out of the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: of the matrix: within this the exact solution takes some tens of milliseconds
CELLS_MAX = 300_000

#: pilot, line and rank
Rank = tuple[int, int, float]


def assign(
    seats: Sequence[int], units: Sequence[int], ranks: Sequence[Rank], cells_max: int = CELLS_MAX
) -> tuple[list[tuple[int, int, int]], bool]:
    """`seats` of each pilot, `units` of each line: pilot, line and how many. And whether
    exactly."""
    free = sum(seats)
    # a line that has enough for everybody is any pilot's second choice, at its own rank
    plenty: dict[int, tuple[float, int]] = {}
    scarce: list[Rank] = []
    for pilot, line, rank in ranks:
        if units[line] >= free:
            if pilot not in plenty or rank > plenty[pilot][0]:
                plenty[pilot] = (rank, line)
        elif units[line] > 0:
            scarce.append((pilot, line, rank))
    # what is worse than what there is plenty of is never chosen
    scarce = [row for row in scarce if row[0] not in plenty or row[2] > plenty[row[0]][0]]
    rows = sum(seats[pilot] for pilot in {pilot for pilot, _, _ in scarce})
    columns = sum(min(units[line], rows) for line in {line for _, line, _ in scarce})
    if not scarce:
        chosen, exactly = [], True
    elif rows * columns <= cells_max:
        chosen, exactly = exact(seats, units, scarce, plenty), True
    else:
        chosen, exactly = greedy(seats, units, scarce), False
    left = list(seats)
    for pilot, _, count in chosen:
        left[pilot] -= count
    for pilot, (_, line) in plenty.items():
        if left[pilot] > 0:
            chosen.append((pilot, line, left[pilot]))
    return chosen, exactly


def greedy(
    seats: Sequence[int], units: Sequence[int], ranks: Sequence[Rank]
) -> list[tuple[int, int, int]]:
    """The largest value first, as in the paper; what belongs together at once."""
    seats_left, units_left = list(seats), list(units)
    found = []
    for pilot, line, _ in sorted(ranks, key=lambda row: -row[2]):
        count = min(seats_left[pilot], units_left[line])
        if count > 0:
            seats_left[pilot] -= count
            units_left[line] -= count
            found.append((pilot, line, count))
    return found


def exact(
    seats: Sequence[int],
    units: Sequence[int],
    ranks: Sequence[Rank],
    otherwise: dict[int, tuple[float, int]],
) -> list[tuple[int, int, int]]:
    """A row for each seat, a column for each unit. `otherwise`: what a seat is worth to a pilot
    that gets none of these."""
    import numpy as np  # here: of all peers only a site's master needs them
    from scipy.optimize import linear_sum_assignment

    pilots = sorted({pilot for pilot, _, _ in ranks})
    lines = sorted({line for _, line, _ in ranks})
    rows = sum(seats[p] for p in pilots)
    row_of: dict[int, int] = {}
    column_of: dict[int, int] = {}
    owners: list[int] = []
    goods: list[int] = []
    for p in pilots:
        row_of[p] = len(owners)
        owners += [p] * seats[p]
    for line in lines:
        column_of[line] = len(goods)
        goods += [line] * min(units[line], rows)
    if not owners or not goods:
        return []
    values = {(p, line): rank for p, line, rank in ranks}
    # a pair that is not to be is worth less than all that are, together
    least = min(values.values())
    spread = 1.0 + max(values.values()) - least
    none = -spread * (min(len(owners), len(goods)) + 1)
    matrix: Any = np.full((len(owners), len(goods)), none)
    for (p, line), rank in values.items():
        worth = rank - otherwise[p][0] if p in otherwise else rank - least + 1.0
        r, c = row_of[p], column_of[line]
        matrix[r : r + seats[p], c : c + min(units[line], rows)] = worth
    counted: dict[tuple[int, int], int] = {}
    chosen_rows, chosen_columns = linear_sum_assignment(matrix, maximize=True)
    for r, c in zip(chosen_rows.tolist(), chosen_columns.tolist(), strict=True):
        if matrix[r, c] > none:
            pair = (owners[r], goods[c])
            counted[pair] = counted.get(pair, 0) + 1
    return [(pilot, line, count) for (pilot, line), count in counted.items()]
