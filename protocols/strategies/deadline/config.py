"""The limits and times of planning and promises."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeadlineConfig:
    # Between the end of a task and the start of the next: its result is reported and committed, and
    # the next task is sent to its peer.
    apart_s: float = 0.1
    ask_s: float = 0.5  # soft: a peer that answers later is passed over
    ask_enough_s: float = 0.15  # no longer, if every sequence has a slot somewhere by then
    asked_first: int = 16  # peers asked for one sequence at once; four times as many in each round
    sequences_max: int = 64  # in one message
    pause_after_s: float = 0.02  # a peer that plans for others does its own work in between
    hold_s_max: float = 0.3  # for one message; what is left is refused
    sequence_max: int = 500  # tasks of one sequence
    plan_s_max: float = 8.0  # well below the time for which a hold is kept
    rounds_max: int = 8  # in which peers are asked for one stage
    affirm_s: float = 30.0  # how often a home affirms its bookings
    forget_s: float = 5.0  # how often used bookings are deleted from the disk
    confirm_rows_max: int = 2000  # in one message
    # The tree of summaries. Wide, so that there are few levels: a million peers have five.
    points: str = "dyadic"  # reference points; or paper: those of its Table I
    cells_max: int = 96  # in one summary
    update_gap_s: float = 0.2
    update_bytes_per_s: float = 500.0
    # Up to so many members a home asks the peers themselves; beyond, it asks the tree.
    direct_max: int = 64
    retell_s: float = 20.0  # how often a summary is told that has not changed
    forget_child_s: float = 65.0  # a child that was silent for so long
    hops_max: int = 24
    seeks_at_once: int = 256  # sequences that a home seeks side by side
    settle_s: float = 0.8  # until the branches above have heard of what was released
    seek_s: float = 0.6  # until a home takes what it sought in the tree for lost
