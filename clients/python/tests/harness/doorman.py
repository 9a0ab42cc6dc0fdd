"""A Doorman that the test leads: what it is asked, and what it answers."""

from __future__ import annotations

import threading
import time
from concurrent import futures
from typing import Any, List, NamedTuple, Optional

import grpc

from tollgate_client._proto.doorman_pb2 import (
    GetCapacityRequest,
    GetCapacityResponse,
    Lease,
    ReleaseCapacityRequest,
    ReleaseCapacityResponse,
    ResourceResponse,
)
from tollgate_client._proto.doorman_pb2_grpc import (
    CapacityServicer,
    add_CapacityServicer_to_server,
)


class Asked(NamedTuple):
    """A request for leases."""

    at: float
    client_id: str
    resources: List[str]


class Doorman(CapacityServicer):  # type: ignore[misc]
    """It is the master, or names another one; clients get all that they want."""

    def __init__(self) -> None:
        self.master: Optional[str] = None
        """The address of another master."""
        self.safe: Optional[float] = None
        self.is_degraded = False
        self.length = 60
        """Seconds for which leases are valid."""
        self.asked: List[Asked] = []
        self.released: List[str] = []
        self._lock = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        add_CapacityServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def GetCapacity(self, request: GetCapacityRequest, _: Any) -> GetCapacityResponse:
        answer = GetCapacityResponse()
        with self._lock:
            names = [asked.resource_id for asked in request.resource]
            self.asked.append(Asked(time.monotonic(), request.client_id, names))
            if self.master is not None:
                answer.mastership.master_address = self.master
                return answer
            expires = int(time.time()) + self.length
            for asked in request.resource:
                gets = Lease(expiry_time=expires, refresh_interval=1, capacity=asked.wants)
                one = ResourceResponse(
                    resource_id=asked.resource_id, gets=gets, degraded=self.is_degraded
                )
                if self.safe is not None:
                    one.safe_capacity = self.safe
                answer.response.append(one)
        return answer

    def ReleaseCapacity(self, request: ReleaseCapacityRequest, _: Any) -> ReleaseCapacityResponse:
        answer = ReleaseCapacityResponse()
        with self._lock:
            if self.master is not None:
                answer.mastership.master_address = self.master
            else:
                self.released.extend(request.resource_id)
        return answer

    def calls(self) -> int:
        """The number of requests for leases so far."""
        return len(self.asked)

    def close(self) -> None:
        self._server.stop(None).wait()
