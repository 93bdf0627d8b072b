"""How long an owner's tasks take, beside how long their documents say. Pure.

Owners share what there is by the time that their tasks are expected to take. Who says a millisecond
of tasks that take a second would get a thousand times as much; who says an hour of what takes a
minute, a sixtieth. So what a document says counts as many times as what was said before turned out:
in sum each owner pays for what it had. Of tasks whose like was seen here already, that counts.
"""

from __future__ import annotations

from collections import OrderedDict

OWNERS_MAX = 10_000
REMEMBERED = 0.98  # of each observation, when the next one comes
FACTOR_MAX = 1e6


class Experience:
    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()  # said, taken

    def observe(self, owner: str, said_s: float, took_s: float) -> None:
        said, took = self._seen.pop(owner, (0.0, 0.0))
        self._seen[owner] = said * REMEMBERED + said_s, took * REMEMBERED + took_s
        if len(self._seen) > OWNERS_MAX:
            self._seen.popitem(last=False)

    def corrected(self, owner: str, said_s: float) -> float:
        said, took = self._seen.get(owner, (0.0, 0.0))
        if said <= 0.0:
            return said_s
        return said_s * min(FACTOR_MAX, max(1 / FACTOR_MAX, took / said))
