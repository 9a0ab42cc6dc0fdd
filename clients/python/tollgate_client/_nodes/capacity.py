"""How leases are asked for and given back: at the master that a server names, else at one of the
nodes."""

from __future__ import annotations

from typing import Any, Callable

import grpc

from .._decide.effects import Dial, MethodCall, Plan
from .._decide.metrics import METRICS
from .._proto.doorman_pb2 import (
    GetCapacityRequest,
    GetCapacityResponse,
    ReleaseCapacityRequest,
    ReleaseCapacityResponse,
)
from ..errors import InvalidRequestError, NoAnswer, NoDecisionError, SettingsError
from .address import parse
from .asking import Nodes
from .circuit import ANSWERED
from .failures import failure
from .pool import Node

_MOST_HOPS = 3
"""How often a server may name another one as the master before the client gives up for now."""


class CapacityNodes:
    """The nodes as who leases. Not for several threads."""

    def __init__(self, nodes: Nodes, clock: Callable[[], float]) -> None:
        self._nodes = nodes
        self._clock = clock
        # The connection to the server that keeps the leases, if another one has named it.
        self._master: Any = None

    def get_capacity(
        self, message: GetCapacityRequest, deadline: float
    ) -> Plan[GetCapacityResponse]:
        """Asks for leases until ``deadline``."""
        return self._call_master("get_capacity", message, deadline)

    def release_capacity(
        self, message: ReleaseCapacityRequest, deadline: float
    ) -> Plan[ReleaseCapacityResponse]:
        """Gives leases back."""
        return self._call_master("release_capacity", message, deadline)

    def _call_master(self, method: str, message: Any, deadline: float) -> Plan[Any]:
        for _ in range(_MOST_HOPS + 1):
            answer = yield from self._call_once(method, message, deadline)
            if not answer.HasField("mastership"):
                return answer
            yield from self._follow(answer.mastership.master_address)
        raise _no_master("the servers name each other as the master")

    def _call_once(self, method: str, message: Any, deadline: float) -> Plan[Any]:
        """Calls the master if a server has named one, else one node after the other until one
        answers. A master that does not answer is forgotten."""
        if self._master is not None:
            start = self._clock()
            answer = yield MethodCall(self._master, method, message, deadline - start)
            if not isinstance(answer, grpc.RpcError):
                return answer
            failed = failure(answer, self._clock() - start)
            if failed.error is None:
                raise InvalidRequestError(f"invalid request: {failed.text}")
            if METRICS is not None:
                METRICS.call_failed(failed.error.reason)
            if failed.report is ANSWERED:
                raise failed.error
            self._master = None

        def call(node: Node, seconds: float) -> MethodCall:
            return MethodCall(node.connection, method, message, seconds)

        # If there is no time left, that is the answer.
        answer = yield from self._nodes.call(call, deadline)
        return answer

    def _follow(self, master: str) -> Plan[None]:
        """Calls the server from now on that another one has named as the master."""
        self._master = None
        if not master:
            raise _no_master("the servers have no master at present")
        try:
            address = parse(master)
        except SettingsError as error:
            raise _no_master(str(error)) from error
        self._master = yield Dial(address)


def _no_master(text: str) -> NoDecisionError:
    return NoDecisionError(NoAnswer.FAILED, text)
