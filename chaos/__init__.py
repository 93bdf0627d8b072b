"""Real peers, broken on purpose: processes that are killed, hosts that are cut off."""
