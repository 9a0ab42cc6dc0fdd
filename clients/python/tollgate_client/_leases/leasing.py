"""The leases of one client: what the blocking and the asyncio client have in common."""

from __future__ import annotations

from typing import Optional, Protocol, TypeVar

from .._decide.effects import Plan
from .._keep import keeping
from .._keep.effects import Clock
from .desk import Desk
from .keeper import Keeper, Lessor
from .resource import Mode, Resource, Usage


class Engine(keeping.Engine, Protocol):
    """What a client asks with: nodes, or a fake."""

    @property
    def lessor(self) -> Lessor:
        """Who leases."""


E = TypeVar("E", bound=Engine)


class Leases(keeping.Keeping[E, Desk]):
    """The leases of a client, without input and output."""

    kind = "leases"
    # A second of demand after the other.
    longest_lag = 60 * 60.0

    def __init__(self, engine: E, client_id: str) -> None:
        self._client_id = client_id
        super().__init__(engine, Desk)

    def lease(self, name: str, mode: Mode, wants: Optional[float], usage: Usage) -> Resource:
        """A new lease."""
        resource = Resource(name, mode, wants, usage, self.clock())
        self.add(resource)
        return resource

    def _plan(self, clock: Clock) -> Plan[None]:
        return Keeper(self.desk, self.engine.lessor, self._client_id, clock).run()
