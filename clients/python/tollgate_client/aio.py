"""The asyncio client."""

from __future__ import annotations

import asyncio
import weakref
from types import TracebackType
from typing import Any, Optional, Type, Union

from . import _fork
from ._decide.effects import run_async
from ._decide.settings import Configured, Servers
from ._nodes.asynchronous import AsyncNodes
from .answers import Decision, Granted
from .errors import ClosedError
from .fake import AsyncFake
from .request import request


class Client(Configured):
    """Asks tollgate for tokens, as :class:`tollgate_client.Client` does, with the same settings.

    It may be made outside of an event loop, and connects with the first request. In another event
    loop, or after a fork, it connects anew; it must not be used in two event loops at a time.

    >>> async with Client("tollgate.internal:10990") as client:
    ...     await client.acquire("db", "reads", 5, max_wait=1.0)
    """

    _engine: Optional[_Engine] = None
    _finalizer: Optional[weakref.finalize[..., Any]] = None
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

    async def close(self) -> None:
        """Closes the connections, once the requests that are under way have ended. Further requests
        raise ``ClosedError``."""
        self._is_closed = True
        engine, self._engine = self._engine, None
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
            engine.stop()
        self._engine = engine = self._new_engine()
        return engine

    def _new_engine(self) -> _Engine:
        if not isinstance(self._backend, Servers):
            return AsyncFake(self._rules, self._backend)
        nodes = AsyncNodes(self._rules, self._backend)
        self._finalizer = weakref.finalize(self, nodes.abandon)
        return nodes

    def after_fork(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._engine is not None:
            _fork.abandon(self._engine)
            self._engine = None


_Engine = Union[AsyncNodes, AsyncFake]
