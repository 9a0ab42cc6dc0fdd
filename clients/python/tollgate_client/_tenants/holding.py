"""The holds of one client: what the blocking and the asyncio client have in common."""

from __future__ import annotations

from typing import Any, Callable, Optional, Protocol, TypeVar

from .._decide.effects import Plan
from .._keep import keeping
from .._keep.desk import Desk
from .._keep.effects import Clock
from ..answers import DecidedBy
from ..request import TenantRequest
from .decider import TenantDecider
from .keeper import Keeper
from .session import Session

OnLost = Callable[[], object]


class Engine(keeping.Engine, Protocol):
    """What a client asks with: nodes, or a fake."""

    @property
    def tenants(self) -> TenantDecider:
        """What decides."""


E = TypeVar("E", bound=Engine)


class Holds(keeping.Keeping[E, Desk[Session]]):
    """The holds of a client, without input and output."""

    kind = "holds"
    most_calls: int
    """The most calls at a time of each kind: those for many holds, and those for one."""

    def __init__(self, engine: E, client_id: str) -> None:
        self._client_id = client_id
        super().__init__(engine, Desk)

    def session(self, request: TenantRequest, on_lost: Optional[OnLost]) -> Session:
        """A new session, which the keeper knows before it is asked for, and so ends it whatever
        becomes of its caller."""
        session = Session(request, self._client_id, self.desk, self.new_signal(), on_lost)
        self.add(session)
        return session

    def _plan(self, clock: Clock) -> Plan[None]:
        return Keeper(self.desk, self.engine.tenants, clock, self.most_calls).run()


class Handle:
    """Copies of a resource that are held. They are released by :meth:`release`, at the end of a
    ``with`` block, or when nothing refers to this any more."""

    def __init__(
        self,
        client: object,
        holds: Holds[Any],
        request: TenantRequest,
        on_lost: Optional[OnLost],
    ) -> None:
        # Keeps the connections open.
        self._client = client
        self._holds = holds
        self._session = session = holds.session(request, on_lost)
        self._finalizer = keeping.when_collected(self, session.drop)

    @property
    def resource(self) -> str:
        """The name of the resource."""
        return self._session.resource

    @property
    def domain(self) -> str:
        """Whom the copies are used for."""
        return self._session.domain

    @property
    def copies(self) -> int:
        """How many copies are held, or were."""
        return self._session.copies

    @property
    def decided_by(self) -> DecidedBy:
        """Who has granted the copies, as of now: what a degraded node or the fallback has granted
        is asked for again until a node has recorded it."""
        self._holds.catch_up()
        reserved = self._session.reserved
        assert reserved is not None, "handles are given out only if copies are granted"
        return reserved.decided_by

    @property
    def shadow(self) -> bool:
        """Whether the copies were granted only because the limits are not enforced yet."""
        return self._session.shadow

    @property
    def is_held(self) -> bool:
        """Whether the copies may be used: they are neither released nor lost."""
        self._holds.catch_up()
        return self._session.is_held and not self._holds.is_gone

    def release(self) -> None:
        """Releases the copies, in the background. A second time changes nothing."""
        self._finalizer.detach()
        self._session.release()
        self._holds.catch_up()

    def __repr__(self) -> str:
        return f"<{type(self).__qualname__} of {self.copies} of {self.resource}>"
