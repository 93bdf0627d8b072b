"""WHAT runs: the model, the documents users write, the formats read, and plans. Pure."""
