"""`python -m bench.papers.deadline`: widths of the paper's models, and windows by two rules.

`--graphs N` random graphs of each kind. The experiment with a million peers is not here yet.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

from valence.workflow.sequences import Graph, decompose, stages

from .models import fork_join, laplace, layered
from .spans import by_paper, by_whole_graph


def widths() -> None:
    print("WIDTHS (stages) OF THE PAPER'S MODELS")
    for wide in (4, 8, 16, 32, 64):
        graph = fork_join(wide)
        print(f"  fork-join 1+{wide}+1: {len(stages(graph))}, {len(decompose(graph))} sequences")
    for side in (3, 4, 5, 6, 8, 10):
        graph = laplace(side)
        print(f"  Laplace {side} x {side}: {len(stages(graph))} (2n-3 = {2 * side - 3})")


def spans(count: int) -> None:
    print(f"\nGRAPHS WITH A TASK THAT HAS NO WINDOW, of {count:,}, on idle equal peers")
    kinds: dict[str, Callable[[random.Random], Graph]] = {
        "layered": layered,
        "Laplace 4 x 4": lambda rng: laplace(4, rng),
    }
    for name, make in kinds.items():
        for factor in (1.1, 3.0):
            rng = random.Random(1)
            graphs = [make(rng) for _ in range(count)]
            paper = sum(not by_paper(g, factor * g.critical_path_s()) for g in graphs)
            ours = sum(not by_whole_graph(g, factor * g.critical_path_s()) for g in graphs)
            print(
                f"  {name}, deadline {factor} x the critical path: "
                f"paper's rule {paper / count:.1%}, over the whole graph {ours / count:.1%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=2500, help="of each kind (2500)")
    options = parser.parse_args()
    widths()
    spans(options.graphs)


if __name__ == "__main__":
    main()
