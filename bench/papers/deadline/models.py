"""The paper's two models of workflows (Figs. 4 and 5), and random ones beside them."""

from __future__ import annotations

import random

from valence.workflow.sequences import Graph


def fork_join(wide: int, length_s: float = 1.0) -> Graph:
    """Fig. 4: one task, `wide` that follow it, and one that follows them all. Table II's maximum of
    3.33 is that of eight: 10 tasks, of which 3 are on the critical path."""
    middle = [f"m{i}" for i in range(wide)]
    parents: dict[str, tuple[str, ...]] = {"fork": ()}
    parents |= dict.fromkeys(middle, ("fork",))
    parents["join"] = tuple(middle)
    return Graph.of(dict.fromkeys(parents, length_s), parents)


def laplace(side: int, rng: random.Random | None = None) -> Graph:
    """Fig. 5: a diamond of `side` × `side` tasks, each after those left of it and above it. Table
    II's maximum of 1.8 is that of three: 9 tasks, of which 5 are on the critical path."""
    parents = {
        f"{i}.{j}": tuple(f"{a}.{b}" for a, b in ((i - 1, j), (i, j - 1)) if min(a, b) >= 0)
        for i in range(side)
        for j in range(side)
    }
    return Graph.of({t: rng.uniform(0.5, 2.0) if rng else 1.0 for t in parents}, parents)


def layered(rng: random.Random, tasks: int = 20) -> Graph:
    """Layers of random width, each task after some of the layer above."""
    lengths: dict[str, float] = {}
    parents: dict[str, tuple[str, ...]] = {}
    above: list[str] = []
    while len(lengths) < tasks:
        layer = [f"t{len(lengths) + i}" for i in range(rng.randint(1, 5))]
        for task in layer:
            lengths[task] = rng.uniform(0.5, 2.0)
            parents[task] = tuple(
                rng.sample(above, rng.randint(1, min(3, len(above)))) if above else ()
            )
        above = layer
    return Graph.of(lengths, parents)
