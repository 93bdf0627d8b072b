"""`python -m bench.papers.deadline`: the paper's experiments, and what they hide.

Widths of the models and windows by two rules; then a crowd of peers (10,000 of them; `--peers
1000000` for the paper's number, which takes some ten minutes and ten GiB): allocation times by size
(Fig. 6), speed-ups (Table II), traffic and events, each beside the paper's figure; and how much is
accepted, beside a central scheduler that knows everything and a blind one.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from valence.workflow.sequences import Graph, decompose, stages

from .central import central
from .crowd import Crowd, Results
from .models import fork_join, laplace, layered
from .spans import by_paper, by_whole_graph

MODELS: dict[str, Graph] = {"fork-join": fork_join(8), "laplace": laplace(3)}
SIZES: dict[str, dict[str, Graph]] = {
    "fork-join": {f"1+{n}+1": fork_join(n) for n in (4, 16, 64)},
    "laplace": {f"{n} x {n}": laplace(n) for n in (4, 6, 8)},
}
#: Table II, by W
TABLE_II = {"laplace": (2.05, 2.09, 2.18, 2.22), "fork-join": (2.12, 2.85, 2.90, 2.92)}
RATIOS = (1.1, 1.2, 1.3, 1.4)


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


def crowd(model: str, peers: int, seconds: float) -> dict[str, Any]:
    """One model among so many peers, as figures."""
    graph = MODELS[model]
    start = time.monotonic()
    whole = Crowd(peers, lambda: graph)
    results = whole.run(seconds)
    took = sorted(results.allocated_s)
    offered = len(took) + results.refused
    return {
        "model": model,
        "peers": peers,
        "took_s": round(time.monotonic() - start),
        "memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "events": whole.count,
        "workflows": offered,
        "accepted": len(took) / max(1, offered),
        "allocated_s": {"50 %": _at(took, 0.5), "99 %": _at(took, 0.99), "max": took[-1]},
        "speedups": {r: sum(s) / max(1, len(s)) for r, s in sorted(results.speedups.items())},
        "hops": _mean(results.hops),
        "stale": results.stale / max(1, results.seeks),
        "sent": _peaks(whole.sent.most),
        "received": _peaks(whole.received.most),
        "events_per_s": {"mean": whole.events.total / peers / (seconds - 20.0)}
        | _peaks(whole.events.most),
        "busiest_host": whole.events.busiest() / max(1e-9, whole.events.total / peers),
        "handled_us": _handled(results),
    }


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _mean(counts: Counter[int]) -> float:
    return sum(n * count for n, count in counts.items()) / max(1, counts.total())


def _peaks(most: array[int]) -> dict[str, float]:
    ordered = sorted(most)
    return {"75 %": _at(ordered, 0.75), "99 %": _at(ordered, 0.99), "max": ordered[-1]}


def _handled(results: Results) -> dict[str, int]:
    counted = sorted(results.handled_us.items())
    total, listed = sum(n for _, n in counted), dict.fromkeys(("50 %", "99 %", "99.9 %"), 0)
    for name in listed:
        wanted, seen = float(name.split()[0]) / 100 * total, 0
        for microseconds, count in counted:
            seen += count
            if seen >= wanted:
                listed[name] = microseconds
                break
    return listed


def show(figures: dict[str, Any]) -> None:
    model = figures["model"]
    print(f"\n{model.upper()}, {figures['peers']:,} peers, {figures['workflows']:,} workflows")
    print(
        f"  run: {figures['took_s']} s, {figures['memory_gib']} GiB, "
        f"{figures['events']:,} events; {figures['hops']:.2f} hops, {figures['stale']:.2%} stale"
    )
    times = ", ".join(f"{k} {v:.2f} s" for k, v in figures["allocated_s"].items())
    print(f"  allocated within {times} (paper: a few seconds)")
    for ratio, published in zip(RATIOS, TABLE_II[model], strict=True):
        speedup = figures["speedups"].get(str(ratio), 0.0)
        print(f"  speed-up at W {ratio}: {speedup:.2f} (paper: {published})")
    rows = (
        ("sent", "75 % under 2,500, max 8,200"),
        ("received", "75 % under 1,000, 99 % under 8,000, max 29,000"),
        ("events_per_s", "mean 2, max 40"),
    )
    for name, paper in rows:
        row = ", ".join(f"{k} {v:,.2f}".replace(".00", "") for k, v in figures[name].items())
        unit = "bytes in the worst second" if name != "events_per_s" else "per peer"
        print(f"  {name.replace('_per_s', ' a second')}: {row} {unit} (paper: {paper})")
    handled = ", ".join(f"{k} {v} us" for k, v in figures["handled_us"].items())
    print(f"  a message takes {handled} (paper: under 1 ms)")
    busiest = f"busiest host {figures['busiest_host']:.0f} x the mean's events"
    print(f"  accepted {figures['accepted']:.1%}; {busiest}")


def sizes(peers: int, seconds: float) -> None:
    print(f"\nALLOCATION BY SIZE (Fig. 6), {peers:,} peers")
    for model, graphs in SIZES.items():
        for name, graph in graphs.items():
            results = Crowd(peers, lambda graph=graph: graph).run(seconds)  # type: ignore[misc]
            took = sorted(results.allocated_s)
            print(
                f"  {model} {name} ({len(stages(graph))} stages): {len(took)} allocated, "
                f"50 % {_at(took, 0.5):.2f} s, 99 % {_at(took, 0.99):.2f} s"
            )


def compared(peers: int, seconds: float) -> None:
    print(f"\nWHAT IS ACCEPTED at 95 % load, {peers:,} peers")
    for model, graph in MODELS.items():
        best = central(peers, lambda graph=graph: graph, seconds)  # type: ignore[misc]
        most = best.accepted / max(1, best.accepted + best.refused)
        print(
            f"  {model}: central, which knows everything, {most:.1%}, speed-up {best.speedup:.2f}"
        )
        modes: dict[str, dict[str, Any]] = {
            "tree": {},
            "tree with the points of Table I": {"points": "paper"},
            "blind": {"is_blind": True},
        }
        for name, mode in modes.items():
            made = Crowd(peers, lambda graph=graph: graph, **mode)  # type: ignore[misc]
            results = made.run(seconds)
            accepted = len(results.allocated_s)
            share = accepted / max(1, accepted + results.refused)
            ups = [s for rows in results.speedups.values() for s in rows]
            mean = sum(ups) / max(1, len(ups))
            print(f"    {name}: {share:.1%}, {share / most:.2f} of central, speed-up {mean:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.papers.deadline", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument("--peers", type=int, default=10_000, metavar="N", help="peers (10,000)")
    parser.add_argument("--seconds", type=float, default=120.0, help="virtual seconds (120)")
    parser.add_argument("--graphs", type=int, default=2500, help="random graphs of a kind (2500)")
    parser.add_argument("--model", choices=MODELS, help="only the crowd with this model, as JSON")
    options = parser.parse_args()
    if options.model:
        print(json.dumps(crowd(options.model, options.peers, options.seconds)))
        return
    widths()
    spans(options.graphs)
    command = [sys.executable, "-m", "bench.papers.deadline", "--peers", str(options.peers)]
    command += ["--seconds", str(options.seconds)]
    both = [  # one on each core
        subprocess.Popen([*command, "--model", model], stdout=subprocess.PIPE) for model in MODELS
    ]
    for process in both:
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit("a crowd has failed")
        show(json.loads(output))
    few = min(options.peers, 20_000)
    sizes(few, 60.0)
    compared(few, 120.0)


if __name__ == "__main__":
    main()
