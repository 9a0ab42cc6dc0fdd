"""What keeps the holds of a client: renews their sessions, and ends them. A plan without input and
output: a thread, a task or a fake performs it.

All holds are renewed, many in one call. One of which no node knows is lost, if a node had recorded
it; else, if a degraded node or the fallback has granted it, it is asked for again."""

from __future__ import annotations

import enum
import math
import random
from collections import deque
from functools import partial
from typing import Deque, Iterable, Iterator, List, Optional, Tuple, Union

from .._decide.effects import Plan
from .._decide.log import LOG, Throttle
from .._keep.desk import Desk
from .._keep.effects import FOREVER, Begin, Clock, Rest
from .._proto.holds_pb2 import (
    EndSessionRequest,
    EndSessionResponse,
    KeepAliveRequest,
    KeepAliveResponse,
    RenewedSession,
    SessionToRenew,
)
from ..answers import DecidedBy, Refused
from ..errors import ClosedError, InvalidRequestError, NoAnswer, NoDecisionError, TollgateError
from . import wire
from .decider import TenantDecider
from .session import Reserved, Session

_MOST_SESSIONS = 100
"""The most sessions that are renewed in one call."""

_TOGETHER = 0.5
"""Sessions that are due within so many seconds are renewed together."""

_LONGEST_END_PAUSE = 30.0
"""The most seconds after which a session that was not ended is ended again."""

_LONGEST_END = 60.0
"""Seconds for which sessions are ended once the client is closed."""


class _Kind(enum.Enum):
    RENEW_MANY = enum.auto()
    RENEW = enum.auto()
    RESERVE = enum.auto()
    END = enum.auto()


_Answer = Union[KeepAliveResponse, Reserved, Refused, EndSessionResponse, TollgateError]


class _Call:
    """A call that is under way, or waits for others."""

    def __init__(self, kind: _Kind, sessions: List[Session]) -> None:
        self.kind = kind
        self.sessions = sessions
        self.sent_at = 0.0
        # What counts if it is given up.
        self.answer: _Answer = NoDecisionError(NoAnswer.FAILED, "the call was given up")


class Keeper:
    """Keeps the holds of one client."""

    def __init__(
        self, desk: Desk[Session], decider: TenantDecider, clock: Clock, most_calls: int
    ) -> None:
        """``most_calls`` for many sessions are made at a time, and as many for single ones."""
        self._desk = desk
        self._decider = decider
        self._clock = clock
        # The calls that wait: for many sessions, for single ones that are held, and for the others.
        self._for_many: Deque[_Call] = deque()
        self._for_held: Deque[_Call] = deque()
        self._for_ended: Deque[_Call] = deque()
        # How many more of each may be under way.
        self._many_left = self._single_left = most_calls
        # Those that have ended. Other threads add to them.
        self._answered: Deque[_Call] = deque()
        self._failures, self._losses, self._fallbacks = Throttle(), Throttle(), Throttle()

    def run(self) -> Plan[None]:
        """Runs until no session is left."""
        while True:
            while self._answered:
                self._take(self._answered.popleft())
            live = self._desk.live(False)
            if live is None:
                return
            if self._desk.is_closed:
                if not live:
                    return
                self._close(live)
            self._look(live)
            for call, plan in self._next_calls():
                yield Begin(plan, partial(self._call_has_ended, call))
            if self._answered:
                continue
            wake = min((session.due_at for session in live), default=math.inf)
            yield Rest(min(max(wake - self._clock(), 0.0), FOREVER))

    def _call_has_ended(self, call: _Call) -> None:
        """Perhaps in another thread."""
        self._answered.append(call)
        self._desk.wake()

    def _close(self, live: Iterable[Session]) -> None:
        """The client is closed: its holds are, and are ended for some time only."""
        latest = self._clock() + _LONGEST_END
        for session in live:
            if not session.is_released:
                session.close()
            if not session.is_asking and not session.is_bounded:
                session.is_bounded = True
                session.may_live_until = min(session.may_live_until, latest)

    def _look(self, live: List[Session]) -> None:
        """Has calls wait for what is due."""
        now = self._clock()
        renewed: List[Session] = []
        for session in live:
            if session.is_held and session.is_released:
                # Its handle was collected.
                session.release()
            if session.due_at > now:
                continue
            if not session.is_held:
                self._end(session, now)
            elif session.lost_at <= now:
                self._time_is_over(session, now)
            elif session.is_alone:
                self._wait(_Kind.RENEW, session)
            else:
                renewed.append(session)
        if renewed:
            soon = (
                session
                for session in live
                if now < session.due_at <= now + min(_TOGETHER, session.pause)
            )
            renewed += [one for one in soon if one.is_held and not (one.is_called or one.is_alone)]
            renewed.sort(key=_due_at)
        for at in range(0, len(renewed), _MOST_SESSIONS):
            group = renewed[at : at + _MOST_SESSIONS]
            for session in group:
                session.is_called = True
            self._for_many.append(_Call(_Kind.RENEW_MANY, group))

    def _wait(self, kind: _Kind, session: Session) -> None:
        """Has a call for a single session wait for the others."""
        session.is_called = True
        waiting = self._for_ended if kind is _Kind.END else self._for_held
        waiting.append(_Call(kind, [session]))

    def _end(self, session: Session, now: float) -> None:
        if session.due_at > now:
            return  # It was released a moment ago.
        if session.may_live_until <= now:
            self._desk.remove(session)
        else:
            self._wait(_Kind.END, session)

    def _time_is_over(self, session: Session, now: float) -> None:
        """No node has answered in time: the fallback decides."""
        if not self._decider.fallback_grants(session, now):
            self._lose(session, "no node has renewed them in time")
            return
        self._log(
            self._fallbacks,
            f"the fallback lets a hold on {session.resource} for {session.domain} go on",
        )
        session.renew(Reserved(session.copies, DecidedBy.FALLBACK), now)
        session.due = now + session.pause

    def _lose(self, session: Session, why: str) -> None:
        """It stays known until the application has let go, and is ended then."""
        if session.lose():
            text = f"the copies of {session.resource} for {session.domain} are lost: {why}"
            self._log(self._losses, text)

    def _next_calls(self) -> Iterator[Tuple[_Call, Plan[None]]]:
        """The calls that begin now, not too many at a time."""
        while self._many_left and self._for_many:
            call = self._for_many.popleft()
            # The application has let go of the others meanwhile.
            gone = [session for session in call.sessions if not session.is_held]
            call.sessions = [session for session in call.sessions if session.is_held]
            for session in gone:
                self._not_answered(session)
            if call.sessions:
                self._many_left -= 1
                yield call, self._renew(call)
        while self._single_left and (self._for_held or self._for_ended):
            call = (self._for_held or self._for_ended).popleft()
            session = call.sessions[0]
            if call.kind is not _Kind.END and not session.is_held:
                # The application has let go meanwhile.
                self._not_answered(session)
                continue
            self._single_left -= 1
            if call.kind is _Kind.RENEW:
                yield call, self._renew(call)
            elif call.kind is _Kind.RESERVE:
                yield call, self._reserve(call)
            else:
                yield call, self._end_session(call)

    def _send(self, call: _Call) -> float:
        """Returns until when a call that is sent now has to be answered."""
        call.sent_at = self._clock()
        return call.sent_at + min(session.patience for session in call.sessions)

    def _renew(self, call: _Call) -> Plan[None]:
        deadline = self._send(call)
        for session in call.sessions:
            session.may_live(deadline)
        message = KeepAliveRequest(
            sessions=[
                SessionToRenew(
                    resource=one.resource, session=one.secret, ttl_millis=one.ttl_millis
                )
                for one in call.sessions
            ]
        )
        return _answer(call, self._decider.nodes.keep_alive(message, deadline))

    def _reserve(self, call: _Call) -> Plan[None]:
        deadline, (session,) = self._send(call), call.sessions
        session.may_live(deadline)
        reserve = self._decider.nodes.reserve(wire.reserve(session), deadline)

        def reserved() -> Plan[Union[Reserved, Refused]]:
            return wire.reserved((yield from reserve))

        return _answer(call, reserved())

    def _end_session(self, call: _Call) -> Plan[None]:
        deadline, (session,) = self._send(call), call.sessions
        message = EndSessionRequest(resource=session.resource, session=session.secret)
        return _answer(call, self._decider.nodes.end_session(message, deadline))

    def _take(self, call: _Call) -> None:
        """Takes the answer to a call."""
        if call.kind is _Kind.RENEW_MANY:
            self._many_left += 1
        else:
            self._single_left += 1
        if call.kind is _Kind.END:
            self._ended(call.sessions[0], call.answer)
        elif call.kind is _Kind.RESERVE:
            self._reserved(call.sessions[0], call.answer, call.sent_at)
        else:
            self._renewals(call)

    def _renewals(self, call: _Call) -> None:
        answer = call.answer
        if isinstance(answer, KeepAliveResponse):
            by_secret = {one.session: one for one in answer.sessions}
            for session in call.sessions:
                renewed = by_secret.get(session.secret)
                self._renewed(session, renewed, answer.degraded, call.sent_at)
            return
        self._log_failure(answer)
        is_refused = _is_refusal(answer)
        for session in call.sessions:
            if is_refused and len(call.sessions) > 1:
                # One of them may be the reason.
                session.is_alone = True
                self._wait(_Kind.RENEW, session)
            else:
                self._not_answered(session)

    def _renewed(
        self, session: Session, answer: Optional[RenewedSession], degraded: bool, sent_at: float
    ) -> None:
        """Takes the answer about one session."""
        if answer is None:
            self._not_answered(session)
            return
        session.is_alone = False
        has_hold = answer.alive and any(one.hold == session.hold for one in answer.holds)
        if not session.is_held:
            self._not_answered(session)
        elif has_hold:
            self._goes_on(session, Reserved(session.copies, DecidedBy.NODE), sent_at)
        elif degraded and answer.alive:
            # Its store is away, and no hold ends for that.
            if session.until < math.inf:
                reserved = Reserved(session.copies, DecidedBy.DEGRADED_NODE)
                self._goes_on(session, reserved, sent_at)
            else:
                self._stays(session)
        elif session.is_recorded:
            self._lose(session, "the session was ended, or the store has lost it")
            session.is_called = False
        else:
            self._wait(_Kind.RESERVE, session)

    def _reserved(self, session: Session, answer: _Answer, sent_at: float) -> None:
        """Takes the answer about a hold that was asked for again."""
        if isinstance(answer, Reserved) and session.is_held:
            self._goes_on(session, answer._replace(copies=session.copies), sent_at)
            return
        if isinstance(answer, Refused) and session.is_held:
            if answer.decided_by is DecidedBy.NODE:
                self._lose(session, "they are not free")
        self._log_failure(answer)
        if isinstance(answer, (Reserved, Refused)) or _is_refusal(answer):
            self._stays(session)
        else:
            self._not_answered(session)

    def _ended(self, session: Session, answer: _Answer) -> None:
        session.is_called = False
        # What is refused will be so the next time, and a client that is gone has no connections.
        if not isinstance(answer, TollgateError) or _is_refusal(answer):
            self._desk.remove(session)
            return
        if isinstance(answer, ClosedError):
            self._desk.remove(session)
            return
        LOG.debug("a session is not ended: %s", answer)
        session.end_due = self._clock() + session.end_pause * (0.75 + random.random() / 2)
        session.end_pause = min(session.end_pause * 2, _LONGEST_END_PAUSE)

    def _goes_on(self, session: Session, reserved: Reserved, sent_at: float) -> None:
        session.renew(reserved, sent_at)
        session.is_called = False

    def _stays(self, session: Session) -> None:
        """A node has answered, and nothing changes."""
        session.due = self._clock() + session.interval
        session.is_called = False

    def _not_answered(self, session: Session) -> None:
        """Nothing is known of it that was not known before."""
        session.due = self._clock() + session.pause
        session.is_called = False

    def _log_failure(self, answer: _Answer) -> None:
        if isinstance(answer, TollgateError):
            self._log(self._failures, f"holds are not renewed: {answer}")

    def _log(self, throttle: Throttle, text: str) -> None:
        held_back = throttle.passes(self._clock())
        if held_back is not None:
            LOG.warning("%s (%d such messages held back)", text, held_back)


def _answer(call: _Call, plan: Plan[_Answer]) -> Plan[None]:
    """Performs a call."""
    try:
        call.answer = yield from plan
    except TollgateError as error:
        call.answer = error
    except Exception:  # The other holds have to be kept.
        LOG.exception("a call about holds has failed")


def _due_at(session: Session) -> float:
    return session.due_at


def _is_refusal(error: object) -> bool:
    """Whether the request is wrong, or not allowed; it will be the next time."""
    if isinstance(error, NoDecisionError):
        return error.reason in (NoAnswer.FORBIDDEN, NoAnswer.NOT_CONFIGURED)
    return isinstance(error, InvalidRequestError)
