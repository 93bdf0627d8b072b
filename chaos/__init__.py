"""REAL PEERS, BROKEN ON PURPOSE: processes that are killed, hosts that are cut off."""
