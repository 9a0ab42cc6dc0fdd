"""How a hold is asked for."""

from __future__ import annotations

from typing import Protocol, Union

from .._decide.effects import Plan
from .._keep.effects import Clock
from .._proto.holds_pb2 import (
    EndSessionRequest,
    EndSessionResponse,
    KeepAliveRequest,
    KeepAliveResponse,
    ReserveRequest,
    ReserveResponse,
)
from .._proto.throttle_pb2 import ThrottleRequest, ThrottleResponse
from ..answers import DecidedBy, Refused
from ..errors import NoDecisionError, TollgateError
from . import wire
from .session import Reserved, Session


class Tenants(Protocol):
    """Who answers: nodes, or a fake. Raises ``InvalidRequestError`` or ``NoDecisionError``."""

    @property
    def remembers(self) -> bool:
        """Whether the client remembers its refusals."""

    def hits(self, message: ThrottleRequest, deadline: float) -> Plan[ThrottleResponse]:
        """Asks for hits until ``deadline``."""

    def reserve(self, message: ReserveRequest, deadline: float) -> Plan[ReserveResponse]:
        """Asks for a hold until ``deadline``."""

    def keep_alive(self, message: KeepAliveRequest, deadline: float) -> Plan[KeepAliveResponse]:
        """Renews sessions."""

    def end_session(self, message: EndSessionRequest, deadline: float) -> Plan[EndSessionResponse]:
        """Ends a session."""


def reserve(
    nodes: Tenants, session: Session, deadline: float, clock: Clock
) -> Plan[Union[Reserved, Refused]]:
    """Asks for the hold of a session once. The session knows afterwards until when a node may keep
    it."""
    message = wire.reserve(session)
    # What holds if the caller gives up.
    before, session.may_live_until = session.may_live_until, deadline + session.ttl
    sent_at = clock()
    try:
        decision = wire.reserved((yield from nodes.reserve(message, deadline)))
    except TollgateError as error:
        if not (isinstance(error, NoDecisionError) and error._may_be_decided):
            session.may_live_until = before
        raise
    if isinstance(decision, Reserved):
        session.sent_at = sent_at
    elif decision.decided_by is DecidedBy.NODE:
        # The store of a degraded node may have recorded it.
        session.may_live_until = before
    return decision
