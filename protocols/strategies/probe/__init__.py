"""The baseline strategy: ask a few random peers for capacity, and take the best offers."""
