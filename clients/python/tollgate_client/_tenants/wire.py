"""Requests for hits and holds on the wire, and what the answers mean."""

from __future__ import annotations

from typing import Union

from .._proto.holds_pb2 import ReserveRequest, ReserveResponse
from .._proto.throttle_pb2 import ThrottleRequest, ThrottleResponse
from ..answers import DecidedBy, Hits, Reason, Refused
from ..errors import InvalidRequestError, NoAnswer, NoDecisionError
from ..request import TenantRequest
from .session import Reserved, Session

_OK, _REJECTED = 0, 1

_MOST = 2**63 - 1


def throttle(request: TenantRequest) -> ThrottleRequest:
    """A request for hits."""
    try:
        return ThrottleRequest(
            resource=request.resource,
            domain=request.domain,
            copies=min(request.copies, _MOST),
            min_copies=min(request.min_copies, _MOST),
        )
    except ValueError as error:
        raise InvalidRequestError(f"invalid request: {error}") from error


def reserve(session: Session) -> ReserveRequest:
    """A request for the hold of a session."""
    try:
        return ReserveRequest(
            resource=session.resource,
            session=session.secret,
            session_ttl_millis=session.ttl_millis,
            hold=session.hold,
            domain=session.domain,
            copies=min(session.copies, _MOST),
            min_copies=min(session.min_copies, _MOST),
        )
    except ValueError as error:
        raise InvalidRequestError(f"invalid request: {error}") from error


def hits(response: ThrottleResponse) -> Union[Hits, Refused]:
    """Raises ``NoDecisionError`` if the answer makes no sense."""
    if _is_granted(response):
        return Hits(
            _granted(response),
            response.tier_index,
            response.burst,
            response.shadow,
            _decided_by(response),
        )
    # A degraded node with limits of its own knows when to ask again; another one refuses by policy.
    return _refused(response, response.degraded and response.retry_after_millis <= 0)


def reserved(response: ReserveResponse) -> Union[Reserved, Refused]:
    """Raises ``NoDecisionError`` if the answer makes no sense."""
    if _is_granted(response):
        return Reserved(_granted(response), _decided_by(response), response.shadow)
    return _refused(response, response.degraded)


def hits_of_fallback(copies: int) -> Hits:
    """What a fallback grants."""
    return Hits(copies, 0, False, False, DecidedBy.FALLBACK)


def reserved_by_fallback(copies: int) -> Reserved:
    """What a fallback grants."""
    return Reserved(copies, DecidedBy.FALLBACK)


_Response = Union[ThrottleResponse, ReserveResponse]


def _is_granted(response: _Response) -> bool:
    status = int(response.status)
    if status not in (_OK, _REJECTED):
        raise _failed(f"the status {status} is unknown to this version")
    return status == _OK


def _granted(response: _Response) -> int:
    granted = int(response.granted)
    if granted < 1:
        raise _failed(f"granted {granted}")
    return granted


def _failed(text: str) -> NoDecisionError:
    error = NoDecisionError(NoAnswer.FAILED, text)
    error._may_be_decided = True
    return error


def _refused(response: _Response, is_unavailable: bool) -> Refused:
    reason = Reason.UNAVAILABLE if is_unavailable else Reason.LIMIT
    retry_after = response.retry_after_millis
    return Refused(reason, retry_after / 1000 if retry_after > 0 else None, _decided_by(response))


def _decided_by(response: _Response) -> DecidedBy:
    return DecidedBy.DEGRADED_NODE if response.degraded else DecidedBy.NODE
