"""A central scheduler that knows everything at once and for nothing: what a crowd is compared with.

Workflows come one after the other, as in `crowd`. Each is accepted if, with every task on the peer
where it ends first, the last one ends by the deadline. Peers are known by when they come free and
by their speed; messages take no time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from valence.workflow.sequences import Graph


@dataclass(frozen=True, slots=True)
class CentralResult:
    accepted: int
    refused: int
    speedup: float


def central(
    peers: int,
    make: Callable[[], Graph],
    seconds: float,
    *,
    load: float = 0.95,
    length_s: float = 300.0,
    ratios: Sequence[float] = (1.1, 1.2, 1.3, 1.4),
    seed: int = 1,
    from_s: float = 20.0,
) -> CentralResult:
    rng = random.Random(seed)
    speeds = [2.0 ** (round(4 * rng.uniform(-1.0, 1.0)) / 4) for _ in range(peers)]
    free: dict[float, list[float]] = {}  # of each speed, when its peers come free: a heap
    for speed in speeds:
        busy_s = rng.random() * length_s / speed if rng.random() < load else 0.0
        free.setdefault(speed, []).append(busy_s)
    for times in free.values():
        heapq.heapify(times)
    graph = make()
    rate = load * sum(speeds) / (length_s * len(graph.lengths))
    now, accepted, refused, speedups = 0.0, 0, 0, 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        total_s = length_s * len(graph.lengths) / speeds[rng.randrange(peers)]
        took_s = _place(graph, free, now, length_s, now + total_s / rng.choice(ratios))
        if now < from_s:
            continue
        if took_s is None:
            refused += 1
        else:
            accepted += 1
            speedups += total_s / took_s
    return CentralResult(accepted, refused, speedups / max(1, accepted))


def _place(
    graph: Graph, free: dict[float, list[float]], now: float, length_s: float, deadline: float
) -> float | None:
    """How long the workflow takes; None, with nothing changed, if it would be late."""
    ends: dict[str, float] = {}
    taken: list[tuple[float, float, float]] = []  # speed, when it was free, when it is now
    for task in graph.lengths:
        ready = max([now, *(ends[p] for p in graph.parents[task])])
        speed = min(free, key=lambda s: max(ready, free[s][0] if free[s] else 1e18) + length_s / s)
        was = heapq.heappop(free[speed])
        ends[task] = max(ready, was) + length_s / speed
        taken.append((speed, was, ends[task]))
        if ends[task] > deadline:
            for speed, was, _ in taken:
                heapq.heappush(free[speed], was)
            return None
    for speed, _, end in taken:
        heapq.heappush(free[speed], end)
    return max(ends.values()) - now
