"""The Kademlia overlay: who is close to a key."""
