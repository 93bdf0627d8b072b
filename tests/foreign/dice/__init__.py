"""A strategy of another distribution, as the tests have it installed."""
