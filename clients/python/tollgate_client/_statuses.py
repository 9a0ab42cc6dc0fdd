"""What the interceptors of gRPC say about requests for tokens."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import grpc

from ._proto.status_pb2 import Any as AnyMessage
from ._proto.status_pb2 import Duration, RetryInfo, Status
from .errors import InvalidRequestError, RefusedError, TollgateError

Metadata = Tuple[Tuple[str, bytes], ...]


def limits_within(
    max_wait: Optional[float], deadline: float, timeout: Optional[float]
) -> Dict[str, Any]:
    """The limits of a request for a call that may take so long, the answer and the wait together."""
    if timeout is None:
        return {"max_wait": max_wait}
    deadline = min(deadline, max(timeout, 0.0))
    left = max(timeout - deadline, 0.0)
    return {"deadline": deadline, "max_wait": left if max_wait is None else min(max_wait, left)}


def status_of(error: TollgateError) -> Tuple[grpc.StatusCode, str, Metadata]:
    """The status of a call that gets no tokens, in words, too, and its trailing metadata."""
    if isinstance(error, InvalidRequestError):
        return grpc.StatusCode.INVALID_ARGUMENT, str(error), ()
    if not isinstance(error, RefusedError):
        return grpc.StatusCode.UNAVAILABLE, str(error), ()
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    if error.retry_after is None:
        return code, str(error), ()
    seconds = min(error.retry_after, 1e10)
    delay = Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))
    info = RetryInfo(retry_delay=delay).SerializeToString()
    detail = AnyMessage(type_url="type.googleapis.com/google.rpc.RetryInfo", value=info)
    status = Status(code=code.value[0], message=str(error), details=[detail])
    return code, str(error), (("grpc-status-details-bin", status.SerializeToString()),)
