"""Charges: what requests have cost beyond their tokens, put together for each bucket, and taken from
it in the background."""
