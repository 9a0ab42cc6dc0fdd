"""What keeps the holds of a client: renews them in few calls, asks again for what the shared state has
not, and ends sessions that are not wanted any more. A plan without input and output: a thread, a task
or a fake performs it."""

from __future__ import annotations

import math
from typing import Iterator, List, Optional

from .._decide.effects import Plan
from .._decide.log import LOG, Throttle
from .._keep.desk import Desk
from .._keep.effects import FOREVER, Clock, Rest
from .._keep.keeping import LONGEST_CLOSE
from .._proto.holds_pb2 import (
    EndSessionRequest,
    KeepAliveRequest,
    KeepAliveResponse,
    RenewedSession,
    SessionToRenew,
)
from ..answers import DecidedBy, Refused
from ..errors import ClosedError, InvalidRequestError, NoAnswer, NoDecisionError, TollgateError
from .decider import TenantDecider
from .reserving import reserve
from .session import Reserved, Session

_MOST_SESSIONS = 100
"""The most sessions that are renewed in one call."""

_TOGETHER = 0.5
"""Sessions that are due within so many seconds are renewed together."""

_RETRIES = 24
"""Without an answer, a session is renewed again after this part of its ttl."""

_LONGEST_CALL = 2.0
"""Seconds that an answer may take; less where a ttl is so short that others would wait too long."""

_CALLS = 8
"""A call may take this part of the shortest ttl."""

_END_AGAIN = 1.0
"""Seconds after which a session is ended again, if that was not answered."""


class Keeper:
    """Keeps the holds of one client."""

    def __init__(self, desk: Desk[Session], decider: TenantDecider, clock: Clock) -> None:
        self._desk = desk
        self._decider = decider
        self._clock = clock
        self._live: List[Session] = []
        self._log = Throttle()

    def run(self) -> Plan[None]:
        """Runs until no session is left, or all are ended after the client was closed."""
        end = math.inf
        while True:
            live = self._desk.live(False)
            if live is None:
                return
            self._live = live
            if self._desk.is_closed:
                end = min(end, self._clock() + LONGEST_CLOSE)
                if not live or self._clock() >= end:
                    return
            if self._look():
                continue
            plan = self._most_urgent()
            if plan is not None:
                yield from plan
            else:
                wake = min([end, *(session.due_at for session in live)])
                yield Rest(min(max(wake - self._clock(), 0.0), FOREVER))

    def _look(self) -> bool:
        """Ends what nobody wants, and asks the fallback about what nobody has renewed in time.
        Returns whether anything was lost."""
        now, is_any_lost = self._clock(), False
        for session in self._live:
            if session.is_held and session.is_released:
                # Its handle was collected.
                session.release()
            elif session.is_recorded and session.lost_at <= now:
                if self._decider.fallback_grants(session, now):
                    session.renew(Reserved(session.copies, DecidedBy.FALLBACK), now)
                else:
                    self._lose(session, "no node has renewed them in time")
                    is_any_lost = True
        return is_any_lost

    def _lose(self, session: Session, why: str) -> None:
        session.lose(why)
        self._desk.remove(session)

    def _most_urgent(self) -> Optional[Plan[None]]:
        """What is due: what might be lost comes first."""
        now = self._clock()
        due = [session for session in self._live if session.due_at <= now]
        if any(session.is_recorded for session in due):
            together = [
                session
                for session in self._live
                if session.is_recorded and session.due_at <= now + _TOGETHER
            ]
            together.sort(key=_due_at)
            return self._renew(together[:_MOST_SESSIONS])
        if not due:
            return None
        session = min(due, key=_due_at)
        return self._reserve(session) if session.is_held else self._end(session)

    @property
    def _deadline(self) -> float:
        """Until when an answer has to come, so that it does not hold up the others, and what is lost
        is found in time."""
        ttls = (session.ttl for session in self._live if session.is_held)
        latest = self._clock() + min(_LONGEST_CALL, min(ttls, default=math.inf) / _CALLS)
        return min([latest, *(one.lost_at for one in self._live if one.is_recorded)])

    def _renew(self, group: List[Session]) -> Plan[None]:
        """Renews recorded holds. If the nodes refuse the call because of one of them, renews each
        half, so that the others are renewed."""
        groups = [group]
        while groups:
            group = [session for session in groups.pop() if session.is_held]
            # The time that the calls take counts, too.
            sent_at = self._clock()
            if not group or any(session.lost_at <= sent_at for session in group):
                return
            try:
                answer = yield from self._decider.nodes.keep_alive(_message(group), self._deadline)
            except TollgateError as error:
                self._log_failure(error)
                if _is_refusal(error) and len(group) > 1:
                    half = len(group) // 2
                    groups += [group[half:], group[:half]]
                    continue
                for session in group:
                    self._not_renewed(session)
            else:
                for session, renewed in zip(group, _in_order(group, answer)):
                    self._renewed(session, renewed, answer.degraded, sent_at)

    def _renewed(
        self, session: Session, answer: Optional[RenewedSession], degraded: bool, sent_at: float
    ) -> None:
        """Takes the answer about one session."""
        session.silent_from = self._clock()
        if answer is None:
            self._not_renewed(session)
        elif answer.alive and (degraded or any(one.hold == session.hold for one in answer.holds)):
            session.renew(Reserved(session.copies, DecidedBy.NODE), sent_at)
        elif session.is_held:
            session.may_exist = False
            self._lose(session, "the session is over")

    def _not_renewed(self, session: Session) -> None:
        session.silent_from = self._clock()
        session.due = session.silent_from + session.ttl / _RETRIES

    def _reserve(self, session: Session) -> Plan[None]:
        """Asks for a hold that the shared state has not, so that it is recorded."""
        sent_at = self._clock()
        session.due = sent_at + session.interval
        nodes = self._decider.nodes
        try:
            decision = yield from reserve(nodes, session, self._deadline, self._clock)
        except TollgateError as error:
            self._log_failure(error)
            return
        if isinstance(decision, Refused):
            if decision.decided_by is DecidedBy.NODE and session.is_held:
                self._lose(session, "they are not free")
        elif decision.is_recorded:
            session.renew(decision, sent_at)

    def _end(self, session: Session) -> Plan[None]:
        """Ends a session that is not wanted any more."""
        if session.may_exist and self._clock() < session.silent_from + session.ttl:
            message = EndSessionRequest(resource=session.resource, session=session.name)
            try:
                yield from self._decider.nodes.end_session(message, self._deadline)
            except ClosedError:
                pass  # There are no connections any more.
            except TollgateError as error:
                LOG.debug("a session is not ended, tried again every second: %s", error)
                session.end_due = self._clock() + _END_AGAIN
                return
        self._desk.remove(session)

    def _log_failure(self, error: TollgateError) -> None:
        held_back = self._log.passes(self._clock())
        if held_back is not None:
            LOG.warning("holds are not renewed: %s (%d such messages held back)", error, held_back)


def _due_at(session: Session) -> float:
    return session.due_at


def _message(group: List[Session]) -> KeepAliveRequest:
    return KeepAliveRequest(
        sessions=[
            SessionToRenew(
                resource=session.resource, session=session.name, ttl_millis=session.ttl_millis
            )
            for session in group
        ]
    )


def _in_order(
    group: List[Session], answer: KeepAliveResponse
) -> Iterator[Optional[RenewedSession]]:
    """The answer about each session; ``None`` if there is none."""
    by_name = {one.session: one for one in answer.sessions}
    return (by_name.get(session.name) for session in group)


def _is_refusal(error: TollgateError) -> bool:
    """Whether the request is wrong, or not allowed, perhaps because of one session."""
    if isinstance(error, NoDecisionError):
        return error.reason is NoAnswer.FORBIDDEN
    return isinstance(error, InvalidRequestError)
