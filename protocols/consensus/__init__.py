"""A workflow's journal on several peers: its keepers agree on every entry, and on who writes it."""
