"""Draws Figures 2 to 8 of the paper from the measurements made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .field import Result

#: bins of the curve of delays
MOMENTS = 120


def draw(
    rows: list[dict[str, Any]], modes: list[str], runs: dict[str, Result], size: str, out: Path
) -> bool:
    """Bars over the sizes, with the standard deviation of the mean; and two runs over time. False
    without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    out.mkdir(parents=True, exist_ok=True)
    _bars(pyplot, rows, modes, out)
    for name, mode in (("figure-5", "pre-DHT"), ("figure-6", "distributed")):
        if mode in runs:
            _run(pyplot, runs[mode], f"{mode}, serial, {size}", out / f"{name}.png")
    return True


def _bars(pyplot: Any, rows: list[dict[str, Any]], modes: list[str], out: Path) -> None:
    sizes = list(dict.fromkeys((row["pilots"], row["tasks"]) for row in rows))
    figures = (
        ("figure-2", "queue requests", "requests_all", True),
        ("figure-3", "delay between tasks, s", "delay_s", True),
        ("figure-4", "turnaround, s", "turnaround_s", False),
        ("figure-7", "read from some cache", "hits_all", False),
        ("figure-8", "read from the local cache", "local_all", False),
    )
    width = 0.8 / len(modes)
    for name, label, value, log in figures:
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for index, mode in enumerate(modes):
            mine = [row for row in rows if row["mode"] == mode]
            shift = width * (index - (len(modes) - 1) / 2)
            at = [sizes.index((row["pilots"], row["tasks"])) + shift for row in mine]
            heights = [row[value] for row in mine]
            errors = [row[f"{value}_error"] for row in mine]
            axes.bar(at, heights, width, yerr=errors, capsize=2, label=mode)
        axes.set_xticks(range(len(sizes)), [f"{p:,} / {t:,}" for p, t in sizes])
        axes.set_xlabel("pilots / tasks")
        axes.set_ylabel(label)
        if log:
            axes.set_yscale("log")
        if name in ("figure-7", "figure-8"):
            axes.set_ylim(top=1.2)  # for the legend
        axes.legend(loc="upper left", ncols=2)
        figure.tight_layout()
        figure.savefig(out / f"{name}.png", dpi=120)
        pyplot.close(figure)


def _run(pyplot: Any, result: Result, title: str, path: Path) -> None:
    """Above: occupied slots and requests so far. Below: delays and waiting requests."""
    figure, (top, low) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True)
    top.plot(*zip(*result.running, strict=True), color="C0", label="running tasks")
    beside = top.twinx()
    beside.plot(*zip(*result.asked, strict=True), color="C1", label="queue requests so far")
    top.set_ylabel("running tasks", color="C0")
    beside.set_ylabel("requests so far", color="C1")
    top.set_title(title)
    low.plot(*zip(*_mean(result.delays), strict=True), color="C2")
    low.set_ylabel("delay between tasks, mean, s", color="C2")
    low.set_ylim(bottom=0)
    queue = low.twinx()
    queue.plot(*zip(*result.queued, strict=True), color="C3")
    queue.set_ylabel("requests that wait", color="C3")
    queue.set_ylim(bottom=0)
    low.set_xlabel("s")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _mean(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean value in equal intervals of time."""
    step = max((at for at, _ in points), default=0.0) / MOMENTS or 1.0
    binned: dict[int, list[float]] = {}
    for at, value in points:
        binned.setdefault(int(at / step), []).append(value)
    means = ((n * step, sum(some) / len(some)) for n, some in sorted(binned.items()))
    return list(means) or [(0.0, 0.0)]
