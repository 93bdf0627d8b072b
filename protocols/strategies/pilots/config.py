"""The limits and times of pilots and their masters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PilotsConfig:
    round_s: float = 1.0  # for a whole round; each level of it has less
    gather_s: float = 0.0  # between an event that calls for a round and the round
    sweep_s: float = 5.0  # how often all pilots are asked, while something waits
    sweep_s_max: float = 60.0
    # A pilot that has just made a file announces its free capacity only when the file's home knows
    # of the file, because a task that reads it may be the best it can get. It waits no longer than
    # this, nor than a share of the time that its task ran.
    settle_s: float = 1.0
    settle_share: float = 0.05
    # How long a task is reserved for pilots that hold its files; at most a share of its run time.
    local_s: float = 2.0
    local_share: float = 0.05
    idle_s: float = 2.0  # after this, a pilot announces its free capacity again
    spill_s: float = 1.0  # a task that gets no capacity at its site for this long goes to all sites
    post_s: float = 2.0  # how often a home tells a master that it is still there
    patience_s: float = 3.0  # for an offer that is on its way
    ranks: int = 16  # lines that a pilot names at least; four for each seat
    lines_max: int = 5000  # on a site's list
    cells_max: int = 300_000  # size of a matrix that is solved exactly
    say_gather_s: float = 0.001  # what comes free within this is announced in one message
    hold_after_s: float = 3.0  # a task that waited this long asks for a place in a queue
