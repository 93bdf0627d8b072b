"""One peer's capacity: who gets it, in which turn, and what fits."""
