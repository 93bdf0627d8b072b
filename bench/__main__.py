"""`make bench`: the same work on Valence, Dask and Ray, with the same number of slots.

`python -m bench [--slots N] [--runs N] [--others PYTHON] [--json]`. The systems take turns. Each is
started again for each of its runs, and its best run counts. Machines are noisy: only the ratios
within one such comparison mean anything. `--others` is the interpreter of an environment with Dask
and Ray; without it only Valence is measured. `--strategies probe,tickets` compares Valence's
strategies instead, the first with each of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from valence.display import Display

HERE = Path(__file__).parent
RUN_S_MAX = 600
WORKS = {
    "noops": "10,000 no-op calls",
    "commands": "2,000 x /bin/true",
    "layers": "100 x 20 layers, each of two",
    "latency": "one no-op, there and back",
}
COSTS = ("messages", "bytes", "syncs", "wakeups", "cpu_us")


def run(
    system: str, python: str, slots: int, *more: str, root: Path = HERE.parent
) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    done = subprocess.run(
        [python, str(root / "bench" / f"with_{system}.py"), str(slots), *more],
        cwd=root,
        capture_output=True,
        text=True,
        env=environment,
        timeout=RUN_S_MAX,
    )
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"work"')]


def compare(options: argparse.Namespace) -> dict[str, Any]:
    systems = ["valence", *(["dask", "ray"] if options.others else [])]
    best: dict[str, dict[str, float]] = {work: {} for work in WORKS}
    costs: dict[str, dict[str, float]] = {}
    for turn in range(options.runs):
        for system in systems:
            print(f"run {turn + 1} of {options.runs}: {system}", file=sys.stderr, flush=True)
            python = sys.executable if system == "valence" else options.others
            for row in run(system, python, options.slots):
                if "seconds" in row:
                    mine = best[row["work"]]
                    mine[system] = min(mine.get(system, row["seconds"]), row["seconds"])
                else:
                    costs[row["work"]] = {name: row[name] for name in COSTS if name in row}
    ratios = {
        work: min(s for name, s in rows.items() if name != "valence") / rows["valence"]
        for work, rows in best.items()
        if len(rows) > 1
    }
    print("growth: ten times the work", file=sys.stderr, flush=True)
    growth = run("valence", sys.executable, options.slots, "--long")[-1]
    return {
        "slots": options.slots,
        "runs": options.runs,
        "seconds": best,
        "times_as_fast_as_the_faster_other": ratios,
        "per_task": costs,
        "growth": {k: v for k, v in growth.items() if k != "work"},
    }


def strategies(options: argparse.Namespace) -> dict[str, Any]:
    """The same works with each strategy in turn; the best run of each counts."""
    names = options.strategies.split(",")
    best: dict[str, dict[str, float]] = {work: {} for work in WORKS}
    messages: dict[str, dict[str, float]] = {work: {} for work in WORKS}
    for turn in range(options.runs):
        for name in names:
            print(f"run {turn + 1} of {options.runs}: {name}", file=sys.stderr, flush=True)
            for row in run("valence", sys.executable, options.slots, "--strategy", name):
                mine = best[row["work"]]
                if "seconds" in row:
                    mine[name] = min(mine.get(name, row["seconds"]), row["seconds"])
                elif "messages" in row:
                    messages[row["work"]][name] = row["messages"]
    return {"slots": options.slots, "runs": options.runs, "seconds": best, "messages": messages}


def before(options: argparse.Namespace) -> dict[str, Any]:
    """The same works on another checkout and on this one, in turns; the best run of each counts."""
    more = ["--strategy", options.strategies] if options.strategies else []
    checkouts = {"before": Path(options.before).resolve(), "now": HERE.parent}
    best: dict[str, dict[str, float]] = {work: {} for work in WORKS}
    for turn in range(options.runs):
        order = list(checkouts.items())
        for name, root in order if turn % 2 else reversed(order):
            print(f"run {turn + 1} of {options.runs}: {name}", file=sys.stderr, flush=True)
            own = root / ".venv" / "bin" / "python"
            python = str(own) if own.exists() else sys.executable
            for row in run("valence", python, options.slots, *more, root=root):
                if "seconds" in row:
                    mine = best[row["work"]]
                    mine[name] = min(mine.get(name, row["seconds"]), row["seconds"])
    return {"slots": options.slots, "runs": options.runs, "seconds": best}


def show_before(results: dict[str, Any], display: Display) -> None:
    rows = []
    for work, text in WORKS.items():
        seconds = results["seconds"][work]
        speeds = (_speed(work, seconds[name]) for name in ("before", "now"))
        rows.append((text, *speeds, f"{seconds['before'] / seconds['now']:.2f} x"))
    display.table(("WORK", "BEFORE", "NOW", "NOW / BEFORE"), rows)


def show_strategies(results: dict[str, Any], display: Display) -> None:
    names = list(next(iter(results["seconds"].values())))
    rows = []
    for work, text in WORKS.items():
        seconds = results["seconds"][work]
        ratios = [f"{seconds[names[0]] / seconds[name]:.2f} x" for name in names[1:]]
        per_task = [f"{results['messages'][work].get(name, 0):.2f}" for name in names]
        rows.append((text, *(_speed(work, seconds[n]) for n in names), *ratios, *per_task))
    heads = [name.upper() for name in names]
    against = [f"{head} / {heads[0]}" for head in heads[1:]]
    display.table(("WORK", *heads, *against, *(f"MESSAGES {h}" for h in heads)), rows)


def show(results: dict[str, Any], display: Display) -> None:
    rows = []
    for work, text in WORKS.items():
        seconds = results["seconds"][work]
        ratio = results["times_as_fast_as_the_faster_other"].get(work)
        rows.append(
            (
                text,
                *(_speed(work, seconds.get(system)) for system in ("valence", "dask", "ray")),
                f"{ratio:.2f} x" if ratio else "",
            )
        )
    display.table(("WORK", "VALENCE", "DASK", "RAY", "VALENCE / FASTER OTHER"), rows)
    display.say("")
    costs = [
        (WORKS[work], *(f"{row.get(name, 0):.2f}" for name in COSTS))
        for work, row in results["per_task"].items()
    ]
    display.table(("VALENCE, PER TASK", "MESSAGES", "BYTES", "SYNCS", "WAKE-UPS", "CPU US"), costs)
    grown = results["growth"]
    display.say("")
    display.say(
        f"100,000 no-op calls: {grown['large_s']:.1f} s, {grown['times']:.1f} times what 10,000 "
        f"take; the home keeps {grown['bytes_per_task']:.0f} bytes per finished task"
    )


def _speed(work: str, seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if work == "latency":
        return f"{seconds * 1000:.2f} ms"
    counts = {"noops": 10_000, "commands": 2_000, "layers": 2_000}
    return f"{counts[work] / seconds:,.0f} /s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--others", metavar="PYTHON", help="interpreter with dask and ray")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--strategies", help="compare these strategies of Valence instead")
    parser.add_argument("--before", metavar="DIRECTORY", help="another checkout of Valence")
    options = parser.parse_args()
    measure, shown = compare, show
    if options.before:
        measure, shown = before, show_before
    elif options.strategies:
        measure, shown = strategies, show_strategies
    results = measure(options)
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        shown(results, Display())
    return 0


if __name__ == "__main__":
    sys.exit(main())
