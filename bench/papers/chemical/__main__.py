"""`make papers`: the experiments of seed 000, with Valence's own code on the simulator.

`python -m bench.papers.chemical [--nodes 100,1000] [--workflows 10,50] [--out DIR] [--json]` prints
the quantities of the paper's Figures 6 to 8 (the paper gives no numbers), in its own mode and in
ours, and draws them if matplotlib is installed. BY LOG N is the number of messages per task divided
by log2 of the number of nodes, or by its square in the paper's mode: as long as it does not rise,
messages grow no faster than that.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from valence.display import Display

from .space import STEP_S, Experiment, Result, experiment

NODES = (100, 1000, 10_000)
WORKFLOWS = (10, 100, 500)
MODES = ("default", "paper")
PAPER_WORKFLOWS_MAX = 100
FIGURES = {
    "6-time": ("steps", "steps a workflow takes"),
    "7-messages": ("messages", "messages"),
    "8-per-node": ("per_node", "messages a node"),
}


def row_of(plan: Experiment, result: Result) -> dict[str, Any]:
    return {
        "mode": plan.mode,
        "nodes": plan.nodes,
        "workflows": plan.workflows,
        "tasks": result.tasks,
        "steps": result.time_s / STEP_S,
        "messages": result.messages,
        "per_task": result.per_task,
        "per_node": result.messages / plan.nodes,
        "best": result.best,
        "waking_per_node": result.waking / plan.nodes,
    }


def draw(rows: list[dict[str, Any]], out: Path) -> list[str]:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return []
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for name, (what, label) in FIGURES.items():
        figure, all_axes = plt.subplots(1, len(MODES), figsize=(10, 4), sharey=False)
        for axes, mode in zip(all_axes, MODES, strict=True):
            for count in sorted({r["workflows"] for r in rows}):
                points = [r for r in rows if r["mode"] == mode and r["workflows"] == count]
                points.sort(key=lambda r: r["nodes"])
                if points:
                    nodes = [r["nodes"] for r in points]
                    axes.plot(nodes, [r[what] for r in points], "o-", label=count)
            axes.set(title=mode, xlabel="nodes", ylabel=label, xscale="log", ylim=(0, None))
            axes.legend(title="workflows")
        figure.tight_layout()
        figure.savefig(out / f"figure-{name}.png", dpi=120)
        plt.close(figure)
        made.append(f"figure-{name}.png")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.papers.chemical", description=__doc__)
    parser.add_argument("--nodes", default=",".join(map(str, NODES)))
    parser.add_argument("--workflows", default=",".join(map(str, WORKFLOWS)))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path(".bench/papers/chemical"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    listed = [
        Experiment(nodes, workflows, mode)
        for nodes in map(int, options.nodes.split(","))
        for workflows in map(int, options.workflows.split(","))
        for mode in MODES
        # the paper's mode has some fifty messages per task, all simulated: more takes many minutes
        if mode == "default" or workflows <= PAPER_WORKFLOWS_MAX
    ]
    rows = []
    context = multiprocessing.get_context("fork")
    with context.Pool(options.jobs, maxtasksperchild=1) as pool:
        for n, (plan, result) in enumerate(
            zip(listed, pool.imap(experiment, listed, chunksize=1), strict=True), start=1
        ):
            rows.append(row_of(plan, result))
            print(f"{n} of {len(listed)}", end="\r", file=sys.stderr, flush=True)
    made = draw(rows, options.out)
    if options.json:
        print(json.dumps(rows))
        return 0
    say = Display()
    heads = ("MODE", "NODES", "WORKFLOWS", "TASKS", "STEPS", "MESSAGES A TASK", "BY LOG N",
             "A NODE", "LEAST LOADED")  # fmt: skip
    say.table(
        heads,
        [
            (
                r["mode"], f"{r['nodes']:,}", str(r["workflows"]), f"{r['tasks']:,}",
                f"{r['steps']:.0f}", f"{r['per_task']:.1f}",
                f"{r['per_task'] / math.log2(r['nodes']) ** (1 + (r['mode'] == 'paper')):.2f}",
                f"{r['per_node']:.1f}", f"{r['best']:.1%}",
            )
            for r in rows
        ],
    )  # fmt: skip
    if made:
        print(f"drawn: {', '.join(str(options.out / name) for name in made)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
