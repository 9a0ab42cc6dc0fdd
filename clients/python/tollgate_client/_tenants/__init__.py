"""Hits and holds of tenants: a request for either is decided as one for tokens is, and a keeper renews
what is held."""
