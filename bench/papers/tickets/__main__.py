"""`make papers`: the experiments of seed 004, with Valence's own code on the simulator.

`python -m bench.papers.tickets [--sizes 50,100,…] [--seeds N] [--out DIR] [--json]` prints the
quantities of the paper's Figures 10 to 14 and its Table 5, beside the paper's numbers where it
gives any, and draws them if matplotlib is installed. Each figure is a mean over `--seeds` grids.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from valence.display import Display

from .grid import NON_COOPERATIVE, Experiment, Result, experiment
from .hops import hops

SIZES = (50, 100, 200, 300, 400, 500)
INTERVALS_S = (100.0, 200.0, 300.0)
PEERS = (100, 1000, 10_000)
#: Table 5: min, Q1, median, Q3, max of tasks per processor
TABLE_5 = {
    (100, "cooperative"): (0.11, 0.90, 2.07, 3.70, 26.75),
    (100, "non-cooperative"): (0.09, 1.06, 1.80, 3.53, 45.75),
    (500, "cooperative"): (0.25, 5.65, 7.97, 10.78, 126.00),
    (500, "non-cooperative"): (0.12, 4.70, 9.06, 15.95, 213.00),
}


AGAINST = ("makespan_s", "waiting_s", "delay_s", "idle_s", "messages_per_task")


def name_of(plan: Experiment) -> str:
    return f"interval {plan.interval_s:g} s" if plan.mode == "interval" else plan.mode


def plans(sizes: list[int], seeds: int) -> list[Experiment]:
    experiments = []
    for seed in range(1, seeds + 1):
        for tasks in sizes:
            for mode in ("tickets", "centralised", *NON_COOPERATIVE):
                experiments.append(Experiment(tasks, mode, seed=seed))
            for interval_s in INTERVALS_S:
                experiments.append(Experiment(tasks, "interval", interval_s, seed=seed))
    return experiments


def measure(sizes: list[int], seeds: int, jobs: int) -> dict[int, dict[str, list[Result]]]:
    listed = plans(sizes, seeds)
    measured: dict[int, dict[str, list[Result]]] = {size: {} for size in sizes}
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        for n, (plan, result) in enumerate(
            zip(listed, pool.imap(experiment, listed, chunksize=1), strict=True), start=1
        ):
            measured[plan.tasks].setdefault(name_of(plan), []).append(result)
            print(f"{n} of {len(listed)}", end="\r", file=sys.stderr, flush=True)
    return measured


def average(results: list[Result]) -> dict[str, float]:
    rows = {
        "makespan_s": mean(r.makespan_s for r in results),
        "delay_s": mean(r.delay_s for r in results),
        "idle_s": mean(r.idle_s for r in results),
        "waiting_s": mean(r.waiting_s for r in results),
        "response_s": mean(r.response_s for r in results),
        "notifications": mean(r.notifications for r in results),
        "claims": mean(r.claims for r in results),
        "tickets": mean(r.tickets for r in results),
        "messages_per_task": mean(r.messages / r.tasks for r in results),
    }
    for n, quartile in enumerate(("min", "q1", "median", "q3", "max")):
        rows[quartile] = mean(r.quartiles()[n] for r in results)
    return rows


def show(
    averages: dict[int, dict[str, dict[str, float]]], ways: dict[int, Any], say: Display
) -> None:
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]] = []
    # DELAY: from ready to placed; BESIDE FREE: the part of the delay during which the processor
    # that the task then got was free, so that it was not due to a lack of processors
    heads = (
        "TASKS",
        "MODE",
        "MAKESPAN s",
        "DELAY s",
        "BESIDE FREE s",
        "WAITING s",
        "NOTIFIED",
        "MESSAGES",
    )
    for tasks, modes in averages.items():
        for mode, row in modes.items():
            rows.append(
                (
                    f"{tasks}",
                    mode,
                    f"{row['makespan_s']:,.0f}",
                    f"{row['delay_s']:.2f}",
                    f"{row['idle_s']:.3f}",
                    f"{row['waiting_s']:.1f}",
                    f"{row['notifications']:.3f}",
                    f"{row['messages_per_task']:.2f}",
                )
            )
    say.table(heads, rows)
    say.say("")
    heads = ("TASKS", "AGAINST", "MAKESPAN", "WAITING", "DELAY", "BESIDE FREE", "MESSAGES")
    rows = []
    for tasks, modes in averages.items():
        mine = modes["tickets"]
        for other in (*NON_COOPERATIVE, "centralised", "interval 100 s"):
            theirs = modes[other]
            rows.append(
                (
                    f"{tasks}",
                    other,
                    *(
                        f"{100 * (mine[k] / theirs[k] - 1):+.1f} %" if theirs[k] > 0.05 else "-"
                        for k in AGAINST
                    ),
                )
            )
    say.table(heads, rows)
    say.say("")
    rows = []
    for (tasks, approach), paper in TABLE_5.items():
        if tasks in averages:
            mode = "tickets" if approach == "cooperative" else approach
            mine = averages[tasks][mode]
            ours = [f"{mine[k]:.2f}" for k in ("min", "q1", "median", "q3", "max")]
            rows.append((f"{tasks}", approach, " ".join(ours), " ".join(f"{p:.2f}" for p in paper)))
    say.table(("TASKS", "PER PROCESSOR", "MIN Q1 MEDIAN Q3 MAX", "THE PAPER'S TABLE 5"), rows)
    say.say("")
    rows = [(f"{n:,}", f"{depth:.2f}", f"{right:.0%}") for n, (depth, right) in ways.items()]
    say.table(("PEERS", "HOPS BY LOOKUP", "THE TRUE OWNER"), rows)
    say.say("the paper: 3.62 hops with 100; Valence's peers know up to 5,000 others: 1 hop")


#: figure → its quantity, its label, whether its scale is logarithmic, and its modes
COORDINATED = ("tickets", "centralised", *(f"interval {s:g} s" for s in INTERVALS_S))
FIGURES: dict[str, tuple[str, str, bool, tuple[str, ...]]] = {
    "10a-delay": ("delay_s", "coordination delay, s", True, COORDINATED),
    "10b-response": ("response_s", "response time, s", True, COORDINATED),
    "10c-makespan": ("makespan_s", "makespan, s", True, COORDINATED),
    "10d-notifications": ("notifications", "notifications a task", False, COORDINATED),
    "11b-claims": ("claims", "claims", False, COORDINATED),
    "11c-tickets": ("tickets", "tickets", False, COORDINATED),
    "11d-messages": ("messages_per_task", "messages a task", False, COORDINATED),
    "12a-waiting": ("waiting_s", "waiting, s", True, ("tickets", *NON_COOPERATIVE)),
    "12b-makespan": ("makespan_s", "makespan, s", True, ("tickets", *NON_COOPERATIVE)),
    "14-makespan": ("makespan_s", "makespan, s", False, ("tickets", "centralised")),
}


def draw(
    averages: dict[int, dict[str, dict[str, float]]],
    measured: dict[int, dict[str, list[Result]]],
    ways: dict[int, Any],
    out: Path,
) -> list[Path]:
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed", file=sys.stderr)
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    out.mkdir(parents=True, exist_ok=True)
    made = []

    def save(figure: Any, name: str) -> None:
        figure.tight_layout()
        made.append(out / f"{name}.png")
        figure.savefig(made[-1], dpi=110)
        pyplot.close(figure)

    for name, (key, label, log, modes) in FIGURES.items():
        figure, axes = pyplot.subplots(figsize=(6, 4))
        for mode in modes:
            axes.plot(
                list(averages), [row[mode][key] for row in averages.values()], "o-", label=mode
            )
        axes.set(xlabel="tasks in a workflow", ylabel=label)
        if log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
        save(figure, name)
    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(list(ways), [depth for depth, _ in ways.values()], "o-", label="by lookups")
    axes.plot([100], [3.62], "x", label="the paper")
    axes.set(xlabel="peers", ylabel="hops to a cell's owner", xscale="log", ylim=(0, 4))
    axes.legend(fontsize=8)
    save(figure, "11a-hops")
    largest = max(measured)
    figure, rows = pyplot.subplots(2, 1, figsize=(6, 6), sharex=True)
    for axes, mode in zip(rows, ("tickets", "non-cooperative"), strict=True):
        values = [min(60.0, v) for result in measured[largest][mode] for v in result.per_processor]
        axes.hist(values, bins=30, range=(0, 60))
        axes.set(title=f"{mode}, {largest} tasks", ylabel="sites")
    rows[-1].set(xlabel="tasks per processor (60: or more)")
    save(figure, "13-spread")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.papers.tickets", description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="tasks in a workflow")
    parser.add_argument("--seeds", type=int, default=1, help="grids to average over")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path(".bench/papers/tickets"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    measured = measure(sizes, options.seeds, options.jobs)
    averages = {
        tasks: {mode: average(results) for mode, results in modes.items()}
        for tasks, modes in measured.items()
    }
    ways = {count: hops(count) for count in PEERS}
    if options.json:
        print(json.dumps({"experiments": averages, "hops": ways}, indent=2))
    else:
        show(averages, ways, Display())
    for path in draw(averages, measured, ways, options.out):
        print(path, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
