"""Fences off old homes: of two homes of a workflow, the one with the higher epoch is obeyed.

Messages of the lower one are refused. Everything on this peer that belongs to the workflow goes to
the higher one as soon as this peer hears of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

EPOCHS_MAX = 10_000


class Fencing:
    def __init__(self, counts: Counter[str]) -> None:
        self.on_new_home: list[Callable[[str, bytes], None]] = []
        self._counts = counts
        #: the highest epoch heard of, for each workflow
        self._epochs: OrderedDict[str, int] = OrderedDict()

    def heed(self, home: bytes, workflow: str, epoch: int) -> bool:
        """True if this is its home, as far as this peer knows."""
        known = self._epochs.get(workflow, 0)
        if epoch < known:
            self._counts["fenced"] += 1
            return False
        if epoch > known:
            self._epochs[workflow] = epoch
            self._epochs.move_to_end(workflow)
            if len(self._epochs) > EPOCHS_MAX:
                self._epochs.popitem(last=False)
            if known:
                self.rehome(workflow, home)
        return True

    def rehome(self, workflow: str, home: bytes) -> None:
        """From now on everything on this peer that belongs to the workflow is for that home."""
        for tell in self.on_new_home:
            tell(workflow, home)

    def has_heard_of(self, workflow: str) -> bool:
        return bool(self._epochs.get(workflow))
