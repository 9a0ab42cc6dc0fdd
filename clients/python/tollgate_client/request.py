"""What is asked for."""

from __future__ import annotations

from typing import NamedTuple, Optional

from ._proto.quotaservice_pb2 import AllowRequest
from .errors import InvalidRequestError

_MOST = 2**63 - 1
_LONGEST_TTL = 24 * 60 * 60.0


class Request(NamedTuple):
    """A request for tokens of a bucket, as the callbacks ``on_refused`` and ``on_soft_limited``
    get it."""

    namespace: str
    """The owner of the bucket."""
    bucket: str
    """The bucket."""
    tokens: int = 1
    """The number of tokens."""
    max_wait: Optional[float] = None
    """The longest wait for the tokens in seconds; ``None`` for the bucket's own limit."""
    deadline: Optional[float] = None
    """The longest wait for an answer in seconds; ``None`` for the client's."""
    critical: bool = True
    """Whether it may take what the bucket keeps in reserve."""


class TenantRequest(NamedTuple):
    """A request for hits or a hold, as the callback ``on_tenant_refused`` gets it."""

    resource: str
    """What is used."""
    domain: str
    """Whom it is used for: a user, a tenant."""
    copies: int = 1
    """The most copies to grant."""
    min_copies: int = 1
    """The least copies to grant; fewer are not granted at all."""
    max_wait: float = 0.0
    """The longest wait for the copies in seconds."""
    deadline: Optional[float] = None
    """The longest wait for an answer in seconds; ``None`` for the client's."""
    ttl: float = 10.0
    """Seconds that a hold lasts if nobody renews it."""


def tenant_request(
    resource: str,
    domain: str,
    copies: int,
    min_copies: Optional[int],
    max_wait: float,
    deadline: Optional[float],
    ttl: float = 10.0,
) -> TenantRequest:
    """A request with numbers that make sense; 0 copies mean 1, and without ``min_copies``, it is all
    or nothing."""
    copies = copies or 1
    least = copies if min_copies is None else min_copies or 1
    # What is not at least 0 may also be no number.
    if not 1 <= least <= copies:
        raise InvalidRequestError(f"invalid request: {copies} copies, at least {least}")
    if not max_wait >= 0:
        raise InvalidRequestError(f"invalid request: a max_wait of {max_wait} seconds")
    if deadline is not None and not deadline >= 0:
        raise InvalidRequestError(f"invalid request: a deadline of {deadline} seconds")
    if not 1 <= ttl <= _LONGEST_TTL:
        raise InvalidRequestError(f"invalid request: a ttl of {ttl} seconds")
    return TenantRequest(resource, domain, copies, least, max_wait, deadline, ttl)


def request(
    namespace: str,
    bucket: str,
    tokens: int,
    max_wait: Optional[float],
    deadline: Optional[float],
    critical: bool,
) -> Request:
    """A request with numbers that make sense; 0 tokens mean 1."""
    # What is not at least 0 may also be no number.
    if tokens < 0:
        raise InvalidRequestError(f"invalid request: {tokens} tokens")
    if max_wait is not None and not max_wait >= 0:
        raise InvalidRequestError(f"invalid request: a max_wait of {max_wait} seconds")
    if deadline is not None and not deadline >= 0:
        raise InvalidRequestError(f"invalid request: a deadline of {deadline} seconds")
    return Request(namespace, bucket, tokens or 1, max_wait, deadline, critical)


def message(request: Request) -> AllowRequest:
    """The request on the wire. The wait is rounded down to whole milliseconds: it is never longer
    than the caller said."""
    namespace, bucket, tokens, max_wait, _, critical = request
    try:
        message = AllowRequest(
            namespace=namespace, bucket_name=bucket, tokens_requested=min(tokens, _MOST)
        )
    except ValueError as error:
        raise InvalidRequestError(f"invalid request: {error}") from error
    if max_wait is not None:
        message.max_wait_millis_override = int(min(max_wait * 1000, 1e15))
        message.max_wait_time_override = True
    if not critical:
        message.criticality = AllowRequest.NOT_CRITICAL
    return message
