"""What a process that was forked must not share with its parent: locks that another thread of the
parent may have held, connections and threads."""

from __future__ import annotations

import os
import weakref
from typing import List, Protocol


class Forked(Protocol):
    """Is told in the child after a fork."""

    def after_fork(self) -> None:
        """Replaces locks, and drops connections and threads."""


_objects: weakref.WeakSet[Forked] = weakref.WeakSet()

_abandoned: List[object] = []


def remember(forked: Forked) -> None:
    """Has an object told of forks while it lives."""
    _objects.add(forked)


def abandon(connections: object) -> None:
    """Keeps what is the parent's, so that it is neither used nor closed here."""
    _abandoned.append(connections)


def _after_fork() -> None:
    for forked in list(_objects):
        forked.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
