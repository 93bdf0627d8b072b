"""Claims and tickets meet in the cells of an index that is spread over all peers. See space.py."""
