"""Smart buckets: tokens of a bucket that the client takes ahead of need, so that their use costs no
call to a node."""
