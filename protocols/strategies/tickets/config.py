"""The limits and times of claims, tickets and cells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TicketsConfig:
    # The bounds between the divisions of each numeric dimension; the number of divisions for names.
    cell_cores: tuple[float, ...] = (2, 8, 32)
    cell_speeds: tuple[float, ...] = (0.75, 1.25, 2.0)
    cell_memory_gib: tuple[float, ...] = (4, 16, 64)
    cell_words: int = 4
    cell_peers_max: int = 64  # a cell with more peers is split into shards
    claim_cells_max: int = 1024  # f_min^d: all of them
    claim_tries_max: int = 8  # cells in turn, before a claim waits in all
    claim_refresh_s: float = 2.0
    claim_ttl_s: float = 7.0  # three refreshes may be lost before a home's claim expires
    claims_max: int = 20_000
    claim_answer_s: float = 1.0
    ticket_on_change: bool = True  # False: at fixed times only, as in the paper
    ticket_gather_s: float = 0.001  # capacity that comes free within this goes in one ticket
    ticket_refresh_s: float = 5.0  # with jitter, while a cell wants tickets
    ticket_wanted_s: float = 10.0  # while a claim waits, tickets are wanted for this long at a time
    ticket_hold_after_s: float = 3.0  # a claim that waited this long asks for a place in a queue
