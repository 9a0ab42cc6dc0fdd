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
from ..answers import Refused
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
    """Asks for the hold of a session once. The session knows afterwards whether it may exist."""
    message = wire.reserve(session)
    # What holds if the caller gives up.
    before, session.may_exist = session.may_exist, True
    session.is_asking = True
    session.sent_at = clock()
    try:
        answer = yield from nodes.reserve(message, deadline)
    except TollgateError as error:
        is_lost = isinstance(error, NoDecisionError) and error._may_be_decided
        session.may_exist = before or is_lost
        raise
    finally:
        session.silent_from = clock()
        session.is_asking = False
    decision = wire.reserved(answer)
    if isinstance(decision, Refused):
        session.may_exist = before
    return decision
