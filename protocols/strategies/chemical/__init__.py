"""The strategy `chemical`: tasks capture resources in the order of a shared layer (seed 000)."""
