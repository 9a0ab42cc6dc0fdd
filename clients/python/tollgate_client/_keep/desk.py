"""Where handles meet their keeper."""

from __future__ import annotations

import threading
from collections import deque
from typing import Callable, Deque, Dict, Generic, List, Optional, Protocol, TypeVar

from ..errors import AlreadyLeasedError, ClosedError


class Kept(Protocol):
    """What a keeper keeps."""

    name: str

    def close(self) -> None:
        """Lets it be used no more."""

    def after_fork(self) -> None:
        """It is the parent's."""


K = TypeVar("K", bound=Kept)


class Desk(Generic[K]):
    """What one client has handles of."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake`` wakes the keeper, now or when it rests next. It may be called at any moment, as
        it is when a handle is collected, and must not wait for a lock."""
        self.wake = wake
        self.is_kept = False
        """Whether there is a keeper."""
        self.is_closed = False
        self._lock = threading.Lock()
        self._kept: Dict[str, K] = {}
        self._dropped: Deque[K] = deque()

    def add(self, one: K) -> bool:
        """Adds one. Returns whether a keeper has to be started."""
        with self._lock:
            self._sweep()
            if self.is_closed:
                raise ClosedError("the client is closed")
            if one.name in self._kept:
                raise AlreadyLeasedError(one.name)
            self._kept[one.name] = one
            is_first, self.is_kept = not self.is_kept, True
        self.wake()
        return is_first

    def add_along(self, one: K) -> bool:
        """Adds one for the keeper that there is. Returns whether that was possible: else the client
        is closed, or its keeper gone."""
        with self._lock:
            if self.is_closed or not self.is_kept:
                return False
            self._kept[one.name] = one
        self.wake()
        return True

    def remove(self, one: K) -> None:
        """Its handle was closed."""
        with self._lock:
            self._remove(one)
        one.close()
        self.wake()

    def drop(self, one: K) -> None:
        """Its handle was collected. May be called at any moment."""
        self._dropped.append(one)
        self.wake()

    def live(self, has_more: bool) -> Optional[List[K]]:
        """What has handles. ``None`` if there is nothing to keep, and the keeper has no more: then
        there is no keeper any more, and what is added next starts another one."""
        with self._lock:
            self._sweep()
            if not self._kept and not has_more and not self.is_closed:
                self.is_kept = False
                return None
            return list(self._kept.values())

    def keeper_has_ended(self) -> None:
        """The keeper is gone, for whatever reason. Nobody keeps what has handles still:
        whoever waits is told."""
        with self._lock:
            self.is_kept = False
            kept, self._kept = list(self._kept.values()), {}
        for one in kept:
            one.close()

    def close(self) -> None:
        """Lets nothing be used any more, and has the keeper release everything and end."""
        with self._lock:
            self.is_closed = True
            kept = list(self._kept.values())
        for one in kept:
            one.close()
        self.wake()

    def close_soon(self) -> None:
        """The client was collected, and so were all handles. May be called at any moment."""
        self.is_closed = True
        self.wake()

    def after_fork(self) -> None:
        """All is the parent's, as is the keeper."""
        self.wake = _nobody
        self._lock = threading.Lock()
        self.is_closed, self.is_kept = True, False
        for one in self._kept.values():
            one.after_fork()

    def _sweep(self) -> None:
        while self._dropped:
            self._remove(self._dropped.popleft())

    def _remove(self, one: K) -> None:
        if self._kept.get(one.name) is one:
            del self._kept[one.name]


def _nobody() -> None:
    pass
