"""The chemical layer's limits and times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChemicalConfig:
    rows_max: int = 4  # molecules at a node: each peer has one, so the mean is one
    ttl_s: float = 25.0
    refresh_s: float = 8.0
    balance_s: float = 1.0  # before a node passes on the molecules it has too many of
    gap_s: float = 0.02  # between two messages of a peer about itself
    active_s: float = 60.0  # how long the layer stays in use after the last question
    wait_s: float = 5.0  # lifetime of a wish, after which it is repeated
    wishes_max: int = 256
    walk_max: int = 64  # nodes, for one leg of a question
    empty_max: int = 20  # empty nodes in a row: hardly anything comes after them
    answer_s: float = 1.0  # at most; a question without an answer is repeated, carefully
    dry_s: float = 0.25  # after no peer was idle, how long no idle one is looked for
    kinds_max: int = 12  # kinds of peers that are asked for at once
    sampled: int = 96
    fit_s: float = 5.0
    fit_min_s: float = 1.0  # times hundreds of members: sooner, if the scale fits badly
