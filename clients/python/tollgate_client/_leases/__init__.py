"""Leases: a client asks every few seconds for a share of a resource's capacity, and limits itself
to it."""
