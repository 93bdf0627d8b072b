"""The strategies: one folder each, independent of one another."""
