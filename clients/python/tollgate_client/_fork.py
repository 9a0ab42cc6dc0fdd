"""What a process that was forked must not share with its parent: locks that another thread of the
parent may have held, connections and threads."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """Is told in the child after a fork."""

    def after_fork(self) -> None:
        """Replaces locks, and drops connections and threads."""


_objects: weakref.WeakSet[Forked] = weakref.WeakSet()


def remember(forked: Forked) -> None:
    """Has an object told of forks while it lives."""
    _objects.add(forked)


def _after_fork() -> None:
    for forked in list(_objects):
        forked.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
