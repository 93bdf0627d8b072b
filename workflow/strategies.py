"""The names of placement strategies that a document can choose from.

`auto` leaves the choice to Valence. Another distribution can provide a strategy of its own, by an
entry point of the group `valence.strategies`.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

GROUP = "valence.strategies"
BUILT_IN = ("probe", "tickets", "chemical", "pilots", "deadline")
AUTO = "auto"


@cache
def others() -> dict[str, EntryPoint]:
    """Strategies of other distributions, which can't take the name of a built-in one."""
    points = entry_points(group=GROUP)
    return {point.name: point for point in points if point.name not in (*BUILT_IN, AUTO)}


@cache
def names() -> tuple[str, ...]:
    return (AUTO, *BUILT_IN, *others())
