"""How hits and holds are asked for: at one node after the other until one answers."""

from __future__ import annotations

from typing import Any, Callable

import grpc

from .._decide.effects import MethodCall, Plan
from .._proto.holds_pb2 import (
    EndSessionRequest,
    EndSessionResponse,
    KeepAliveRequest,
    KeepAliveResponse,
    ReserveRequest,
    ReserveResponse,
)
from .._proto.throttle_pb2 import ThrottleRequest, ThrottleResponse
from .asking import Nodes
from .failures import Failure, failure_to_end, tenant_failure


class TenantNodes:
    """The nodes as who answers about hits and holds."""

    remembers = True

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def hits(self, message: ThrottleRequest, deadline: float) -> Plan[ThrottleResponse]:
        """Asks for hits until ``deadline``."""
        return self._call("hits", message, deadline)

    def reserve(self, message: ReserveRequest, deadline: float) -> Plan[ReserveResponse]:
        """Asks for a hold until ``deadline``."""
        return self._call("reserve", message, deadline)

    def keep_alive(self, message: KeepAliveRequest, deadline: float) -> Plan[KeepAliveResponse]:
        """Renews sessions."""
        return self._call("keep_alive", message, deadline)

    def end_session(self, message: EndSessionRequest, deadline: float) -> Plan[EndSessionResponse]:
        """Ends a session."""
        return self._call("end_session", message, deadline, failure_to_end)

    def _call(
        self,
        method: str,
        message: Any,
        deadline: float,
        failure: Callable[[grpc.RpcError, float], Failure] = tenant_failure,
    ) -> Plan[Any]:
        return self._nodes.call(
            lambda node, seconds: MethodCall(node.connection, method, message, seconds),
            deadline,
            failure,
        )
