"""How long tasks take, as workflows of the same owner have shown that ended here. Pure.

A promise needs a run time for every task. Where a document gives none, the longest of the last few
averages of such tasks is taken: of the same name, with the same program or function, in a workflow
of the same name.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from valence.workflow.model import Task

from .run import Run, kinds

KINDS_MAX = 20_000
REMEMBERED = 10

Kind = tuple[str, str, str]  # owner, workflow's name, kind of task


class Lengths:
    def __init__(self) -> None:
        self._known: OrderedDict[Kind, deque[float]] = OrderedDict()

    def learn(self, run: Run) -> None:
        """From a workflow that has ended."""
        for kind, seconds in run.runtimes.items():
            key = (run.owner, run.workflow.name, kind)
            self._known.setdefault(key, deque(maxlen=REMEMBERED)).append(seconds)
            self._known.move_to_end(key)
        while len(self._known) > KINDS_MAX:
            self._known.popitem(last=False)

    def of(self, owner: str, workflow: str, spec: Task) -> float | None:
        """Seconds on a peer of speed 1: as stated, else as learned, else its time limit."""
        if spec.runtime_s is not None:
            return spec.runtime_s
        for kind in kinds(spec):
            known = self._known.get((owner, workflow, kind))
            if known:
                return max(known)
        return spec.timeout_s
