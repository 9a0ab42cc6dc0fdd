"""What keeps leases and holds in the background, while a client has any: a thread, a task of the
event loop, or the looks at a fake."""
