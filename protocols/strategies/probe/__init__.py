"""The baseline: ask a few peers at random, take the best offers."""
