"""What a fake answers about hits and holds."""

from __future__ import annotations

import threading
from typing import Callable, Dict, NamedTuple, Optional, Tuple, Union

from .._decide.effects import Plan
from .._proto.holds_pb2 import (
    EndSessionRequest,
    EndSessionResponse,
    KeepAliveRequest,
    KeepAliveResponse,
    ReserveRequest,
    ReserveResponse,
)
from .._proto.quotaservice_pb2 import AllowRequest, AllowResponse
from .._proto.throttle_pb2 import ThrottleRequest, ThrottleResponse
from ..errors import InvalidRequestError, NoAnswer, NoDecisionError

_RETRY_MILLIS = 100
"""When it may be worth asking again for copies that are not free."""


Answer = Callable[[AllowRequest, float], AllowResponse]
"""An answer to a request for tokens."""


class _Held(NamedTuple):
    hold: str
    domain: str
    copies: int


class FakeTenants:
    """Answers in place of nodes. Threads may share it."""

    remembers = False

    def __init__(
        self, answer_of: Callable[[str, str], Answer], no_node: Answer, clock: Callable[[], float]
    ) -> None:
        """``answer_of`` tells how a domain is answered about a resource, and ``no_node`` is the
        answer that there is none."""
        self._answer_of = answer_of
        self._no_node = no_node
        self._clock = clock
        self._limits: Dict[str, int] = {}
        self._sessions: Dict[Tuple[str, str], _Held] = {}
        self._lock = threading.Lock()

    def limit(self, resource: str, copies: int) -> None:
        """No more than so many copies are held at once."""
        with self._lock:
            self._limits[resource] = copies

    def held(self, resource: str) -> int:
        """The copies that are held."""
        with self._lock:
            return self._held(resource)

    def lose(self, resource: str) -> None:
        """Ends all sessions of a resource."""
        with self._lock:
            names = [name for name in self._sessions if name[0] == resource]
            for name in names:
                del self._sessions[name]

    def hits(self, message: ThrottleRequest, deadline: float) -> Plan[ThrottleResponse]:
        """Asks for hits."""
        granted, retry = self._granted(message)
        status = ThrottleResponse.OK if granted else ThrottleResponse.REJECTED
        return ThrottleResponse(status=status, granted=granted, retry_after_millis=retry)
        yield  # A plan without effects.

    def reserve(self, message: ReserveRequest, deadline: float) -> Plan[ReserveResponse]:
        """Asks for a hold."""
        granted, retry = self._granted(message)
        resource, name = message.resource, (message.resource, message.session)
        with self._lock:
            if name in self._sessions:
                granted, retry = self._sessions[name].copies, 0
            elif granted and resource in self._limits:
                limit = self._limits[resource]
                granted = min(granted, limit - self._held(resource))
                if granted < message.min_copies:
                    granted, retry = 0, _RETRY_MILLIS if message.min_copies <= limit else 0
            if granted:
                self._sessions[name] = _Held(message.hold, message.domain, granted)
        status = ReserveResponse.OK if granted else ReserveResponse.REJECTED
        return ReserveResponse(status=status, granted=granted, retry_after_millis=retry)
        yield  # A plan without effects.

    def keep_alive(self, message: KeepAliveRequest, deadline: float) -> Plan[KeepAliveResponse]:
        """Renews sessions."""
        answer = KeepAliveResponse()
        for one in message.sessions:
            try:
                found = self._find(one.resource, one.session)
            except NoDecisionError:
                continue  # No answer about this one.
            renewed = answer.sessions.add(resource=one.resource, session=one.session)
            if found is not None:
                hold, domain, copies = found
                renewed.alive = True
                renewed.holds.add(hold=hold, domain=domain, copies=copies)
        return answer
        yield  # A plan without effects.

    def end_session(self, message: EndSessionRequest, deadline: float) -> Plan[EndSessionResponse]:
        """Ends a session."""
        found = self._find(message.resource, message.session)
        with self._lock:
            self._sessions.pop((message.resource, message.session), None)
        return EndSessionResponse(released=found.copies if found is not None else 0)
        yield  # A plan without effects.

    def _find(self, resource: str, session: str) -> Optional[_Held]:
        """The hold of a session, if there is one, and a node for its domain."""
        with self._lock:
            found = self._sessions.get((resource, session))
        if found is not None and self._answer_of(resource, found.domain) is self._no_node:
            raise NoDecisionError(NoAnswer.UNREACHABLE)
        return found

    def _held(self, resource: str) -> int:
        return sum(held.copies for (name, _), held in self._sessions.items() if name == resource)

    def _granted(self, message: Union[ThrottleRequest, ReserveRequest]) -> Tuple[int, int]:
        """The copies that are granted, and the milliseconds after which to ask again."""
        answer, retry = self._answer_of(message.resource, message.domain), 0
        for copies in (message.copies, message.min_copies):
            asked = AllowRequest(tokens_requested=copies, max_wait_time_override=True)
            response = answer(asked, self._clock())
            if response.status == AllowResponse.OK:
                return copies, 0
            if response.status == AllowResponse.REJECTED_NO_BUCKET:
                raise NoDecisionError(NoAnswer.NOT_CONFIGURED)
            if response.status == AllowResponse.REJECTED_INVALID_REQUEST:
                raise InvalidRequestError("invalid request: the fake says so")
            retry = response.retry_after_millis
        return 0, retry
