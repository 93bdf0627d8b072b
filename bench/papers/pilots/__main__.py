"""`make papers`: the experiments of seed 003, with Valence's own code on the simulator.

`python -m bench.papers.pilots [--sizes 100:300,…] [--kinds serial,…] [--out DIR] [--json]` prints
what the paper's Figures 2 to 8 show, as tables beside what the paper says, and draws them if
matplotlib is there. Sizes are pilots and tasks. Each figure is a mean over the kinds of workflow.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

from sim.loop import with_fixed_hashes
from valence.display import Display

from .broadcast import broadcast
from .field import KINDS, Experiment, Result, experiment

SIZES = "100:300,500:1500,1500:5000,1500:10000"
MODES = ("pre-DHT", "centralised", "distributed", "greedy")
PAPER = {"pre-DHT": "12", "centralised": "9", "distributed": "5", "greedy": ""}
#: as far as the paper gives numbers: seconds between tasks, for 100 and for 1,500 pilots
PAPER_DELAY = {"pre-DHT": "5, then far more", "centralised": "5, then far more",
               "distributed": "20, at any size", "greedy": ""}  # fmt: skip


def measure(sizes: list[tuple[int, int]], kinds: list[str], jobs: int) -> dict[Experiment, Result]:
    plans = [
        Experiment(pilots, tasks, kind, mode)
        for pilots, tasks in sizes
        for mode in MODES
        for kind in kinds
    ]
    plans.sort(key=lambda plan: -plan.pilots * plan.tasks)
    found: dict[Experiment, Result] = {}
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        rows = zip(plans, pool.imap(experiment, plans, chunksize=1), strict=True)
        for number, (plan, result) in enumerate(rows, start=1):
            what = f"{plan.mode} {plan.kind}, {plan.pilots} pilots, {plan.tasks} tasks"
            print(f"{number} of {len(plans)}: {what}", file=sys.stderr, flush=True)
            found[plan] = result
    return found


def table(found: dict[Experiment, Result], sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    rows = []
    for pilots, tasks in sizes:
        for mode in MODES:
            some = {
                plan.kind: result
                for plan, result in found.items()
                if (plan.pilots, plan.tasks, plan.mode) == (pilots, tasks, mode)
            }
            if not some:
                continue
            results = list(some.values())
            rows.append(
                {
                    "pilots": pilots,
                    "tasks": tasks,
                    "mode": mode,
                    "requests": mean(r.requests / tasks for r in results),
                    "requests_paper": PAPER[mode],
                    "delay_s": median(d for r in results for d in r.delays),
                    "delay_mean_s": mean(mean(r.delays) for r in results),
                    "delay_paper": PAPER_DELAY[mode],
                    "turnaround_s": mean(r.seconds for r in results),
                    "hits": {kind: r.hits for kind, r in some.items()},
                    "local": {kind: r.local for kind, r in some.items()},
                    "messages": mean(r.messages / tasks for r in results),
                    "bytes": mean(r.bytes / tasks for r in results),
                }
            )
    return rows


def draw(found: dict[Experiment, Result], rows: list[dict[str, Any]], out: Path) -> bool:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plot
    except ImportError:
        return False
    out.mkdir(parents=True, exist_ok=True)
    sizes = list(dict.fromkeys((row["pilots"], row["tasks"]) for row in rows))
    names = [f"{p} / {t}" for p, t in sizes]
    figures: list[tuple[str, str, Any, bool]] = [
        ("figure-2", "queue requests a task", lambda r: r["requests"], True),
        ("figure-3", "delay between tasks, median, s", lambda r: r["delay_s"], True),
        ("figure-4", "turnaround, s", lambda r: r["turnaround_s"], False),
        ("figure-7", "read from some cache", lambda r: mean(r["hits"].values()), False),
        ("figure-8", "read from the local cache", lambda r: mean(r["local"].values()), False),
    ]
    for name, label, value, log in figures:
        figure, axes = plot.subplots(figsize=(7, 4))
        for index, mode in enumerate(MODES):
            mine = [r for r in rows if r["mode"] == mode]
            at = [sizes.index((r["pilots"], r["tasks"])) + 0.2 * index - 0.3 for r in mine]
            axes.bar(at, [max(1e-3, value(r)) for r in mine], 0.2, label=mode)
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel("pilots / tasks")
        axes.set_ylabel(label)
        if log:
            axes.set_yscale("log")
        axes.legend()
        figure.tight_layout()
        figure.savefig(out / f"{name}.png", dpi=120)
        plot.close(figure)
    most = max(sizes, key=lambda size: size[0] * size[1])
    for name, mode in (("figure-5", "pre-DHT"), ("figure-6", "distributed")):
        result = found.get(Experiment(*most, kind="serial", mode=mode))
        if result is None:
            continue
        figure, (top, low) = plot.subplots(2, 1, figsize=(7, 6), sharex=True)
        top.plot(*zip(*result.running, strict=True), label="running tasks")
        top.plot(*zip(*result.asked, strict=True), label="queue requests so far")
        top.legend()
        low.hist(result.delays, bins=60)
        low.set_xlabel(
            f"s ({mode}, {most[0]} pilots, {most[1]} tasks; below: delays between tasks)"
        )
        low.set_yscale("log")
        low.sharex(low)
        figure.tight_layout()
        figure.savefig(out / f"{name}.png", dpi=120)
        plot.close(figure)
    return True


def main() -> int:
    with_fixed_hashes("bench.papers.pilots")
    parser = argparse.ArgumentParser(prog="python -m bench.papers.pilots", description=__doc__)
    parser.add_argument("--sizes", default=SIZES, help=f"pilots:tasks, … ({SIZES})")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", default="papers/pilots", help="directory for plots")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = [(int(a), int(b)) for a, b in (s.split(":") for s in options.sizes.split(","))]
    found = measure(sizes, options.kinds.split(","), options.jobs)
    rows = table(found, sizes)
    most = max(pilots for pilots, _ in sizes)
    reached = [broadcast(most), broadcast(most, dead=0.1), broadcast(most, loss=0.05)]
    drawn = draw(found, rows, Path(options.out))
    if options.json:
        print(json.dumps({"rows": rows, "broadcast": reached}, indent=2))
        return 0
    display = Display()
    display.table(
        ("PILOTS", "TASKS", "MODE", "REQUESTS A TASK", "PAPER", "DELAY", "PAPER", "TURNAROUND",
         "MESSAGES", "KB"),
        [
            (str(r["pilots"]), str(r["tasks"]), r["mode"], f"{r['requests']:.2f}",
             r["requests_paper"], f"{r['delay_s']:.2f} s", r["delay_paper"],
             f"{r['turnaround_s']:.0f} s", f"{r['messages']:.1f}", f"{r['bytes'] / 1000:.1f}")
            for r in rows
        ],
    )  # fmt: skip
    print()
    display.table(
        ("PILOTS", "TASKS", "MODE", "WORKFLOW", "SOME CACHE", "LOCAL"),
        [
            (str(r["pilots"]), str(r["tasks"]), r["mode"], kind,
             f"{r['hits'][kind]:.3f}", f"{r['local'][kind]:.3f}")
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
    print(f"\nplots: {options.out}" if drawn else "\nno plots: pip install -e '.[papers]'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
