"""The limits and times of pilots and their masters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PilotsConfig:
    round_s: float = 1.0  # for a whole round; each level of it has less
    gather_s: float = 0.0  # between what calls for a round and the round
    sweep_s: float = 5.0  # while something waits, all pilots are asked so often
    sweep_s_max: float = 60.0
    # Who has just made a file says that it has room when its home has heard of that: what reads the
    # file may be the best it can get. Not for longer than this, nor than a part of what it ran.
    settle_s: float = 1.0
    settle_share: float = 0.05
    # So long a task is left to those who hold its files; not longer than a part of what it takes.
    local_s: float = 2.0
    local_share: float = 0.05
    idle_s: float = 2.0  # a pilot says again that it has room
    spill_s: float = 1.0  # what finds no room at its site for so long goes to all sites
    post_s: float = 2.0  # a home says that it is still there
    patience_s: float = 3.0  # for an offer that is on its way
    ranks: int = 16  # that a pilot names at least; four for each seat
    lines_max: int = 5000  # on a site's list
    cells_max: int = 300_000  # of the matrix that is solved exactly
    say_gather_s: float = 0.001  # what comes free within this goes in one word to the master
    hold_after_s: float = 3.0  # a task that waited so long asks for a place in a queue
