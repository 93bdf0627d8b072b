"""The strategies: each one file or folder, knowing nothing of the others."""
