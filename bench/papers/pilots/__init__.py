"""The experiments of seed 003: late-binding overlays."""
