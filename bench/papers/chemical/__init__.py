"""The experiments of seed 000."""
