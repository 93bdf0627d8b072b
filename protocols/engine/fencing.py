"""Whose word holds: of two homes of a workflow the one with the higher epoch.

What a lower one says is refused, and all that is here for the workflow goes to the higher one as
soon as it is heard of.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

EPOCHS_MAX = 10_000


class Fencing:
    def __init__(self, counts: Counter[str]) -> None:
        self.on_new_home: list[Callable[[str, bytes], None]] = []
        self._counts = counts
        self._epochs: OrderedDict[str, int] = OrderedDict()  # of each workflow's home, as heard

    def heed(self, home: bytes, workflow: str, epoch: int) -> bool:
        """Is this its home?"""
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
        """All that is here of the workflow is for that one from now on."""
        for tell in self.on_new_home:
            tell(workflow, home)

    def has_heard_of(self, workflow: str) -> bool:
        return bool(self._epochs.get(workflow))
