"""Compares how long an owner's tasks take with how long their documents say they take. Pure.

Owners share the capacity by the time that their tasks are expected to take. An owner who states a
millisecond for tasks that take a second would get a thousand times its share; one who states an
hour for tasks that take a minute would get a sixtieth. So a stated time is multiplied by the ratio
of the times taken and stated before: in sum each owner pays for what it had. If tasks of the same
kind have run here already, the time that those took is used instead.
"""

from __future__ import annotations

from collections import OrderedDict

OWNERS_MAX = 10_000
REMEMBERED = 0.98  # the weight that older observations keep at each new one
FACTOR_MAX = 1e6


class Experience:
    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()  # stated, taken

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
