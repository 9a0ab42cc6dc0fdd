"""Where handles meet the keeper of their leases."""

from __future__ import annotations

import threading
from collections import deque
from typing import Callable, Deque, Dict, List, Optional

from ..errors import AlreadyLeasedError, ClosedError, InvalidRequestError
from .resource import Resource

_LONGEST_NAME = 1024
"""The most bytes of a resource's name."""


class Desk:
    """The resources of one client that have handles."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """``wake`` wakes the keeper, now or when it rests next. It may be called at any moment, as
        it is when a handle is collected, and must not wait for a lock."""
        self.wake = wake
        self.is_kept = False
        """Whether there is a keeper."""
        self.is_closed = False
        self._lock = threading.Lock()
        self._resources: Dict[str, Resource] = {}
        self._dropped: Deque[Resource] = deque()

    def add(self, resource: Resource) -> bool:
        """Adds a resource. Returns whether a keeper has to be started."""
        try:
            length = len(resource.name.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"invalid request: {error}") from error
        if not 1 <= length <= _LONGEST_NAME:
            raise InvalidRequestError("invalid request: the name of a resource has 1 to 1024 bytes")
        with self._lock:
            self._sweep()
            if self.is_closed:
                raise ClosedError("the client is closed")
            if resource.name in self._resources:
                raise AlreadyLeasedError(resource.name)
            self._resources[resource.name] = resource
            is_first, self.is_kept = not self.is_kept, True
        self.wake()
        return is_first

    def remove(self, resource: Resource) -> None:
        """The handle of a resource was closed."""
        with self._lock:
            self._remove(resource)
        resource.close()
        self.wake()

    def drop(self, resource: Resource) -> None:
        """The handle of a resource was collected. May be called at any moment."""
        self._dropped.append(resource)
        self.wake()

    def live(self, holds_leases: bool) -> Optional[List[Resource]]:
        """The resources that have handles. ``None`` if there is nothing to keep: then there is no
        keeper any more, and the next resource starts another one."""
        with self._lock:
            self._sweep()
            if not self._resources and not holds_leases and not self.is_closed:
                self.is_kept = False
                return None
            return list(self._resources.values())

    def keeper_has_ended(self) -> None:
        """The keeper is gone, for whatever reason. Nobody keeps the leases of those who have handles
        still: whoever waits is told."""
        with self._lock:
            self.is_kept = False
            resources, self._resources = list(self._resources.values()), {}
        for resource in resources:
            resource.close()

    def hurry(self, resource: Resource) -> None:
        """Has a lease refreshed soon, not at its time."""
        if not resource.is_urgent:
            resource.is_urgent = True
            self.wake()

    def close(self) -> None:
        """Lets nothing be used any more, and has the keeper release all leases and end."""
        with self._lock:
            self.is_closed = True
            resources = list(self._resources.values())
        for resource in resources:
            resource.close()
        self.wake()

    def close_soon(self) -> None:
        """The client was collected, and so were all handles. May be called at any moment."""
        self.is_closed = True
        self.wake()

    def after_fork(self) -> None:
        """The leases are the parent's, as is the keeper."""
        self.wake = _nobody
        self._lock = threading.Lock()
        self.is_closed, self.is_kept = True, False
        for resource in self._resources.values():
            resource.after_fork()

    def _sweep(self) -> None:
        while self._dropped:
            self._remove(self._dropped.popleft())

    def _remove(self, resource: Resource) -> None:
        if self._resources.get(resource.name) is resource:
            del self._resources[resource.name]


def _nobody() -> None:
    pass
