"""How a request is decided: by a remembered refusal, the nodes, or a fallback."""

from __future__ import annotations

import random
from typing import Callable, NamedTuple, Optional, Protocol

from .._proto.quotaservice_pb2 import AllowRequest, AllowResponse
from ..answers import Decision, Granted, Reason, Refused
from ..errors import InvalidRequestError, NoDecisionError, RefusedError, TollgateError
from ..fallback import Fallbacks
from ..request import Request, TenantRequest, message
from . import response
from .effects import Plan, Sleep, T
from .log import LOG, Throttle
from .metrics import METRICS
from .refusals import Refusals

LEAST_PAUSE = 0.02
"""The least seconds before a refused request is made again."""

_LONGEST_DEADLINE = 24 * 60 * 60.0
"""A longer deadline means this one."""

OnRefused = Callable[[Request, Refused], object]
OnTenantRefused = Callable[[TenantRequest, Refused], object]
OnSoftLimited = Callable[[Request, Granted], object]


class Backend(Protocol):
    """Who answers: nodes, or a fake."""

    @property
    def remembers(self) -> bool:
        """Whether the client remembers its refusals."""

    def ask(self, message: AllowRequest, deadline: float) -> Plan[AllowResponse]:
        """Asks until ``deadline``. Raises ``InvalidRequestError`` or ``NoDecisionError``."""


class Rules(NamedTuple):
    """How a client decides."""

    deadline: float
    fallbacks: Fallbacks
    on_refused: Optional[OnRefused]
    on_soft_limited: Optional[OnSoftLimited]
    on_tenant_refused: Optional[OnTenantRefused] = None


class Deciding:
    """What deciders have in common."""

    def __init__(self, rules: Rules, clock: Callable[[], float]) -> None:
        self._rules = rules
        self._clock = clock
        self._refusals = Refusals()
        self._fallback_log = Throttle()

    @property
    def _fallbacks(self) -> Fallbacks:
        return self._rules.fallbacks

    def _deadline(self, deadline: Optional[float]) -> float:
        return min(self._rules.deadline if deadline is None else deadline, _LONGEST_DEADLINE)

    def _log_fallback(self, first: str, second: str, why: str) -> None:
        held_back = self._fallback_log.passes(self._clock())
        if held_back is not None:
            LOG.warning(
                "the fallback decides for %s:%s: %s (%d such messages held back)",
                first,
                second,
                why,
                held_back,
            )

    def _timed(self, plan: Plan[T]) -> Plan[T]:
        """The same plan, and the metrics are told how long it took."""
        start = self._clock()
        try:
            answer = yield from plan
        except TollgateError:
            self._asked(start)
            raise
        self._asked(start)
        return answer

    def _asked(self, start: float) -> None:
        if METRICS is not None:
            METRICS.asked(self._clock() - start)

    def _waited(self, start: float) -> None:
        if METRICS is not None:
            METRICS.waited(self._clock() - start)


class Decider(Deciding):
    """Decides the requests of one client."""

    def __init__(self, rules: Rules, backend: Backend, clock: Callable[[], float]) -> None:
        super().__init__(rules, clock)
        self._backend = backend

    def allow(self, request: Request) -> Plan[Decision]:
        """Asks once."""
        try:
            decision = yield from self.decide(request)
        except TollgateError as error:
            self._report_error(request, error)
            raise
        self._report(request, decision)
        return decision

    def acquire(self, request: Request) -> Plan[Granted]:
        """Asks, and waits until the tokens may be used."""
        start = self._clock()
        try:
            decision = yield from self._decide_in_time(request, start)
        except TollgateError as error:
            self._report_error(request, error)
            self._waited(start)
            raise
        self._report(request, decision)
        if decision.is_granted and decision.wait > 0:
            yield Sleep(decision.wait)
        self._waited(start)
        if not decision.is_granted:
            raise RefusedError(decision)
        return decision

    def charge(self, request: Request, deadline: float) -> Plan[Decision]:
        """Asks the nodes alone, until ``deadline``: nobody is told of the answer, and no fallback
        decides."""
        answer = yield from self._backend.ask(message(request), deadline)
        return response.decision(answer)

    def _decide_in_time(self, request: Request, start: float) -> Plan[Decision]:
        """Asks until tokens are granted, or can't be within ``max_wait`` from ``start``."""
        max_wait = request.max_wait
        if max_wait is None:
            return (yield from self.decide(request))
        deadline = self._deadline(request.deadline)
        while True:
            elapsed = self._clock() - start
            # What is left of both, so that the whole takes no longer.
            decision = yield from self.decide(
                request._replace(
                    max_wait=max(max_wait - elapsed, 0.0),
                    deadline=max(min(max_wait + deadline - elapsed, deadline), 0.0),
                )
            )
            if decision.is_granted or decision.retry_after is None:
                return decision
            left = max_wait - (self._clock() - start)
            # The debt shrinks no faster than what is left: too long now is too long later.
            if max(decision.retry_after, decision.debt) > left:
                return decision
            pause = max(decision.retry_after, LEAST_PAUSE)
            # Jittered, so that those who wait for the same tokens do not all ask at once.
            yield Sleep(max(min(pause * (1 + random.random() / 10), left), 0.0))

    def decide(self, request: Request) -> Plan[Decision]:
        """Asks once, and tells nobody."""
        refused = self._refusals.get(request, self._clock())
        if refused is not None:
            return refused
        try:
            decision = yield from self._ask(request)
        except NoDecisionError as error:
            fallback = self._fallbacks.get(request.namespace, request.bucket)
            if fallback is None:
                raise
            why = error.detail
        else:
            if decision.is_granted:
                return decision
            if decision.reason not in (Reason.NO_BUCKET, Reason.UNAVAILABLE):
                if self._backend.remembers:
                    self._refusals.add(request, decision, self._clock())
                return decision
            fallback = self._fallbacks.get(request.namespace, request.bucket)
            if fallback is None:
                return decision
            why = decision.reason.value
        self._log_fallback(request.namespace, request.bucket, why)
        return fallback.decide(request.tokens, self._clock())

    def _ask(self, request: Request) -> Plan[Decision]:
        deadline = self._clock() + self._deadline(request.deadline)
        answer = yield from self._timed(self._backend.ask(message(request), deadline))
        return response.decision(answer)

    def _report(self, request: Request, decision: Decision) -> None:
        """Tells the metrics and the application of an answer."""
        if METRICS is not None:
            METRICS.decided(request.namespace, decision)
        if decision.is_granted:
            if decision.soft_limited and self._rules.on_soft_limited is not None:
                self._rules.on_soft_limited(request, decision)
        elif self._rules.on_refused is not None:
            self._rules.on_refused(request, decision)

    def _report_error(self, request: Request, error: TollgateError) -> None:
        if METRICS is not None and isinstance(error, (InvalidRequestError, NoDecisionError)):
            METRICS.not_decided(request.namespace, error)
