"""How a workflow's tasks find peers: the names that a document may give.

`auto` leaves it to Valence. A distribution may bring a strategy of its own: an entry point of the
group `valence.strategies`.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

GROUP = "valence.strategies"
BUILT_IN = ("probe", "tickets", "chemical", "pilots")
AUTO = "auto"


@cache
def others() -> dict[str, EntryPoint]:
    """Of other distributions; none of them takes the name of one that comes along."""
    found = entry_points(group=GROUP)
    return {point.name: point for point in found if point.name not in (*BUILT_IN, AUTO)}


@cache
def names() -> tuple[str, ...]:
    return (AUTO, *BUILT_IN, *others())
