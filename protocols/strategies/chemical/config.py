"""The chemical layer's limits and times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChemicalConfig:
    rows_max: int = 4  # at a node: each peer has one, so the mean is one
    ttl_s: float = 25.0
    refresh_s: float = 8.0
    balance_s: float = 1.0  # before what is too much at a node goes on
    gap_s: float = 0.02  # between two words about oneself
    active_s: float = 60.0  # after the last one who wanted it
    wait_s: float = 5.0  # a wish, before it is said again
    wishes_max: int = 256
    walk_max: int = 64  # nodes, for one leg of a question
    empty_max: int = 20  # in a row: there is hardly anything behind them
    answer_s: float = 1.0  # at most; a question without an answer is asked again, carefully
    dry_s: float = 0.25  # where no peer was idle, none is looked for
    kinds_max: int = 12  # sorts of peers that are asked for at once
    sampled: int = 96
    fit_s: float = 5.0
    fit_min_s: float = 1.0  # times hundreds of members: sooner, where it fits badly
