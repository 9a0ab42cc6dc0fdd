"""What an error of a call says: about its node, and about what to do next."""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple, Optional, Union

import grpc
from google.protobuf.message import DecodeError

from .._proto.health_pb2 import HealthCheckResponse
from .._proto.status_pb2 import RetryInfo, Status
from ..errors import NoAnswer, NoDecisionError
from .circuit import ANSWERED, CANCELLED, FAILED, UNREACHABLE, Outcome, Report

CHECK_TIMEOUT = 2.0
"""Seconds that a check may take, including the connection."""

_FAIR_TIME = 0.05
"""Seconds within which a node should answer: a call that has less says nothing about the node if
it gets no answer."""

_OVERLOAD_PAUSE = 0.2
"""Seconds that an overloaded node is left alone that does not say how long."""

_DETAILS = "grpc-status-details-bin"


_MISTAKES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    # A resource with limits of the other kind.
    grpc.StatusCode.FAILED_PRECONDITION,
    # A message that is too long.
    grpc.StatusCode.OUT_OF_RANGE,
)


class Failure(NamedTuple):
    """Why a call has no answer."""

    report: Report
    error: Optional[NoDecisionError]
    """``None`` if the request is wrong; another node would say so, too."""
    is_final: bool
    """Whether there is no time left, or another node would say the same."""
    text: str


def failure(error: grpc.RpcError, seconds: float) -> Failure:
    """The failure of a call that took so long."""
    code, details = error.code(), error.details() or ""
    if code in _MISTAKES:
        return Failure(ANSWERED, None, True, details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        report = FAILED if seconds >= _FAIR_TIME else CANCELLED
        return Failure(report, NoDecisionError(NoAnswer.TIMEOUT), True, details)
    text = f"{_name(code)}: {details}"
    failed = NoDecisionError(NoAnswer.FAILED, text)
    if code is grpc.StatusCode.NOT_FOUND:
        return Failure(ANSWERED, NoDecisionError(NoAnswer.NOT_CONFIGURED), True, text)
    # About the caller, not about the node.
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return Failure(ANSWERED, NoDecisionError(NoAnswer.FORBIDDEN, details), True, text)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return Failure(ANSWERED, failed, True, text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        report = Report(Outcome.OVERLOADED, _retry_delay(error))
        return Failure(report, NoDecisionError(NoAnswer.OVERLOADED), False, text)
    if _is_connect_error(code, details):
        return Failure(UNREACHABLE, NoDecisionError(NoAnswer.UNREACHABLE), False, text)
    # A connection that broke, a node that stops, or no node at all. If the request was decided, its
    # tokens are lost.
    return Failure(FAILED, failed, False, text)


def tenant_failure(error: grpc.RpcError, seconds: float) -> Failure:
    """The failure of a call about hits or holds. A node of an older version, without these calls,
    is well: for it, nothing is configured, but another one may know them."""
    failed = failure(error, seconds)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Failure(ANSWERED, NoDecisionError(NoAnswer.NOT_CONFIGURED), False, failed.text)
    return failed


def failure_to_end(error: grpc.RpcError, seconds: float) -> Failure:
    """The failure of a call that ends a session: ``UNAVAILABLE`` may mean that the store does not
    answer, and says nothing about the node then."""
    failed = tenant_failure(error, seconds)
    if error.code() is grpc.StatusCode.UNAVAILABLE and failed.report is FAILED:
        return failed._replace(report=CANCELLED, is_final=True)
    return failed


def check_problem(answer: Union[HealthCheckResponse, grpc.RpcError]) -> Optional[str]:
    """Why a node has not passed a check; ``None`` if it has."""
    if isinstance(answer, HealthCheckResponse):
        if answer.status == HealthCheckResponse.SERVING:
            return None
        names = {value: name for name, value in HealthCheckResponse.ServingStatus.items()}
        return f"its health is {names.get(answer.status, answer.status)}"
    # A load balancer, or an older server, without that service. The others are of callers without
    # the right to ask, or too many.
    if answer.code() in (
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ):
        return None
    return f"{_name(answer.code())}: {answer.details()}"


def _name(code: grpc.StatusCode) -> str:
    """The name of a status as the other libraries write it: ``DeadlineExceeded``."""
    return "".join(word.capitalize() for word in code.name.split("_"))


def _is_connect_error(code: grpc.StatusCode, details: str) -> bool:
    """Whether no connection could be made. gRPC says so only in words; were they to change, such
    an error would count as any other."""
    return code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details.lower()


def _retry_delay(error: grpc.RpcError) -> float:
    """The seconds of the RetryInfo in the trailing metadata."""
    metadata: Iterable[Any] = error.trailing_metadata() or ()
    for key, value in metadata:
        if key != _DETAILS or not isinstance(value, bytes):
            continue
        try:
            for detail in Status.FromString(value).details:
                if detail.type_url.rpartition("/")[2] == "google.rpc.RetryInfo":
                    delay = RetryInfo.FromString(detail.value).retry_delay
                    return max(delay.seconds + delay.nanos / 1e9, 0.0)
        except DecodeError:
            break
    return _OVERLOAD_PAUSE
