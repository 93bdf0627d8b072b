"""A chemical machine: molecules, rules that consume and produce them, and their notation."""
