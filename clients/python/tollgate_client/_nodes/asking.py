"""How one request finds its answer: one node is called after the other until one answers."""

from __future__ import annotations

import time
from typing import Any, Callable, List

import grpc

from .._decide.effects import Call, Change, Effect, Plan
from .._decide.metrics import METRICS
from .._proto.quotaservice_pb2 import AllowRequest, AllowResponse
from ..errors import InvalidRequestError, NoAnswer, NoDecisionError
from .circuit import ANSWERED, CANCELLED
from .failures import failure
from .pool import Node, Pool


class NodesEngine:
    """What a client with nodes asks with, blocking or with asyncio."""

    has_fake_time = False

    is_left_to_keeper = False
    """Whether the keeper of leases stops it, after their release."""

    def stop(self) -> None:
        """Closes the connections that are not in use."""
        raise NotImplementedError

    def abandon(self) -> None:
        """The same without a wait or a lock, as the garbage collector may be in a thread that holds
        one."""
        raise NotImplementedError

    def client_has_ended(self) -> None:
        """The client was collected."""
        if not self.is_left_to_keeper:
            self.abandon()

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

    def call(self, effect: Callable[[Node, float], Effect], deadline: float) -> Plan[Any]:
        """Calls one node after the other until one answers, until ``deadline``. ``effect`` is the
        call of a node that may take so many seconds. Raises ``InvalidRequestError`` or
        ``NoDecisionError``."""
        pool, clock = self._pool, self._clock
        tried: List[Node] = []
        while True:
            start = clock()
            attempt = pool.attempt(tried, start)
            if isinstance(attempt, int):
                if start >= deadline:
                    raise NoDecisionError(NoAnswer.TIMEOUT)
                yield Change(attempt, deadline - start)
                continue
            # What holds if the caller gives up.
            report = CANCELLED
            try:
                answer = yield effect(attempt.node, deadline - start)
                if not isinstance(answer, grpc.RpcError):
                    report = ANSWERED
                    return answer
                failed = failure(answer, clock() - start)
                report = failed.report
            finally:
                pool.report(attempt, report, clock())
            if failed.error is None:
                raise InvalidRequestError(f"invalid request: {failed.text}")
            if METRICS is not None:
                METRICS.call_failed(failed.error.reason)
            tried.append(attempt.node)
            if failed.is_final or len(tried) >= max(len(pool.nodes), 2):
                raise failed.error
