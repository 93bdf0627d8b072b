"""`make papers`: the experiments of seed 003, with Valence's own code on the simulator.

`python -m bench.papers.pilots [--sizes 100:300,…] [--kinds serial,…] [--runs 3] [--out DIR]` prints
the quantities of the paper's Figures 2 to 8 as tables, beside the paper's own numbers, and draws
them if matplotlib is installed. Sizes are pilots and tasks. As in the paper, each kind of workflow
runs several times, and the tables show the mean and its standard deviation. *greedy* is our code
with the paper's assignment, up to 500 pilots. It takes half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from sim.loop import with_fixed_hashes
from valence.display import Display

from .broadcast import broadcast
from .field import KINDS, Experiment, Result, experiment
from .live import live
from .plots import draw

SIZES = "100:300,500:1500,1500:5000,1500:10000"
MODES = ("pre-DHT", "centralised", "distributed", "greedy")
GREEDY_PILOTS_MAX = 500
PAPER = {"pre-DHT": "12", "centralised": "9", "distributed": "5"}
#: seconds between tasks, where the paper gives numbers
PAPER_DELAY = {
    "pre-DHT": "5, then far more", "centralised": "5, then far more",
    "distributed": "20, at any size",
}  # fmt: skip

Results = dict[Experiment, Result]


def measure(sizes: list[tuple[int, int]], kinds: list[str], runs: int, jobs: int) -> Results:
    plans = [
        Experiment(pilots, tasks, kind, mode, seed)
        for pilots, tasks in sizes
        for mode in MODES
        for kind in kinds
        for seed in range(1, runs + 1)
        if mode != "greedy" or pilots <= GREEDY_PILOTS_MAX
    ]
    plans.sort(key=lambda plan: -plan.pilots * plan.tasks)
    results: Results = {}
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        rows = zip(plans, pool.imap(experiment, plans, chunksize=1), strict=True)
        for number, (plan, result) in enumerate(rows, start=1):
            what = f"{plan.mode} {plan.kind}, {plan.pilots} pilots, {plan.tasks} tasks"
            print(f"{number} of {len(plans)}: {what}, run {plan.seed}", file=sys.stderr, flush=True)
            results[plan] = result
    return results


def table(results: Results, sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    rows = []
    for pilots, tasks in sizes:
        for mode in MODES:
            some = {
                plan: result
                for plan, result in results.items()
                if (plan.pilots, plan.tasks, plan.mode) == (pilots, tasks, mode)
            }
            if some:
                rows.append({"pilots": pilots, "tasks": tasks, "mode": mode, **_row(some)})
    return rows


def _row(some: Results) -> dict[str, Any]:
    results = list(some.values())
    kinds = list(dict.fromkeys(plan.kind for plan in some))
    by_kind = {kind: [r for plan, r in some.items() if plan.kind == kind] for kind in kinds}
    row: dict[str, Any] = {
        "requests": mean(r.requests / r.tasks for r in results),
        "messages": mean(r.messages / r.tasks for r in results),
        "bytes": mean(r.bytes / r.tasks for r in results),
        "delay_max_s": max(d for r in results for _, d in r.delays),
        "requests_of": {k: max(r.requests / r.tasks for r in rs) for k, rs in by_kind.items()},
        "delay_of_s": {k: median(r.delay_s for r in rs) for k, rs in by_kind.items()},
        "hits": {k: mean(r.hits for r in rs) for k, rs in by_kind.items()},
        "local": {k: mean(r.local for r in rs) for k, rs in by_kind.items()},
        "turnaround_of_s": {k: mean(r.seconds for r in rs) for k, rs in by_kind.items()},
    }
    values = {
        "requests_all": [float(r.requests) for r in results],
        "delay_s": [r.delay_s for r in results],
        "turnaround_s": [r.seconds for r in results],
        "hits_all": [r.hits for r in results],
        "local_all": [r.local for r in results],
    }
    for name, numbers in values.items():
        row[name], row[f"{name}_error"] = mean(numbers), _error(numbers)
    return row


def _error(numbers: Sequence[float]) -> float:
    """The standard deviation of their mean."""
    return float(stdev(numbers) / len(numbers) ** 0.5) if len(numbers) > 1 else 0.0


def tell(rows: list[dict[str, Any]], reached: list[dict[str, float]]) -> None:
    display = Display()
    display.table(
        ("PILOTS", "TASKS", "MODE", "REQUESTS A TASK", "PAPER", "DELAY", "PAPER", "TURNAROUND",
         "MESSAGES", "KB"),
        [
            (str(r["pilots"]), str(r["tasks"]), r["mode"], f"{r['requests']:.2f}",
             PAPER.get(r["mode"], ""), f"{r['delay_s']:.2f} s", PAPER_DELAY.get(r["mode"], ""),
             f"{r['turnaround_s']:.0f} ± {r['turnaround_s_error']:.0f} s", f"{r['messages']:.1f}",
             f"{r['bytes'] / 1000:.1f}")
            for r in rows
        ],
    )  # fmt: skip
    print()
    display.table(
        ("PILOTS", "TASKS", "MODE", "WORKFLOW", "SOME CACHE", "LOCAL", "REQUESTS", "DELAY",
         "TURNAROUND"),
        [
            (str(r["pilots"]), str(r["tasks"]), r["mode"], kind,
             f"{r['hits'][kind]:.3f}", f"{r['local'][kind]:.3f}", f"{r['requests_of'][kind]:.2f}",
             f"{r['delay_of_s'][kind]:.3f} s", f"{r['turnaround_of_s'][kind]:.0f} s")
            for r in rows
            for kind in r["hits"]
        ],
    )  # fmt: skip
    print()
    display.table(
        ("BROADCAST", "REACHED", "BIDS", "REGIONS", "SECONDS"),
        [
            (name, f"{100 * b['reached']:.1f} %", f"{100 * b['bids']:.1f} %",
             str(b["regions sent to, at most"]), f"{b['seconds']:.2f}")
            for name, b in zip(("", "a tenth dead", "5 % lost"), reached, strict=True)
        ],
    )  # fmt: skip


def tell_live(rows: list[dict[str, Any]], as_json: bool) -> int:
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    Display().table(
        ("PILOTS", "TASKS", "WORKFLOW", "REQUESTS A TASK", "DELAY", "SOME CACHE", "LOCAL",
         "TURNAROUND"),
        [
            (str(r["pilots"]), str(r["tasks"]), r["kind"], f"{r['requests']:.2f}",
             f"{r['delay_s']:.2f} s", f"{r['hits']:.3f}", f"{r['local']:.3f}",
             f"{r['turnaround_s']:.0f} s")
            for r in rows
        ],
    )  # fmt: skip
    return 0


def main() -> int:
    with_fixed_hashes("bench.papers.pilots")
    parser = argparse.ArgumentParser(prog="python -m bench.papers.pilots", description=__doc__)
    parser.add_argument("--sizes", default=SIZES, help=f"pilots:tasks, … ({SIZES})")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind of workflow")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", default="papers/pilots", help="directory for plots")
    about = "instead: so many pilots as processes of this machine, and real tasks"
    parser.add_argument("--live", type=int, metavar="PILOTS", default=0, help=about)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.live:
        return tell_live(live(options.live, options.kinds.split(",")), options.json)
    sizes = [(int(a), int(b)) for a, b in (s.split(":") for s in options.sizes.split(","))]
    results = measure(sizes, options.kinds.split(","), max(1, options.runs), options.jobs)
    rows = table(results, sizes)
    most = max(pilots for pilots, _ in sizes)
    reached = [broadcast(most), broadcast(most, dead=0.1), broadcast(most, loss=0.05)]
    largest = max(sizes, key=lambda size: size[0] * size[1])
    serial = {mode: results.get(Experiment(*largest, kind="serial", mode=mode)) for mode in MODES}
    over_time = {mode: result for mode, result in serial.items() if result is not None}
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in rows)]
    size = f"{largest[0]:,} pilots, {largest[1]:,} tasks"
    drawn = draw(rows, modes, over_time, size, Path(options.out))
    if options.json:
        print(json.dumps({"rows": rows, "broadcast": reached}, indent=2))
        return 0
    tell(rows, reached)
    print(f"\nplots: {options.out}" if drawn else "\nno plots: pip install -e '.[papers]'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
