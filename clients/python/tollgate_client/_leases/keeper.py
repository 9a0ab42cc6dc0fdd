"""What keeps the leases of a client: asks for them, refreshes all in one call at the interval that
the nodes say, and releases them. A plan without input and output: a thread, a task or a fake
performs it."""

from __future__ import annotations

import math
import random
import time
from typing import Callable, List, Optional, Protocol, Set, Tuple

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
"""The least seconds between two calls when a handle is in a hurry."""

_LONGEST_INTERVAL = 60 * 60.0
"""The most seconds between two refreshes."""

_REFUSED_PAUSE = 30.0
"""Seconds after which a resource that the nodes refuse to lease is asked for again."""

_MOST_CALLS = 100
"""After so many calls for one refresh or release, groups that are refused are not split any more."""

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
        self._last_call = -math.inf
        # When those that the nodes refuse to lease are asked for again, all together.
        self._refused_until = -math.inf
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
                wake = min(self._next_refresh, self._second + _SECOND)
                if any(kept.is_urgent for kept in self._kept):
                    wake = min(wake, self._soon)
                yield Rest(max(wake - self._clock(), 0.0))
        self._gone.update(kept.resource.name for kept in self._kept if not kept.is_refused)
        yield from self._release()

    def _take(self, live: List[Resource]) -> None:
        """Begins to keep new resources. Those that have no handle any more will be released."""
        is_live = set(live)
        names = {one.name for one in live}
        for kept in self._kept:
            # The release of one that is refused would be refused, with all others.
            if kept.resource not in is_live and not kept.is_refused:
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
    def _soon(self) -> float:
        """When what is urgent may be asked for, all in one call."""
        return self._last_call + (_RETRY if self._is_failing else _LEAST_PAUSE)

    def _refresh(self) -> Plan[None]:
        """Asks for all resources in one call if it is time to, else for those that can't wait."""
        now = self._clock()
        is_time, is_soon = now >= self._next_refresh, now >= self._soon
        may_ask_refused = now >= self._refused_until
        due = [
            kept
            for kept in self._kept
            if (is_time and (may_ask_refused or not kept.is_refused))
            or (is_soon and kept.is_urgent)
        ]
        if not due and not is_time:
            return
        interval, error = yield from self._ask(due)
        self._schedule(interval, is_time)
        if error is not None:
            if METRICS is not None:
                METRICS.refresh_failed()
            if not self._is_failing:
                LOG.warning("leases are not refreshed, tried again every second: %s", error)
        self._is_failing = error is not None

    def _schedule(self, interval: float, was_all: bool) -> None:
        """Sets the time of the next refresh of all, after one of all or of some."""
        now = self._clock()
        interval = min(max(interval, _RETRY), _LONGEST_INTERVAL)
        # Those who began together do not stay together.
        next_refresh = now + interval * (0.9 + 0.1 * self._jitter())
        if any(kept.is_refused for kept in self._kept):
            next_refresh = min(next_refresh, self._refused_until)
        if was_all:
            self._next_refresh = max(next_refresh, now + _RETRY)
        else:
            self._next_refresh = min(next_refresh, self._next_refresh)

    def _release(self) -> Plan[None]:
        """Releases leases. If the nodes refuse the call because of a resource, releases each half."""
        names, self._gone = sorted(self._gone), set()
        if METRICS is not None:
            for name in names:
                METRICS.lease(name, 0.0, 0.0)
        groups = [names] if names else []
        for _ in range(_MOST_CALLS):
            if not groups:
                return
            group = groups.pop()
            request = ReleaseCapacityRequest(client_id=self._client_id, resource_id=group)
            try:
                yield from self._lessor.release_capacity(request, self._clock() + _ANSWER_TIMEOUT)
            except TollgateError as error:
                LOG.debug("leases are not released, and end when they expire: %s", error)
                if not _is_refusal(error):
                    return
                if len(group) > 1:
                    half = len(group) // 2
                    groups += [group[half:], group[:half]]

    def _ask(self, due: List[Kept]) -> Plan[Tuple[float, Optional[TollgateError]]]:
        """Asks for these resources in one call. If the nodes refuse the call because of a resource,
        asks for each half, so that the others get their leases. Returns the seconds until the next
        refresh, and why not all are refreshed."""
        interval, failure = _LONGEST_INTERVAL, None
        # Those that were refused before may be again, and are not asked for with the others.
        refused = [kept for kept in due if kept.is_refused]
        groups, calls = [refused, [kept for kept in due if not kept.is_refused]], 0
        while groups:
            group = groups.pop()
            if not group:
                continue
            if failure is not None:
                # No node answers: they are not asked again and again.
                self._not_answered(group)
                continue
            now, seconds = self._now(), self._clock() - self._second
            request = GetCapacityRequest(
                client_id=self._client_id, resource=[kept.request(seconds, now) for kept in group]
            )
            calls += 1
            self._last_call = now.at
            try:
                answer = yield from self._lessor.get_capacity(request, now.at + _ANSWER_TIMEOUT)
            except TollgateError as error:
                if not _is_refusal(error):
                    interval, failure = _RETRY, error
                    if _may_have_arrived(error):
                        self._maybe_answered(group)
                    else:
                        self._not_answered(group)
                elif len(group) > 1 and calls < _MOST_CALLS:
                    half = len(group) // 2
                    groups += [group[half:], group[:half]]
                elif len(group) > 1 and not group[0].is_refused:
                    # Not all of them may be refused. The others of the group will be found at the
                    # next refreshes.
                    self._not_answered(group)
                    interval = _RETRY
                else:
                    self._refused(group, error)
            else:
                interval = min(interval, self._answered(group, answer))
        return interval, failure

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
        """Leaves resources alone for a while that the nodes refuse to lease."""
        now = self._clock()
        if now >= self._refused_until:
            self._refused_until = now + _REFUSED_PAUSE
        for kept in group:
            LOG.warning("the nodes refuse to lease %s: %s", kept.resource.name, error)
            kept.refused(now)

    def _answered(self, group: List[Kept], answer: GetCapacityResponse) -> float:
        """Gives each resource its answer. Returns the seconds until the next refresh."""
        interval, now = _LONGEST_INTERVAL, self._now()
        by_name = {one.resource_id: one for one in answer.response}
        # A node that answers twice, or not for a resource, has not answered.
        counts = {name: 0 for name in by_name}
        for one in answer.response:
            counts[one.resource_id] += 1
        for kept in group:
            resource = kept.resource
            if counts.get(resource.name) == 1:
                gets = by_name[resource.name].gets
                interval = min(interval, max(gets.refresh_interval, 0))
                kept.answered(by_name[resource.name], now)
            else:
                interval = min(interval, _RETRY)
                kept.not_answered(now.at)
            if METRICS is not None:
                capacity = resource.held_at(now.at).at(now.at)
                METRICS.lease(resource.name, kept.asked or 0.0, capacity)
        return interval


def _is_refusal(error: TollgateError) -> bool:
    """Whether the request is wrong, or not allowed; it will be the next time."""
    if isinstance(error, NoDecisionError):
        return error.reason is NoAnswer.FORBIDDEN
    return isinstance(error, InvalidRequestError)


def _may_have_arrived(error: TollgateError) -> bool:
    """Whether a node may have decided, although there is no answer."""
    return not (isinstance(error, NoDecisionError) and error.reason is NoAnswer.UNREACHABLE)
