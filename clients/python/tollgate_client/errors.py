"""What is raised."""

from __future__ import annotations

import enum
from typing import Optional

from .answers import Reason, Refused


class TollgateError(Exception):
    """Base of all errors of this library."""


class SettingsError(TollgateError, ValueError):
    """A client can't be made of these settings: an address is malformed, or a file can't be
    used."""


class ClosedError(TollgateError):
    """The client is closed, or the lease was given back."""


class AlreadyLeasedError(TollgateError):
    """The client has a lease on the resource already: share its handle."""

    resource: str
    """The name of the resource."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        super().__init__(resource)

    def __str__(self) -> str:
        return f"the client has a lease on {self.resource} already"


class LeaseTimeoutError(TollgateError, TimeoutError):
    """The caller would have to wait longer for a leased resource than it wants to. Nothing was
    used."""

    resource: str
    """The name of the resource."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        super().__init__(resource)

    def __str__(self) -> str:
        return f"{self.resource} is not available within the timeout"


class InvalidRequestError(TollgateError):
    """A mistake of the caller. No fallback is used."""


class NoAnswer(enum.Enum):
    """Why no node has decided. The values are those of the metrics' label ``reason``."""

    TIMEOUT = "timeout"
    """The deadline has passed."""
    UNREACHABLE = "unreachable"
    """No node can be reached: they failed a moment ago, and are not called until they are found
    well."""
    OVERLOADED = "overloaded"
    """The nodes are overloaded."""
    NOT_CONFIGURED = "not_configured"
    """The limits do not have the resource."""
    FORBIDDEN = "forbidden"
    """The nodes do not allow this client to ask, by their access file."""
    FAILED = "error"
    """The node has answered with an error."""


_TEXTS = {
    NoAnswer.TIMEOUT: "no answer within the deadline",
    NoAnswer.UNREACHABLE: "no node can be reached",
    NoAnswer.OVERLOADED: "the nodes are overloaded",
    NoAnswer.NOT_CONFIGURED: "the limits do not have the resource",
}


class NoDecisionError(TollgateError):
    """No node has decided, and no fallback is set for the bucket or the resource."""

    reason: NoAnswer
    """Why."""
    detail: str
    """The same in words. For ``NoAnswer.FAILED``, the gRPC status code and message; for
    ``NoAnswer.FORBIDDEN``, the message."""

    def __init__(self, reason: NoAnswer, detail: Optional[str] = None) -> None:
        self.reason = reason
        self.detail = _TEXTS.get(reason, reason.value) if detail is None else detail
        # Whether a node may have got the request, and decided it.
        self._may_be_decided = False
        super().__init__(reason, detail)

    def __str__(self) -> str:
        return f"no decision: {self.detail}"


class RefusedError(TollgateError):
    """``acquire``, ``hits`` or ``hold`` was refused, or what was asked for would come later than the
    caller wants to wait."""

    refused: Refused
    """The refusal."""

    def __init__(self, refused: Refused) -> None:
        self.refused = refused
        super().__init__(refused)

    def __str__(self) -> str:
        return f"refused: {self.refused.reason.value}"

    @property
    def reason(self) -> Reason:
        """Why."""
        return self.refused.reason

    @property
    def retry_after(self) -> Optional[float]:
        """Seconds after which the same request could be granted; see ``Refused.retry_after``."""
        return self.refused.retry_after
