"""FIGURES: how fast this machine runs tasks through a cluster of its own."""
