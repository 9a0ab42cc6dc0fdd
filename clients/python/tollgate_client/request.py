"""What is asked for."""

from __future__ import annotations

from typing import NamedTuple, Optional

from ._proto.quotaservice_pb2 import AllowRequest
from .errors import InvalidRequestError

_MOST = 2**63 - 1


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
