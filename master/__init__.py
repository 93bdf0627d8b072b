"""The optional service: a task queue."""
