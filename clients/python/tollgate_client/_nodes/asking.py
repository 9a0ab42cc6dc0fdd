"""How one request finds its answer: one node is called after the other until one answers."""

from __future__ import annotations

from typing import Callable, List

import grpc

from .._decide.effects import Call, Change, Plan
from .._decide.metrics import METRICS
from .._proto.quotaservice_pb2 import AllowRequest, AllowResponse
from ..errors import InvalidRequestError, NoAnswer, NoDecisionError
from .circuit import ANSWERED, CANCELLED
from .failures import failure
from .pool import Node, Pool


class Nodes:
    """The nodes as who answers."""

    remembers = True

    def __init__(self, pool: Pool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock

    def ask(self, message: AllowRequest, deadline: float) -> Plan[AllowResponse]:
        """Asks until ``deadline``. Raises ``InvalidRequestError`` or ``NoDecisionError``."""
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
                answer = yield Call(attempt.node, message, deadline - start)
                if not isinstance(answer, grpc.RpcError):
                    report = ANSWERED
                    response: AllowResponse = answer
                    return response
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
