"""How a request for hits or a hold is decided: by a remembered refusal, the nodes, or a fallback."""

from __future__ import annotations

import random
from typing import Callable, Optional, TypeVar, Union

from .._decide.decider import LEAST_PAUSE, Deciding, Rules
from .._decide.effects import Plan, Sleep
from .._decide.metrics import METRICS
from ..answers import Hits, Reason, Refused
from ..errors import ClosedError, InvalidRequestError, NoDecisionError, RefusedError
from ..request import Request, TenantRequest
from . import wire
from .reserving import Tenants, reserve
from .session import Reserved, Session

G = TypeVar("G", Hits, Reserved)

Once = Callable[[float], Plan[Union[G, Refused]]]
"""Asks once, until a deadline."""

Wait = Callable[[float], Plan[None]]
"""Waits for so many seconds."""

Pause = Callable[[float, float], Optional[float]]
"""How long to wait after a refusal with this retry time, if so much is left of ``max_wait``; ``None``
to give up."""


class TenantDecider(Deciding):
    """Decides the requests of one client for hits and holds."""

    def __init__(self, rules: Rules, nodes: Tenants, clock: Callable[[], float]) -> None:
        super().__init__(rules, clock)
        self.nodes = nodes

    def hits(self, request: TenantRequest) -> Plan[Hits]:
        """Asks until hits are granted, or can't be within ``max_wait``."""
        # It is the client that waits, so a refusal covers every wait.
        asked = Request(request.resource, request.domain, request.min_copies)

        def ask(deadline: float) -> Plan[Union[Hits, Refused]]:
            answer = yield from self._timed(self.nodes.hits(wire.throttle(request), deadline))
            return wire.hits(answer)

        def once(deadline: float) -> Plan[Union[Hits, Refused]]:
            refused = self._refusals.get(asked, self._clock())
            if refused is not None:
                return refused
            decision = yield from self._or_fallback(request, ask(deadline), wire.hits_of_fallback)
            if isinstance(decision, Refused) and decision.reason is Reason.LIMIT:
                if self.nodes.remembers:
                    self._refusals.add(asked, decision, self._clock())
            return decision

        return (yield from self._acquire("hits", request, once, _exact_pause, _sleep))

    def hold(self, request: TenantRequest, session: Session) -> Plan[None]:
        """Asks until the session has its hold, or can't have it within ``max_wait``."""

        def once(deadline: float) -> Plan[Union[Reserved, Refused]]:
            if session.is_released:
                raise ClosedError("the client is closed")
            plan = self._timed(reserve(self.nodes, session, deadline, self._clock))
            return self._or_fallback(request, plan, wire.reserved_by_fallback)

        def wait(seconds: float) -> Plan[None]:
            return session.wait(seconds, self._clock)

        try:
            granted = yield from self._acquire("hold", request, once, _guessed_pause, wait)
            if not session.grant(granted, self._clock()):
                raise ClosedError("the client is closed")
        except BaseException:
            # If an answer was lost, or the caller has given up, a node may have granted it.
            session.give_up()
            raise

    def fallback_grants(self, session: Session, now: float) -> bool:
        """Whether the fallback grants a hold that no node has renewed in time."""
        fallback = self._fallbacks.of_resource(session.resource)
        return fallback is not None and fallback.decide(session.copies, now).is_granted

    def _acquire(
        self, kind: str, request: TenantRequest, once: Once[G], pause_of: Pause, wait: Wait
    ) -> Plan[G]:
        start = self._clock()
        try:
            decision = yield from self._decide_in_time(request, start, once, pause_of, wait)
        except InvalidRequestError:
            self._count(kind, "invalid", "node", start)
            raise
        except NoDecisionError:
            self._count(kind, "no_decision", "nobody", start)
            raise
        outcome = "refused" if isinstance(decision, Refused) else "granted"
        self._count(kind, outcome, decision.decided_by.value, start)
        if isinstance(decision, Refused):
            if self._rules.on_tenant_refused is not None:
                self._rules.on_tenant_refused(request, decision)
            raise RefusedError(decision)
        return decision

    def _decide_in_time(
        self, request: TenantRequest, start: float, once: Once[G], pause_of: Pause, wait: Wait
    ) -> Plan[Union[G, Refused]]:
        """Asks until copies are granted, or can't be within ``max_wait`` from ``start``."""
        end, patience = start + request.max_wait, self._deadline(request.deadline)
        while True:
            now = self._clock()
            # What is left of both, so that the whole takes no longer.
            decision = yield from once(now + max(min(end + patience - now, patience), 0.0))
            if not isinstance(decision, Refused) or decision.retry_after is None:
                return decision
            pause = pause_of(decision.retry_after, end - self._clock())
            if pause is None:
                return decision
            yield from wait(pause)

    def _or_fallback(
        self,
        request: TenantRequest,
        plan: Plan[Union[G, Refused]],
        granted: Callable[[int], G],
    ) -> Plan[Union[G, Refused]]:
        """Has the fallback decide if no node does."""
        fallback = self._fallbacks.of_resource(request.resource)
        try:
            decision = yield from plan
        except NoDecisionError as error:
            if fallback is None:
                raise
            why = error.detail
        else:
            if not isinstance(decision, Refused) or decision.reason is not Reason.UNAVAILABLE:
                return decision
            if fallback is None:
                return decision
            why = decision.reason.value
        self._log_fallback(request.resource, request.domain, why)
        by_fallback = fallback.decide(request.min_copies, self._clock())
        return granted(by_fallback.tokens) if by_fallback.is_granted else by_fallback

    def _count(self, kind: str, outcome: str, decided_by: str, start: float) -> None:
        if METRICS is not None:
            METRICS.tenant_decided(kind, outcome, decided_by)
        self._waited(start)


def _sleep(seconds: float) -> Plan[None]:
    yield Sleep(seconds)


def _exact_pause(retry_after: float, left: float) -> Optional[float]:
    """Up to a tenth longer, so that those who wait for the same hits do not all ask at once."""
    if retry_after > left:
        return None
    pause = max(retry_after, LEAST_PAUSE) * (1 + random.random() / 10)
    return max(min(pause, left), 0.0)


def _guessed_pause(retry_after: float, left: float) -> Optional[float]:
    """A quarter more or less, as nobody knows when copies become free, with a last attempt at the
    end."""
    if left <= 0:
        return None
    return min(max(retry_after, LEAST_PAUSE) * (0.75 + random.random() / 2), left)
