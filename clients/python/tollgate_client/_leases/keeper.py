"""What keeps the leases of a client: asks for them, refreshes all in one call at the interval that
the nodes say, and releases them. A plan without input and output: a thread, a task or a fake
performs it."""

from __future__ import annotations

import random
import time
from typing import Callable, List, Optional, Protocol, Set

from .._decide.effects import Plan
from .._decide.log import LOG
from .._decide.metrics import METRICS
from .._keep.effects import Clock, Rest
from .._proto.doorman_pb2 import (
    GetCapacityRequest,
    GetCapacityResponse,
    ReleaseCapacityRequest,
    ReleaseCapacityResponse,
)
from ..errors import InvalidRequestError, NoAnswer, NoDecisionError, TollgateError
from .desk import Desk
from .kept import Kept, Now
from .resource import Resource

_ANSWER_TIMEOUT = 2.0
"""Seconds that an answer may take."""

_RETRY = 1.0
"""Seconds after a refresh that has failed, and the least interval between two."""

_LEAST_PAUSE = 0.1
"""The least seconds between two refreshes when a handle is in a hurry."""

_LONGEST_INTERVAL = 60 * 60.0
"""The most seconds between two refreshes."""

_REFUSED_PAUSE = 30.0
"""Seconds after which a resource that the nodes refuse to lease is asked for again."""

_MOST_CALLS = 100
"""After so many calls for one refresh, groups that are refused are not split any more."""

_SECOND = 1.0
"""How often demand is measured."""


class Lessor(Protocol):
    """Who leases: nodes, or a fake. Raises ``InvalidRequestError`` or ``NoDecisionError``."""

    def get_capacity(
        self, message: GetCapacityRequest, deadline: float
    ) -> Plan[GetCapacityResponse]:
        """Asks for leases until ``deadline``."""

    def release_capacity(
        self, message: ReleaseCapacityRequest, deadline: float
    ) -> Plan[ReleaseCapacityResponse]:
        """Gives leases back."""


class Keeper:
    """Keeps the leases of one client."""

    def __init__(
        self,
        desk: Desk,
        lessor: Lessor,
        client_id: str,
        clock: Clock,
        epoch: Clock = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._desk = desk
        self._lessor = lessor
        self._client_id = client_id
        self._clock = clock
        self._epoch = epoch
        self._jitter = jitter
        self._kept: List[Kept] = []
        # The names of leases that have no handle any more.
        self._gone: Set[str] = set()
        # When the present second of demand began.
        self._second = self._next_refresh = clock()
        self._is_failing = False

    def run(self) -> Plan[None]:
        """Runs until no handle is left, or the client is closed."""
        desk = self._desk
        while not desk.is_closed:
            live = desk.live(bool(self._kept))
            if live is None:
                return
            self._take(live)
            for resource in live:
                resource.sweep()
            self._measure()
            yield from self._refresh()
            if self._gone and not desk.is_closed:
                yield from self._release()
            if self._kept and not desk.is_closed:
                now, pause = self._clock(), self._pause
                wake = min(kept.urgent_at(now, pause) for kept in self._kept)
                wake = min(wake, self._next_refresh, self._second + _SECOND)
                yield Rest(max(wake - now, 0.0))
        self._gone.update(kept.resource.name for kept in self._kept if kept.is_releasable)
        yield from self._release()

    def _take(self, live: List[Resource]) -> None:
        """Begins to keep new resources. Those that have no handle any more will be released."""
        is_live = set(live)
        names = {one.name for one in live}
        for kept in self._kept:
            if kept.resource not in is_live and kept.is_releasable:
                self._gone.add(kept.resource.name)
        # One that has another handle already is asked for instead.
        self._gone -= names
        self._kept = [kept for kept in self._kept if kept.resource in is_live]
        is_kept = {kept.resource for kept in self._kept}
        self._kept.extend(Kept(one) for one in live if one not in is_kept)

    def _measure(self) -> None:
        """Measures the demand once a second."""
        now = self._clock()
        if now - self._second >= _SECOND:
            for kept in self._kept:
                kept.measure(now - self._second)
            self._second = now

    @property
    def _pause(self) -> float:
        """The least time between two requests for a resource."""
        return _RETRY if self._is_failing else _LEAST_PAUSE

    def _refresh(self) -> Plan[None]:
        """Asks for all resources in one call if it is time to, else for those that can't wait."""
        start, pause = self._clock(), self._pause
        is_time = start >= self._next_refresh
        due = [
            kept
            for kept in self._kept
            if (is_time and not kept.is_refused(start)) or kept.urgent_at(start, pause) <= start
        ]
        if not due and not is_time:
            return
        refresh = _Refresh(self._lessor, self._client_id, self._clock, self._epoch)
        yield from refresh.ask(due, self._second)
        now = self._clock()
        interval = _RETRY
        if refresh.error is None:
            interval = min(max(refresh.interval, _RETRY), _LONGEST_INTERVAL)
        # Those who began together do not stay together.
        next_refresh = now + interval * (0.9 + 0.1 * self._jitter())
        for kept in self._kept:
            if kept.refused_until is not None and kept.refused_until > now:
                next_refresh = min(next_refresh, kept.refused_until)
        self._next_refresh = next_refresh if is_time else min(self._next_refresh, next_refresh)
        if refresh.error is not None:
            if METRICS is not None:
                METRICS.refresh_failed()
            if not self._is_failing:
                LOG.warning("leases are not refreshed, tried again every second: %s", refresh.error)
        self._is_failing = refresh.error is not None

    def _release(self) -> Plan[None]:
        names, self._gone = sorted(self._gone), set()
        if not names:
            return
        if METRICS is not None:
            for name in names:
                METRICS.lease(name, 0.0, 0.0)
        request = ReleaseCapacityRequest(client_id=self._client_id, resource_id=names)
        try:
            yield from self._lessor.release_capacity(request, self._clock() + _ANSWER_TIMEOUT)
        except TollgateError as error:
            LOG.debug("leases are not released, and end when they expire: %s", error)


class _Refresh:
    """One refresh."""

    def __init__(self, lessor: Lessor, client_id: str, clock: Clock, epoch: Clock) -> None:
        self._lessor = lessor
        self._client_id = client_id
        self._clock = clock
        self._epoch = epoch
        self.interval = _LONGEST_INTERVAL
        """Seconds until the next one."""
        self.error: Optional[TollgateError] = None
        """Why not all leases are refreshed."""

    def ask(self, due: List[Kept], second: float) -> Plan[None]:
        """Asks for these resources in one call. If the nodes refuse the call because of a resource,
        asks for each half, so that the others get their leases."""
        groups, calls = [due], 0
        while groups:
            group = groups.pop()
            now, seconds = self._now(), self._clock() - second
            request = GetCapacityRequest(
                client_id=self._client_id, resource=[kept.request(seconds, now) for kept in group]
            )
            if self.error is not None:
                # No node answers: they are not asked again and again.
                self._not_answered(group)
                continue
            if not group:
                continue
            calls += 1
            try:
                answer = yield from self._lessor.get_capacity(request, now.at + _ANSWER_TIMEOUT)
            except TollgateError as error:
                if not _is_refusal(error):
                    self.error = error
                    if _may_have_arrived(error):
                        self._maybe_answered(group)
                    else:
                        self._not_answered(group)
                elif len(group) > 1 and calls < _MOST_CALLS:
                    half = len(group) // 2
                    groups += [group[half:], group[:half]]
                else:
                    self._refused(group, error)
            else:
                self._answered(group, answer)

    def _now(self) -> Now:
        return Now(self._clock(), self._epoch())

    def _not_answered(self, group: List[Kept]) -> None:
        now = self._clock()
        for kept in group:
            kept.not_answered(now)

    def _maybe_answered(self, group: List[Kept]) -> None:
        now = self._clock()
        for kept in group:
            kept.maybe_answered(now)

    def _refused(self, group: List[Kept], error: TollgateError) -> None:
        now = self._clock()
        for kept in group:
            LOG.warning("the nodes refuse to lease %s: %s", kept.resource.name, error)
            kept.not_answered(now)
            kept.refused_until = now + _REFUSED_PAUSE

    def _answered(self, group: List[Kept], answer: GetCapacityResponse) -> None:
        """Gives each resource its answer."""
        now = self._now()
        by_name = {one.resource_id: one for one in answer.response}
        # A node that answers twice, or not for a resource, has not answered.
        counts = {name: 0 for name in by_name}
        for one in answer.response:
            counts[one.resource_id] += 1
        for kept in group:
            resource = kept.resource
            if counts.get(resource.name) == 1:
                gets = by_name[resource.name].gets
                self.interval = min(self.interval, max(gets.refresh_interval, 0))
                kept.answered(by_name[resource.name], now)
            else:
                self.interval = min(self.interval, _RETRY)
                kept.not_answered(now.at)
            if METRICS is not None:
                METRICS.lease(resource.name, kept.asked or 0.0, resource.held.at(now.at))


def _is_refusal(error: TollgateError) -> bool:
    """Whether the request is wrong, or not allowed; it will be the next time."""
    if isinstance(error, NoDecisionError):
        return error.reason is NoAnswer.FORBIDDEN
    return isinstance(error, InvalidRequestError)


def _may_have_arrived(error: TollgateError) -> bool:
    """Whether a node may have decided, although there is no answer."""
    return not (isinstance(error, NoDecisionError) and error.reason is NoAnswer.UNREACHABLE)
