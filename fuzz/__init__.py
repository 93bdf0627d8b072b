"""Hostile input for every parser: see `python -m fuzz --help`."""
