"""What the handles of the blocking and the asyncio client have in common."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import Any, Optional, Type

from .._keep.keeping import when_collected
from .capacity import Changes
from .gauge import GaugeUsage, Places
from .leasing import Leases
from .rate import Rate, RateUsage
from .resource import Mode, Unmeasured, Usage


class Handle:
    """A lease on a resource. It is released when this is closed, or nothing refers to it any
    more."""

    def __init__(
        self,
        client: object,
        leases: Leases[Any],
        name: str,
        mode: Mode,
        wants: Optional[float],
        usage: Usage,
    ) -> None:
        # Keeps the connections open.
        self._client = client
        self._leases = leases
        self._resource = resource = leases.lease(name, mode, wants, usage)
        self._finalizer = when_collected(self, leases.desk.drop, resource)

    @property
    def resource(self) -> str:
        """The name of the resource."""
        return self._resource.name

    def set_wants(self, wants: float) -> None:
        """Asks for this capacity from now on, whatever is demanded."""
        self._leases.catch_up()
        if wants != self._resource.wants:
            self._resource.wants = wants
            self._leases.desk.hurry(self._resource)

    def _now(self) -> float:
        """What may be used now."""
        self._leases.catch_up()
        now = self._leases.clock()
        return self._resource.held_at(now).at(now)

    def _close(self) -> None:
        self._finalizer.detach()
        self._leases.desk.remove(self._resource)
        self._leases.catch_up()

    def __repr__(self) -> str:
        return f"<{type(self).__qualname__} of {self._resource.name}>"


class RateHandle(Handle):
    """A lease on so much a second."""

    def __init__(
        self, client: object, leases: Leases[Any], name: str, mode: Mode, wants: Optional[float]
    ) -> None:
        usage = RateUsage(leases.clock())
        super().__init__(client, leases, name, mode, wants, usage)
        hurry = partial(leases.desk.hurry, self._resource)
        self._rate = Rate(self._resource, usage, hurry, leases.clock)

    def try_use(self, n: int = 1) -> bool:
        """Uses ``n`` if that is possible now, and nobody waits; returns whether it was."""
        self._leases.catch_up()
        return self._rate.try_use(n)

    @property
    def capacity(self) -> float:
        """What may be used a second now."""
        return self._now()


class GaugeHandle(Handle):
    """A lease on so many at once."""

    def __init__(
        self, client: object, leases: Leases[Any], name: str, mode: Mode, wants: Optional[float]
    ) -> None:
        usage = GaugeUsage()
        super().__init__(client, leases, name, mode, wants, usage)
        hurry = partial(leases.desk.hurry, self._resource)
        self._places = Places(self._resource, usage, hurry, leases.clock)

    def try_acquire(self) -> Optional[Place]:
        """A place, if there is one now, and nobody waits."""
        self._leases.catch_up()
        return Place(self, self._places) if self._places.try_acquire() else None

    @property
    def capacity(self) -> float:
        """How many may have a place now."""
        return self._now()


class CapacityHandle(Handle):
    """A leased capacity that the application uses as it likes."""

    def __init__(
        self, client: object, leases: Leases[Any], name: str, mode: Mode, wants: Optional[float]
    ) -> None:
        wants = 0.0 if wants is None else wants
        super().__init__(client, leases, name, mode, wants, Unmeasured())
        self._changes = Changes(self._resource, leases.clock)

    def get(self) -> float:
        """What may be used now."""
        return self._now()


class Place:
    """A place of a gauge: a context manager that frees it at the end. It is free, too, when nothing
    refers to this any more, but maybe later."""

    def __init__(self, handle: Handle, places: Places) -> None:
        self._handle: Optional[Handle] = handle
        self._places = places

    def release(self) -> None:
        """Frees the place. A second time changes nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._places.release()

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.release()

    def __del__(self) -> None:
        handle = self._handle
        if handle is not None:
            self._places.lose()
            handle._leases.desk.wake()
