"""Waits for what other processes do."""

from __future__ import annotations

import time
from typing import Callable, Iterator

LIMIT = 30.0
"""Seconds that anything may take, even on a busy machine."""


def polls(what: str, pause: float = 0.005) -> Iterator[None]:
    """Goes on until the limit, and fails then."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        yield
        time.sleep(pause)
    raise AssertionError(f"not within {LIMIT} seconds: {what}")


def eventually(what: str, holds: Callable[[], bool]) -> None:
    for _ in polls(what):
        if holds():
            return
