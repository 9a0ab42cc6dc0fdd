"""The asyncio client."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Optional, Type, Union

from . import _fork
from ._decide.effects import run_async
from ._decide.settings import Configured, Servers
from ._leases.asynchronous import Acquiring, AsyncLeases, Capacity, Gauge, RateLimiter
from ._leases.handle import Place
from ._leases.leasing import when_collected
from ._leases.resource import Mode
from ._nodes.asynchronous import AsyncNodes
from .answers import Decision, Granted
from .errors import ClosedError
from .fake import AsyncFake
from .request import request


__all__ = ["Acquiring", "Capacity", "Client", "Gauge", "Place", "RateLimiter"]


class Client(Configured):
    """Asks tollgate for tokens, and leases capacity, as :class:`tollgate_client.Client` does, with
    the same settings.

    It may be made outside of an event loop, and connects with the first request. In another event
    loop, or after a fork, it connects anew; it must not be used in two event loops at a time.

    >>> async with Client("tollgate.internal:10990") as client:
    ...     await client.acquire("db", "reads", 5, max_wait=1.0)
    """

    _engine: Optional[_Engine] = None
    _leases: Optional[AsyncLeases] = None
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
        """Releases all leases, so that others get their capacity at once, and closes the
        connections, once the requests that are under way have ended. Further requests, and those
        who wait for leased resources, get ``ClosedError``. Takes up to five seconds if there are
        leases and no node answers."""
        self._is_closed = True
        self._detach()
        engine, self._engine = self._engine, None
        if self._leases is not None:
            await self._leases.close()
        if engine is not None:
            engine.stop()

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
            if self._leases is not None:
                self._leases.abandon()
        self._engine = engine = self._new_engine()
        return engine

    def _leasing(self) -> AsyncLeases:
        engine = self._running()
        if self._leases is None or self._leases.engine is not engine:
            self._leases = leases = AsyncLeases(engine, self._client_id())
            # Called before the engine's.
            self._leases_finalizer = when_collected(self, leases.client_has_ended)
        return self._leases

    def _new_engine(self) -> _Engine:
        if not isinstance(self._backend, Servers):
            return AsyncFake(self._rules, self._backend)
        nodes = AsyncNodes(self._rules, self._backend)
        self._finalizer = when_collected(self, nodes.client_has_ended)
        return nodes

    def after_fork(self) -> None:
        self._detach()
        self._leases = None
        if self._engine is not None:
            _fork.abandon(self._engine)
            self._engine = None


_Engine = Union[AsyncNodes, AsyncFake]
