"""One peer's capacity: admission, fair shares, and the match with a unit's needs."""
