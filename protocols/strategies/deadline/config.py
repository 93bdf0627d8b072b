"""The limits and times of planning and promises."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeadlineConfig:
    # Between the end of a task and the start of the next: its result is reported and committed, and
    # the next task is sent to its peer.
    apart_s: float = 0.1
    ask_s: float = 0.5  # soft: a peer that answers later is passed over
    asked_first: int = 16  # peers asked for one sequence at once; four times as many in each round
    sequences_max: int = 64  # in one message
    plan_s_max: float = 8.0  # well below the time for which a hold is kept
    rounds_max: int = 8  # in which peers are asked for one stage
    affirm_s: float = 30.0  # how often a home affirms its bookings
    forget_s: float = 5.0  # how often used bookings are deleted from the disk
    confirm_rows_max: int = 2000  # in one message
    # The tree of summaries. Wide, so that there are few levels: a million peers have five.
    width: int = 16
    cells_max: int = 96  # in one summary
    update_gap_s: float = 0.2
    update_bytes_per_s: float = 500.0
