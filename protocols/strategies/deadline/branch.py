"""One branch of the tree of summaries: what its children have, and where to send what is sought.

Pure: it is told of messages and of the time, and returns what to send. The daemon, the simulator
and the paper's experiment with a million peers drive the same class.

Rules:
- A child's summary replaces the one before, if it is newer (`seq`).
- What was routed to a child is deducted from its summary until the next one comes: requests of one
  moment do not all go to the same hole.
- An update goes to the parent at most every `update_gap_s`, and at most at `update_bytes_per_s`;
  what changes meanwhile is in the next one.
- Best fit: the shortest hole that suffices; of holes without an end one where it ends first.
- What no child can take is divided; what can't be divided goes to the parent; from the root it goes
  back to its home. A child that has just sent it up is not tried again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from .config import DeadlineConfig
from .summary import HoleCell, Sought, Summary, bounded, end_in

CELL_BYTES, UPDATE_BYTES = 11, 60  # of a message, about: a cell, and all the rest


@dataclass(slots=True)
class _ChildSummary:
    seq: int
    cells: Summary
    heard_at: float


@dataclass(slots=True)
class Branch:
    config: DeadlineConfig
    children: dict[Hashable, _ChildSummary] = field(default_factory=dict)
    _total: Summary = field(default_factory=Counter)
    _have: dict[HoleCell, dict[Hashable, int]] = field(default_factory=dict)  # cell → child → count
    _is_changed: bool = False
    _next_at: float = -math.inf
    _seq: int = 0

    # ----------------------------------------------------------------- summaries

    def heard(self, child: Hashable, seq: int, cells: Summary, now: float) -> bool:
        """A child's summary. False: it is older than what is known."""
        known = self.children.get(child)
        if known is not None and seq <= known.seq:
            return False
        self._forget(child)
        self.children[child] = _ChildSummary(seq, cells, now)
        for cell, count in cells.items():
            self._add(child, cell, count)
        self._is_changed = True
        return True

    def lost(self, child: Hashable) -> None:
        """It is gone, or belongs to another branch now."""
        self._forget(child)
        if self.children.pop(child, None) is not None:
            self._is_changed = True

    def _forget(self, child: Hashable) -> None:
        known = self.children.get(child)
        for cell in list(known.cells) if known is not None else ():
            left = self._have.get(cell, {}).get(child, 0)
            if left:
                self._add(child, cell, -left)

    def _add(self, child: Hashable, cell: HoleCell, count: int) -> None:
        have = self._have.setdefault(cell, {})
        have[child] = have.get(child, 0) + count
        if have[child] <= 0:
            del have[child]
        if not have:
            del self._have[cell]
        self._total[cell] += count
        if self._total[cell] <= 0:
            del self._total[cell]

    def summary(self) -> Summary:
        return bounded(self._total, self.config.cells_max)

    # ----------------------------------------------------------------- updates

    def update_at(self) -> float:
        """When the parent is to hear of what has changed; infinite: of nothing."""
        return self._next_at if self._is_changed else math.inf

    def update(self, now: float) -> tuple[int, Summary] | None:
        """The update that is due: its number and the summary."""
        if not self._is_changed or now < self._next_at:
            return None
        cells = Counter(self.summary())
        size = UPDATE_BYTES + CELL_BYTES * len(cells)
        gap_s = max(self.config.update_gap_s, size / self.config.update_bytes_per_s)
        self._next_at, self._is_changed = now + gap_s, False
        self._seq += 1
        return self._seq, cells

    def again(self, now: float) -> tuple[int, Summary]:
        """The same as before, for a parent that may not know it."""
        self._seq += 1
        return self._seq, Counter(self.summary())

    def silent(self, since: float) -> list[Hashable]:
        """The children that were not heard of since then."""
        return [child for child, known in self.children.items() if known.heard_at < since]

    # ----------------------------------------------------------------- discovery

    def choose(self, tasks: Sequence[Sought], tried: frozenset[Hashable]) -> Hashable | None:
        """The child to send these tasks to; its hole is deducted."""
        best: tuple[float, float] = (math.inf, math.inf)
        chosen: tuple[HoleCell, Hashable] | None = None
        for cell, have in self._have.items():
            if cell.end < math.inf and (0.0, cell.length_s) >= best:
                continue
            end = end_in(cell, tasks)
            size = (0.0, cell.length_s) if cell.end < math.inf else (1.0, end)
            if end == math.inf or size >= best:
                continue
            child = max((c for c in have if c not in tried), key=have.__getitem__, default=None)
            if child is not None:
                best, chosen = size, (cell, child)
        if chosen is None:
            return None
        cell, child = chosen
        self._add(child, cell, -1)
        return child


def divided(tasks: Sequence[Sought]) -> tuple[Sequence[Sought], Sequence[Sought]] | None:
    """Two pieces of about the same length; None: it is a single task."""
    if len(tasks) < 2:
        return None
    half = sum(task.length_s for task in tasks) / 2
    done, cut = 0.0, 0
    while cut < len(tasks) - 1 and (cut == 0 or done + tasks[cut].length_s / 2 <= half):
        done += tasks[cut].length_s
        cut += 1
    return tasks[:cut], tasks[cut:]
