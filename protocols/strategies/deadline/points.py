"""Reference points: the moments between which holes are counted, the same at all peers.

Summaries can only be added up if their moments are the same. Points lie close together near now and
far apart later. `dyadic` points are nested: a far point stays one as it comes nearer, so that a
summary that was made earlier fits into one made now. `paper` points are those of Table I, whose 10
and 15 minutes often fall together, and which are not nested.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

#: half a second to twelve days
DYADIC = tuple(2.0**i for i in range(-1, 21))
MINUTE = 60.0
#: Table I: how far each point is from now, and the grid that it lies on
PAPER = tuple(
    (minutes * MINUTE, grid * MINUTE)
    for minutes, grid in (
        (5, 5), (10, 10), (15, 15), (30, 30), (60, 60), (120, 120), (240, 240), (480, 480),
        (960, 480), (1440, 1440),
    )
)  # fmt: skip


def dyadic(now: float) -> list[float]:
    """The first is now itself."""
    return [now, *(math.ceil((now + step) / step) * step for step in DYADIC)]


def paper(now: float) -> list[float]:
    """`now` in seconds since midnight."""
    points = (math.ceil((now + away) / grid) * grid for away, grid in PAPER)
    return [now, *dict.fromkeys(points)]


#: by the name that the configuration gives them
POINTS = {"dyadic": dyadic, "paper": paper}


def around(points: Sequence[float], start: float, end: float) -> tuple[float, float]:
    """The last point before a hole begins, and the first after it has ended (infinite: none)."""
    first = bisect.bisect_right(points, start) - 1
    last = bisect.bisect_left(points, end)
    return points[max(0, first)], points[last] if last < len(points) else math.inf
