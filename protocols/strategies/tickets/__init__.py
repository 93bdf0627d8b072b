"""The strategy `tickets`: claims and tickets meet in the cells of an index across all peers."""
