"""The overlay, which finds the peers closest to a key: Kademlia, or Chord."""
