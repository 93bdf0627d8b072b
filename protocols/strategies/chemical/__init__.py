"""`chemical`: tasks capture resources in the order of a shared layer, after seed 000."""
