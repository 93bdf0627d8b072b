"""THE PROOF: the code of `protocols/`, unchanged, on a virtual clock and an in-memory network."""
