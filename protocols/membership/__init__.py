"""Membership of the cluster: which peers are here, and which are gone."""
