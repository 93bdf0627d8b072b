"""The task queue, an optional service."""
