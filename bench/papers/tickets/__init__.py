"""Seed 004: cooperative and decentralised scheduling. `python -m bench.papers.tickets`."""
