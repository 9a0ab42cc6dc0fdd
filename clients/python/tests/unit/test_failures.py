"""What the error of a call says."""

from __future__ import annotations

from typing import Any, Tuple

import grpc
import pytest

from tollgate_client import NoAnswer
from tollgate_client._nodes.circuit import ANSWERED, CANCELLED, FAILED, UNREACHABLE, Outcome, Report
from tollgate_client._nodes.failures import (
    check_problem,
    failure,
    failure_to_end,
    tenant_failure,
)
from tollgate_client._proto.health_pb2 import HealthCheckResponse
from tollgate_client._proto.status_pb2 import Any as AnyMessage
from tollgate_client._proto.status_pb2 import Duration, RetryInfo, Status


class Error(grpc.RpcError):
    def __init__(self, code: str, details: str = "", metadata: Tuple[Any, ...] = ()) -> None:
        self._values = grpc.StatusCode[code], details, metadata

    def code(self) -> grpc.StatusCode:
        return self._values[0]

    def details(self) -> str:
        return self._values[1]

    def trailing_metadata(self) -> Tuple[Any, ...]:
        return self._values[2]


REFUSED = "failed to connect to all addresses; last error: Connection refused"


@pytest.mark.parametrize(
    "error, report, reason, is_final",
    [
        (Error("INVALID_ARGUMENT"), ANSWERED, None, True),
        (Error("FAILED_PRECONDITION"), ANSWERED, None, True),
        (Error("NOT_FOUND"), ANSWERED, NoAnswer.NOT_CONFIGURED, True),
        (Error("UNIMPLEMENTED"), FAILED, NoAnswer.FAILED, False),
        (Error("UNAUTHENTICATED"), ANSWERED, NoAnswer.FAILED, True),
        (Error("PERMISSION_DENIED"), ANSWERED, NoAnswer.FORBIDDEN, True),
        (Error("DEADLINE_EXCEEDED"), FAILED, NoAnswer.TIMEOUT, True),
        (Error("UNAVAILABLE", REFUSED), UNREACHABLE, NoAnswer.UNREACHABLE, False),
        (Error("UNAVAILABLE", "Socket closed"), FAILED, NoAnswer.FAILED, False),
        (Error("INTERNAL"), FAILED, NoAnswer.FAILED, False),
    ],
)
def test_each_error(error, report, reason, is_final):
    found = failure(error, 0.05)
    assert (found.report, found.is_final) == (report, is_final)
    assert (found.error and found.error.reason) == reason


def test_a_node_that_does_not_know_hits_and_holds_has_none_configured():
    for meaning in (tenant_failure, failure_to_end):
        found = meaning(Error("UNIMPLEMENTED"), 0.05)
        assert (found.report, found.is_final) == (ANSWERED, False), "another one may know them"
        assert found.error is not None and found.error.reason is NoAnswer.NOT_CONFIGURED
    assert tenant_failure(Error("INTERNAL"), 0.05).report is FAILED


def test_the_end_of_a_session_without_the_store_says_nothing_about_the_node():
    found = failure_to_end(Error("UNAVAILABLE", "the store does not answer"), 0.05)
    assert (found.report, found.is_final) == (CANCELLED, True)
    assert failure_to_end(Error("UNAVAILABLE", REFUSED), 0.05).report is UNREACHABLE
    assert failure_to_end(Error("INTERNAL"), 0.05).report is FAILED


def test_a_call_with_little_time_says_nothing():
    assert failure(Error("DEADLINE_EXCEEDED"), 0.049).report is CANCELLED


def test_how_long_an_overloaded_node_is_left_alone():
    def pause(*metadata: Tuple[str, Any]) -> float:
        found = failure(Error("RESOURCE_EXHAUSTED", metadata=metadata), 1.0)
        assert found.error is not None and found.error.reason is NoAnswer.OVERLOADED
        assert found.report.outcome is Outcome.OVERLOADED and not found.is_final
        return found.report.pause

    key = "grpc-status-details-bin"
    info = RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000)).SerializeToString()
    other = AnyMessage(type_url="type.googleapis.com/google.rpc.Help", value=b"\xff")
    retry = AnyMessage(type_url="type.googleapis.com/google.rpc.RetryInfo", value=info)
    assert pause((key, Status(details=[other, retry]).SerializeToString())) == 1.5
    assert pause(("other", "text"), (key, Status(details=[other]).SerializeToString())) == 0.2
    assert pause((key, b"\xff")) == 0.2 and pause() == 0.2


def test_what_passes_a_check():
    assert check_problem(HealthCheckResponse(status=1)) is None
    assert check_problem(HealthCheckResponse(status=2)) == "its health is NOT_SERVING"
    for code in ("UNIMPLEMENTED", "UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED"):
        assert check_problem(Error(code)) is None
    problem = check_problem(Error("DEADLINE_EXCEEDED", "late"))
    assert problem == "DeadlineExceeded: late"
    assert Report(Outcome.FAILED) == FAILED
