"""How one request finds its answer: one node is called after the other until one answers."""

from __future__ import annotations

import time
from typing import Any, Callable, List, Set

import grpc

from .._decide.effects import Call, Change, Effect, Plan
from .._decide.metrics import METRICS
from .._proto.quotaservice_pb2 import AllowRequest, AllowResponse
from ..errors import InvalidRequestError, NoAnswer, NoDecisionError
from .circuit import ANSWERED, CANCELLED, FAILED
from .failures import Failure, failure
from .pool import Node, Pool

_LOOK_INTERVAL = 0.05
"""How often a call that waits for the first connection of a node looks whether another one, which was
overloaded or on trial, can be called, in seconds."""


class NodesEngine:
    """What a client with nodes asks with, blocking or with asyncio."""

    has_fake_time = False

    def __init__(self) -> None:
        self.keepers: Set[object] = set()
        """The keepers of leases and holds that use it."""
        self._is_left_to_keepers = False

    def stop(self) -> None:
        """Closes the connections that are not in use."""
        raise NotImplementedError

    def abandon(self) -> None:
        """The same without a wait or a lock, as the garbage collector may be in a thread that holds
        one."""
        raise NotImplementedError

    def client_has_ended(self) -> None:
        """The client was collected. Keepers use it until they have released everything."""
        self._is_left_to_keepers = True
        if not self.keepers:
            self.abandon()

    def close(self) -> None:
        """The client was closed. Keepers use it until they have released everything."""
        self._is_left_to_keepers = True
        if not self.keepers:
            self.stop()

    def keeper_has_ended(self, keeper: object) -> None:
        """A keeper uses it no more."""
        self.keepers.discard(keeper)
        if self._is_left_to_keepers and not self.keepers:
            self.stop()

    def clock(self) -> float:
        """The time in seconds."""
        return time.monotonic()

    def pass_time(self, seconds: float) -> bool:
        """Real time has to pass."""
        return True


class Nodes:
    """The nodes as who answers."""

    remembers = True

    def __init__(self, pool: Pool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock

    def ask(self, message: AllowRequest, deadline: float) -> Plan[AllowResponse]:
        """Asks until ``deadline``. Raises ``InvalidRequestError`` or ``NoDecisionError``."""
        return self.call(lambda node, seconds: Call(node, message, seconds), deadline)

    def call(
        self,
        effect: Callable[[Node, float], Effect],
        deadline: float,
        failure: Callable[[grpc.RpcError, float], Failure] = failure,
    ) -> Plan[Any]:
        """Calls one node after the other until one answers, until ``deadline``. ``effect`` is the
        call of a node that may take so many seconds, and ``failure`` says what an error means of a call that
        had so many seconds.
        Raises ``InvalidRequestError`` or ``NoDecisionError``."""
        pool, clock = self._pool, self._clock
        tried: List[Node] = []
        may_be_decided = False
        try:
            while True:
                start = clock()
                attempt = pool.attempt(tried, start)
                if isinstance(attempt, int):
                    if start >= deadline:
                        raise NoDecisionError(NoAnswer.TIMEOUT)
                    yield Change(attempt, min(deadline - start, _LOOK_INTERVAL))
                    continue
                # What holds if the caller gives up.
                report = CANCELLED
                try:
                    answer = yield effect(attempt.node, deadline - start)
                    if not isinstance(answer, grpc.RpcError):
                        report = ANSWERED
                        return answer
                    failed = failure(answer, deadline - start)
                    report = failed.report
                finally:
                    pool.report(attempt, report, clock())
                if failed.error is None:
                    raise InvalidRequestError(f"invalid request: {failed.text}")
                may_be_decided = may_be_decided or report in (FAILED, CANCELLED)
                if METRICS is not None:
                    METRICS.call_failed(failed.error.reason)
                tried.append(attempt.node)
                if failed.is_final or len(tried) >= max(len(pool.nodes), 2):
                    raise failed.error
        except NoDecisionError as error:
            error._may_be_decided = may_be_decided
            raise
