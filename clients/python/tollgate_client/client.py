"""The blocking client."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Callable, Optional, Type, TypeVar, Union

from . import _fork
from ._charges.charging import BlockingCharges
from ._decide.effects import run
from ._decide.settings import Configured, Servers
from ._keep.blocking import BlockingKeeping, close_all
from ._keep.keeping import when_collected
from ._leases.blocking import BlockingLeases, Capacity, Gauge, RateLimiter
from ._leases.resource import Mode
from ._nodes.blocking import BlockingNodes
from ._smart.blocking import BlockingSmartBuckets, SmartBucket
from ._tenants.blocking import BlockingHolds, Hold
from ._tenants.holding import OnLost
from .answers import Decision, Granted, Hits
from .errors import ClosedError
from .fake import BlockingFake
from .request import request, tenant_request


class Client(Configured):
    """Asks tollgate for tokens, hits and holds, and leases capacity. Threads may share it; one client per process is
    enough. It connects with the first request, and after a fork the child connects anew.

    >>> with Client("tollgate.internal:10990", fallback=Fallback.rate(10, burst=20)) as client:
    ...     client.acquire("db", "reads", 5, max_wait=1.0)  # Waits up to a second for five tokens.
    """

    _engine: Optional[_Engine] = None
    _is_closed = False

    def allow(
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
        to the caller.

        tokens: how many; 0 means 1.
        max_wait: the longest wait for the tokens in seconds, in whole milliseconds. Without it, and
            at most, the bucket's own limit.
        deadline: the longest wait for an answer in seconds, instead of the client's.
        critical: ``False`` leaves what the bucket keeps in reserve for critical requests.

        A refusal is remembered until its retry time, for a second at most: who asks for as many
        tokens or more before is refused without a call.

        Raises ``InvalidRequestError``, and ``NoDecisionError`` if no node decides and no fallback
        is set.
        """
        asked = request(namespace, bucket, tokens, max_wait, deadline, critical)
        engine = self._engine or self._start()
        return run(engine.decider.allow(asked), engine.perform)

    def acquire(
        self,
        namespace: str,
        bucket: str,
        tokens: int = 1,
        *,
        max_wait: Optional[float] = None,
        deadline: Optional[float] = None,
        critical: bool = True,
    ) -> Granted:
        """Asks for tokens, and waits until they may be used. The arguments are those of
        :meth:`allow`.

        With ``max_wait``, a refusal is not the end: asks again when the tokens may be there, until
        that time is over. Takes ``max_wait`` and the deadline at most. Without it, waits as long as
        the bucket's own limit has a request wait.

        Raises ``RefusedError``, ``InvalidRequestError``, and ``NoDecisionError`` if no node decides
        and no fallback is set.
        """
        asked = request(namespace, bucket, tokens, max_wait, deadline, critical)
        engine = self._engine or self._start()
        return run(engine.decider.acquire(asked), engine.perform)

    def charge(self, namespace: str, bucket: str, tokens: int) -> None:
        """Charges a bucket with what a request has cost beyond its tokens, once that is known. What
        is charged is put together, and taken from the bucket in the background, by a thread. Nobody
        waits for it, and while the bucket refuses it, it is tried again. It is never given back.

        >>> client.acquire("db", "rows")
        >>> rows = read()
        >>> client.charge("db", "rows", rows - 1)  # One was paid for.

        Raises ``InvalidRequestError`` and ``ClosedError``.
        """
        charges = self._kept.get(BlockingCharges) or self._keep(BlockingCharges, BlockingCharges)
        charges.charge(namespace, bucket, tokens)

    def smart_bucket(
        self, namespace: str, bucket: str, *, ahead: float = 1.0, critical: bool = True
    ) -> SmartBucket:
        """Takes tokens of a bucket ahead of need, so that their use costs no call to a node.

        As many are taken as are used in a second, and half of them are left when more are asked for.
        So the first use after a pause waits for a node, and up to a second's use is lost when it
        ends: what was taken is not given back. All clients together never use more than the nodes, or
        the client's fallback, have granted.

        ahead: how much use is taken ahead at most, in seconds.
        critical: ``False`` leaves what the bucket keeps in reserve for critical requests.

        Raises ``InvalidRequestError`` and ``ClosedError``.
        """
        smart = self._keep(BlockingSmartBuckets, BlockingSmartBuckets)
        return SmartBucket(self, smart, namespace, bucket, ahead, critical)

    def hits(
        self,
        resource: str,
        domain: str,
        copies: int = 1,
        *,
        min_copies: Optional[int] = None,
        max_wait: float = 0.0,
        deadline: Optional[float] = None,
    ) -> Hits:
        """Asks for hits of a domain, a user or a tenant, on a resource.

        resource: what is used.
        domain: whom it is used for.
        copies: the most hits to grant; 0 means 1.
        min_copies: the least hits to grant; by default, it is all or nothing.
        max_wait: the longest wait for the hits in seconds: a refusal is not the end, but asks again
            when the node says, until that time is over.
        deadline: the longest wait for an answer in seconds, instead of the client's.

        The hits of a request whose answer is lost count. A fallback grants the fewest hits that were
        asked for. A refusal is remembered until its retry time, for a second at most: who asks for
        as many hits or more before is refused without a call.

        Raises ``RefusedError``, ``InvalidRequestError``, and ``NoDecisionError`` if no node decides
        and no fallback is set.
        """
        asked = tenant_request(resource, domain, copies, min_copies, max_wait, deadline)
        engine = self._engine or self._start()
        return run(engine.tenants.hits(asked), engine.perform)

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
    ) -> Hold:
        """Holds copies of a resource for a domain, a user or a tenant: renews them in the background
        until they are released.

        >>> with client.hold("sandbox", "acme", max_wait=60.0) as held:
        ...     run(until=lambda: not held.is_held)

        resource: what is used.
        domain: whom it is used for.
        copies: the most copies to hold; 0 means 1.
        min_copies: the least copies to hold; by default, it is all or nothing.
        max_wait: the longest wait for the copies in seconds: a refusal is not the end, but asks again
            until that time is over.
        deadline: the longest wait for an answer in seconds, instead of the client's.
        ttl: after how many seconds others get the copies if this process is killed or cut off; from
            1 to a day.
        on_lost: called without arguments if the copies are lost, by the keeper of the holds, or when
            the client is closed. It must not block.

        The copies are lost if the session is ended by others, or no node has renewed it for two
        thirds of ``ttl``, unless the fallback grants them then. Stop using them: others get them a
        third of ``ttl`` later. A fallback grants the fewest copies that were asked for.

        Raises ``RefusedError``, ``InvalidRequestError``, and ``NoDecisionError`` if no node decides
        and no fallback is set.
        """
        asked = tenant_request(resource, domain, copies, min_copies, max_wait, deadline, ttl)
        holds = self._keep(BlockingHolds, lambda engine: BlockingHolds(engine, self._client_id()))
        hold = Hold(self, holds, asked, on_lost)
        run(holds.engine.tenants.hold(asked, hold._session), holds.perform)
        return hold

    def rate_limiter(
        self, resource: str, *, wants: Optional[float] = None, mode: Mode = Mode.SAFE
    ) -> RateLimiter:
        """A lease that limits a rate: the capacity is so much a second.

        resource: the name of the resource, of which the client may have one lease at a time.
        wants: the capacity to ask for; a number below 0 means 0. Without it, as much as is
            demanded: a fifth more than the average of the last ten seconds, or what was demanded in
            the last one if that is more; and twice as much while callers wait.
        mode: what may be used once the lease has run out, and before the first answer.

        Raises ``AlreadyLeasedError``, ``InvalidRequestError`` if the name is empty or has more than
        1,024 bytes, and ``ClosedError``.
        """
        return RateLimiter(self, self._leasing(), resource, mode, wants)

    def gauge(
        self, resource: str, *, wants: Optional[float] = None, mode: Mode = Mode.SAFE
    ) -> Gauge:
        """A lease that limits how much is done at once: the capacity is so many.

        resource: the name of the resource, of which the client may have one lease at a time.
        wants: the capacity to ask for; a number below 0 means 0. Without it, as much as is
            demanded: a fifth more than the average of the last ten seconds, or what was demanded in
            the last one if that is more.
        mode: what may be used once the lease has run out, and before the first answer.

        Raises ``AlreadyLeasedError``, ``InvalidRequestError`` if the name is empty or has more than
        1,024 bytes, and ``ClosedError``.
        """
        return Gauge(self, self._leasing(), resource, mode, wants)

    def capacity(
        self, resource: str, *, wants: Optional[float] = None, mode: Mode = Mode.SAFE
    ) -> Capacity:
        """A lease whose use is left to the application.

        resource: the name of the resource, of which the client may have one lease at a time.
        wants: the capacity to ask for; a number below 0 means 0. Without it, nothing.
        mode: what may be used once the lease has run out, and before the first answer.

        Raises ``AlreadyLeasedError``, ``InvalidRequestError`` if the name is empty or has more than
        1,024 bytes, and ``ClosedError``.
        """
        return Capacity(self, self._leasing(), resource, mode, wants)

    def close(self) -> None:
        """Releases all leases and holds, so that others get them at once, tries once more what is
        charged and not taken yet, and closes the connections, once the requests that are under way
        have ended. Further requests, and those who wait for leased resources or tokens of smart buckets, get ``ClosedError``.
        Takes up to five seconds if there are leases, holds or charges and no node answers."""
        with self._starting:
            self._is_closed = True
            engine, self._engine = self._engine, None
            keepings = list(self._kept.values())
            self._detach()
        if engine is not None:
            engine.close()
        close_all(keepings)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()

    def _start(self) -> _Engine:
        with self._starting:
            if self._is_closed:
                raise ClosedError("the client is closed")
            if self._engine is None:
                self._engine = self._new_engine()
            return self._engine

    def _leasing(self) -> BlockingLeases:
        return self._keep(BlockingLeases, lambda engine: BlockingLeases(engine, self._client_id()))

    def _keep(self, kind: Type[K], begin: Callable[[_Engine], K]) -> K:
        """What the client keeps of this kind, from the first use on."""
        engine = self._engine or self._start()
        with self._starting:
            if self._is_closed:
                raise ClosedError("the client is closed")
            kept: Optional[K] = self._kept.get(kind)
            if kept is None:
                kept = self._kept[kind] = begin(engine)
                self._finalizers.append(when_collected(self, kept.client_has_ended))
            return kept

    def _new_engine(self) -> _Engine:
        if not isinstance(self._backend, Servers):
            return BlockingFake(self._rules, self._backend)
        nodes = BlockingNodes(self._rules, self._backend)
        self._finalizers.append(when_collected(self, nodes.client_has_ended))
        return nodes

    def after_fork(self) -> None:
        self._starting = threading.Lock()
        self._detach()
        self._kept = {}
        if self._engine is not None:
            _fork.abandon(self._engine)
            self._engine = None


_Engine = Union[BlockingNodes, BlockingFake]
K = TypeVar("K", bound=BlockingKeeping[Any])
