"""What crosses the wire or lands in a journal: messages, entries, their encoding, and calls."""
