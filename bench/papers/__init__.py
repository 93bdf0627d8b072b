"""The experiments of the papers that Valence's strategies come from, with Valence's own code."""
