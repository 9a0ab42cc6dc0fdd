"""The answer of a node, as a decision."""

from __future__ import annotations

from typing import Dict

from .._proto.quotaservice_pb2 import AllowResponse
from ..answers import DecidedBy, Decision, Granted, Reason, Refused
from ..errors import InvalidRequestError, NoAnswer, NoDecisionError
from .level import level

_REASONS: Dict[int, Reason] = {
    AllowResponse.REJECTED_TIMEOUT: Reason.LIMIT,
    AllowResponse.REJECTED_NO_BUCKET: Reason.NO_BUCKET,
    AllowResponse.REJECTED_TOO_MANY_BUCKETS: Reason.TOO_MANY_BUCKETS,
    AllowResponse.REJECTED_TOO_MANY_TOKENS_REQUESTED: Reason.TOO_MANY_TOKENS,
    AllowResponse.REJECTED_SERVER_ERROR: Reason.UNAVAILABLE,
}

_OK = int(AllowResponse.OK)
_INVALID = int(AllowResponse.REJECTED_INVALID_REQUEST)


def decision(response: AllowResponse) -> Decision:
    """Raises ``InvalidRequestError``, or ``NoDecisionError`` if the status is unknown."""
    decided_by = DecidedBy.DEGRADED_NODE if response.degraded else DecidedBy.NODE
    status = int(response.status)
    stands = None
    # Of a share, or of a limit that does not count, nothing is known.
    if not (response.degraded or response.shadow or response.banned):
        stands = level(response.tokens_available, response.fill_rate, response.size)
    if status == _OK:
        return Granted(
            response.tokens_granted,
            response.wait_millis / 1000,
            response.soft_limited,
            response.shadow,
            decided_by,
            stands,
        )
    if status == _INVALID:
        raise InvalidRequestError(
            "invalid request: a name is malformed, or the number of tokens or the wait is out of"
            " range"
        )
    reason = Reason.BANNED if response.banned else _REASONS.get(status)
    if reason is None:
        text = f"the status {status} is unknown to this version"
        raise NoDecisionError(NoAnswer.FAILED, text)
    retry_after = response.retry_after_millis
    return Refused(
        reason,
        retry_after / 1000 if retry_after > 0 else None,
        decided_by,
        0.0 if stands is None else stands.debt,
        stands,
    )
