"""WHAT RUNS: the model of a workflow, the formats it is read from, and plans. Pure."""
