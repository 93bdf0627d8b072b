"""A workflow's journal, replicated on several peers: they agree on all entries and the writer."""
