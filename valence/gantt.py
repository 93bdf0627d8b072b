"""Draws a plan as a Gantt chart of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from valence.workflow.quantities import show_seconds

#: with more tasks than this, the chart has a row for each peer
ROWS_MAX = 40
NAME_MAX = 24
BAR_MIN, BAR_MAX = 20, 100


def chart(tasks: Sequence[dict[str, Any]], start_at: float, columns: int) -> list[str]:
    """Lines of at most that many columns; the tasks in the order in which they begin."""
    rows = sorted(tasks, key=lambda row: (row["start_at"], row["end_at"], row["task"]))
    end_at = max((row["end_at"] for row in rows), default=start_at)
    if len(rows) > ROWS_MAX:
        return _by_peer(rows, start_at, end_at, columns)
    return _by_task(rows, start_at, end_at, columns)


def _by_task(
    rows: Sequence[dict[str, Any]], start_at: float, end_at: float, columns: int
) -> list[str]:
    names = [_cut(row["task"]) for row in rows]
    width = max([4, *map(len, names)])
    bar = _bar_width(columns, width + 12)
    lines = [f"{'TASK':{width}}  {'PEER':8}  {_scale(end_at - start_at, bar)}"]
    for name, row in zip(names, rows, strict=True):
        first, last = _span(row, start_at, end_at, bar)
        line = f"{name:{width}}  {row['peer'][:8]}  {' ' * first}{'█' * (last - first)}"
        lines.append(line.rstrip())
    return lines


def _by_peer(
    rows: Sequence[dict[str, Any]], start_at: float, end_at: float, columns: int
) -> list[str]:
    """How many tasks each peer runs at a time."""
    bar = _bar_width(columns, 18)
    counts: dict[str, list[int]] = {}
    tasks: dict[str, int] = {}
    for row in rows:
        first, last = _span(row, start_at, end_at, bar)
        line = counts.setdefault(row["peer"][:8], [0] * bar)
        tasks[row["peer"][:8]] = tasks.get(row["peer"][:8], 0) + 1
        for column in range(first, last):
            line[column] += 1
    lines = [f"{'PEER':8}  {'TASKS':>6}  {_scale(end_at - start_at, bar)}"]
    for peer in sorted(counts):
        marks = "".join(" " if n == 0 else str(n) if n < 10 else "+" for n in counts[peer])
        lines.append(f"{peer:8}  {tasks[peer]:6,}  {marks}".rstrip())
    return lines


def _bar_width(columns: int, others: int) -> int:
    return max(BAR_MIN, min(BAR_MAX, columns - others))


def _span(row: dict[str, Any], start_at: float, end_at: float, bar: int) -> tuple[int, int]:
    """The columns of a task: at least one."""
    scale = bar / max(1e-9, end_at - start_at)
    first = min(bar - 1, max(0, int((row["start_at"] - start_at) * scale)))
    last = min(bar, round((row["end_at"] - start_at) * scale))
    return first, max(first + 1, last)


def _scale(seconds: float, bar: int) -> str:
    end = show_seconds(seconds)
    return "0" + "·" * max(1, bar - 1 - len(end)) + end


def _cut(name: str) -> str:
    return name if len(name) <= NAME_MAX else name[: NAME_MAX - 1] + "…"
