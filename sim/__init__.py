"""The simulator: the product's own code on a virtual clock, an in-memory network and disks."""
