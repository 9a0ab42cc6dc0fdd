"""The asyncio client."""

from __future__ import annotations

import asyncio
from functools import partial
from types import TracebackType
from typing import Any, Callable, Optional, Type, TypeVar, Union

from . import _fork
from ._charges.charging import AsyncCharges
from ._decide.effects import run_async
from ._decide.settings import Configured, Servers
from ._keep.asynchronous import AsyncKeeping, close_all
from ._keep.keeping import when_collected
from ._leases.asynchronous import Acquiring, AsyncLeases, Capacity, Gauge, RateLimiter
from ._leases.handle import Place
from ._leases.resource import Mode
from ._nodes.asynchronous import AsyncNodes
from ._smart.asynchronous import AsyncSmartBuckets, SmartBucket
from ._tenants.asynchronous import AsyncHolds, Hold, Holding
from ._tenants.holding import OnLost
from .answers import Decision, Granted, Hits
from .errors import ClosedError
from .fake import AsyncFake
from .request import TenantRequest, request, tenant_request

__all__ = [
    "Acquiring",
    "Capacity",
    "Client",
    "Gauge",
    "Hold",
    "Holding",
    "Place",
    "RateLimiter",
    "SmartBucket",
]


class Client(Configured):
    """Asks tollgate for tokens, hits and holds, and leases capacity, as :class:`tollgate_client.Client` does, with
    the same settings.

    It may be made outside of an event loop, and connects with the first request. In another event
    loop, or after a fork, it connects anew; it must not be used in two event loops at a time.

    >>> async with Client("tollgate.internal:10990") as client:
    ...     await client.acquire("db", "reads", 5, max_wait=1.0)
    """

    _engine: Optional[_Engine] = None
    _is_closed = False

    async def allow(
        self,
        namespace: str,
        bucket: str,
        tokens: int = 1,
        *,
        max_wait: Optional[float] = None,
        deadline: Optional[float] = None,
        critical: bool = True,
    ) -> Decision:
        """Asks for tokens. Waits for the answer, but not for the tokens: ``granted.wait`` is left
        to the caller. The arguments and errors are those of :meth:`tollgate_client.Client.allow`.

        If the task is cancelled, tokens that were granted are lost. Use ``deadline`` and
        ``max_wait`` instead.
        """
        asked = request(namespace, bucket, tokens, max_wait, deadline, critical)
        engine = self._running()
        return await run_async(engine.decider.allow(asked), engine.perform)

    async def acquire(
        self,
        namespace: str,
        bucket: str,
        tokens: int = 1,
        *,
        max_wait: Optional[float] = None,
        deadline: Optional[float] = None,
        critical: bool = True,
    ) -> Granted:
        """Asks for tokens, and waits until they may be used. The arguments and errors are those of
        :meth:`tollgate_client.Client.acquire`.

        If the task is cancelled, tokens that were granted are lost.
        """
        asked = request(namespace, bucket, tokens, max_wait, deadline, critical)
        engine = self._running()
        return await run_async(engine.decider.acquire(asked), engine.perform)

    def charge(self, namespace: str, bucket: str, tokens: int) -> None:
        """Charges a bucket with what a request has cost beyond its tokens, once that is known. Does
        not wait. The arguments and errors are those of :meth:`tollgate_client.Client.charge`. To be
        called in an event loop."""
        self._keep(AsyncCharges, AsyncCharges).charge(namespace, bucket, tokens)

    def smart_bucket(
        self, namespace: str, bucket: str, *, ahead: float = 1.0, critical: bool = True
    ) -> SmartBucket:
        """Takes tokens of a bucket ahead of need, so that their use costs no call to a node. The
        arguments and errors are those of :meth:`tollgate_client.Client.smart_bucket`. To be called
        in an event loop."""
        smart = self._keep(AsyncSmartBuckets, AsyncSmartBuckets)
        return SmartBucket(self, smart, namespace, bucket, ahead, critical)

    async def hits(
        self,
        resource: str,
        domain: str,
        copies: int = 1,
        *,
        min_copies: Optional[int] = None,
        max_wait: float = 0.0,
        deadline: Optional[float] = None,
    ) -> Hits:
        """Asks for hits of a domain, a user or a tenant, on a resource. The arguments and errors are
        those of :meth:`tollgate_client.Client.hits`.

        If the task is cancelled, hits that were granted count.
        """
        asked = tenant_request(resource, domain, copies, min_copies, max_wait, deadline)
        engine = self._running()
        return await run_async(engine.tenants.hits(asked), engine.perform)

    def hold(
        self,
        resource: str,
        domain: str,
        copies: int = 1,
        *,
        min_copies: Optional[int] = None,
        max_wait: float = 0.0,
        deadline: Optional[float] = None,
        ttl: float = 10.0,
        on_lost: Optional[OnLost] = None,
    ) -> Holding:
        """Holds copies of a resource for a domain, a user or a tenant: renews them in the background
        until they are released. The arguments and errors are those of
        :meth:`tollgate_client.Client.hold`.

        >>> async with client.hold("sandbox", "acme", max_wait=60.0) as held:
        ...     await run(until=held.lost)

        With ``await`` instead, call ``release`` at the end. If the task is cancelled meanwhile, copies
        that were granted are released.
        """
        asked = tenant_request(resource, domain, copies, min_copies, max_wait, deadline, ttl)
        return Holding(partial(self._hold, asked, on_lost))

    async def _hold(self, asked: TenantRequest, on_lost: Optional[OnLost]) -> Hold:
        holds = self._keep(AsyncHolds, lambda engine: AsyncHolds(engine, self._client_id()))
        hold = Hold(self, holds, asked, on_lost)
        await run_async(holds.engine.tenants.hold(asked, hold._session), holds.perform)
        return hold

    def rate_limiter(
        self, resource: str, *, wants: Optional[float] = None, mode: Mode = Mode.SAFE
    ) -> RateLimiter:
        """A lease that limits a rate: the capacity is so much a second. The
        arguments and errors are those of :meth:`tollgate_client.Client.rate_limiter`. To be called
        in an event loop."""
        return RateLimiter(self, self._leasing(), resource, mode, wants)

    def gauge(
        self, resource: str, *, wants: Optional[float] = None, mode: Mode = Mode.SAFE
    ) -> Gauge:
        """A lease that limits how much is done at once: the capacity is so many. The
        arguments and errors are those of :meth:`tollgate_client.Client.gauge`. To be called in
        an event loop."""
        return Gauge(self, self._leasing(), resource, mode, wants)

    def capacity(
        self, resource: str, *, wants: Optional[float] = None, mode: Mode = Mode.SAFE
    ) -> Capacity:
        """A lease whose use is left to the application. The arguments and errors are
        those of :meth:`tollgate_client.Client.capacity`. To be called in an event loop."""
        return Capacity(self, self._leasing(), resource, mode, wants)

    async def close(self) -> None:
        """Releases all leases and holds, so that others get them at once, tries once more what is
        charged and not taken yet, and closes the connections, once the requests that are under way
        have ended. Further requests, and those who wait for leased resources or tokens of smart buckets, get ``ClosedError``.
        Takes up to five seconds if there are leases, holds or charges and no node answers."""
        self._is_closed = True
        self._detach()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        await close_all(list(self._kept.values()))

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        await self.close()

    def _running(self) -> _Engine:
        engine = self._engine
        if engine is not None and engine.loop is asyncio.get_running_loop():
            return engine
        if self._is_closed:
            raise ClosedError("the client is closed")
        if engine is not None:
            # Its event loop has ended.
            self._detach()
            engine.stop()
            for keeping in self._kept.values():
                keeping.abandon()
            self._kept = {}
        self._engine = engine = self._new_engine()
        return engine

    def _leasing(self) -> AsyncLeases:
        return self._keep(AsyncLeases, lambda engine: AsyncLeases(engine, self._client_id()))

    def _keep(self, kind: Type[K], begin: Callable[[_Engine], K]) -> K:
        """What the client keeps of this kind in this event loop, from the first use on."""
        engine = self._running()
        kept: Optional[K] = self._kept.get(kind)
        if kept is None:
            kept = self._kept[kind] = begin(engine)
            self._finalizers.append(when_collected(self, kept.client_has_ended))
        return kept

    def _new_engine(self) -> _Engine:
        if not isinstance(self._backend, Servers):
            return AsyncFake(self._rules, self._backend)
        nodes = AsyncNodes(self._rules, self._backend)
        self._finalizers.append(when_collected(self, nodes.client_has_ended))
        return nodes

    def after_fork(self) -> None:
        self._detach()
        self._kept = {}
        if self._engine is not None:
            _fork.abandon(self._engine)
            self._engine = None


_Engine = Union[AsyncNodes, AsyncFake]
K = TypeVar("K", bound=AsyncKeeping[Any])
