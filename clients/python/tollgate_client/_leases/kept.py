"""What is known of a resource beyond what its handle sees: what to ask for, and what an answer
means. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

from .._proto.doorman_pb2 import Lease, ResourceRequest, ResourceResponse
from .demand import Demand
from .held import Held
from .resource import Mode, Resource

_MOST_WANTS = 1e15
"""The most that is asked for; it stands for no bound."""

_NO_BOUND = -1.0
"""The safe capacity that stands for no bound."""

_ROUNDING = 1e-9
"""Shares are sums of fractions: one that is smaller by this part is the same."""

_LONGEST_LEASE = 365 * 24 * 60 * 60.0
"""Seconds; a longer lease counts as this one."""


class Now(NamedTuple):
    """One moment on two clocks."""

    at: float
    since_epoch: float
    """The clock of leases."""

    def remaining(self, lease: Lease) -> float:
        """How long a lease is valid from now on; 0 if it has expired."""
        return min(max(lease.expiry_time - self.since_epoch, 0.0), _LONGEST_LEASE)


class Kept:
    """A resource whose lease is kept."""

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self.demand = Demand()
        self.asked: Optional[float] = None
        """What was asked for last; ``None`` if nothing was."""
        self.is_refused = False
        """Whether the nodes refuse to lease it."""
        self._lease: Optional[Lease] = None
        # ``None`` if no node has said.
        self._safe: Optional[float] = None

    def measure(self, seconds: float) -> None:
        """A second of demand has ended."""
        resource = self.resource
        with resource.lock:
            self.demand.add(resource.usage.demand(seconds))
            resource.usage.begin_second()

    def request(self, seconds: float, now: Now) -> ResourceRequest:
        """What to ask for, ``seconds`` after the last whole second of demand."""
        resource = self.resource
        # What is demanded from now on is not in this request.
        resource.is_urgent = False
        wants = resource.wants
        if wants is None:
            with resource.lock:
                # What has come in a part of a second is not multiplied.
                present = resource.usage.demand(max(seconds, 1.0))
            wants = self.demand.wants(present)
        # A request with an invalid number would be refused.
        self.asked = 0.0 if math.isnan(wants) else min(max(wants, 0.0), _MOST_WANTS)
        request = ResourceRequest(resource_id=resource.name, priority=0, wants=self.asked)
        if self._lease is not None and now.remaining(self._lease) > 0.0:
            request.has.CopyFrom(self._lease)
        return request

    def answered(self, answer: ResourceResponse, now: Now) -> None:
        """Takes the answer of a node."""
        if answer.HasField("safe_capacity"):
            self._safe = answer.safe_capacity
        elif not answer.degraded:
            # A node without the shared store may not know it, and does not take it back.
            self._safe = None
        self.is_refused = False
        # A number that is none is no capacity.
        capacity = answer.gets.capacity
        capacity = capacity if capacity > 0.0 else 0.0
        self._lease = Lease(
            expiry_time=answer.gets.expiry_time,
            refresh_interval=answer.gets.refresh_interval,
            capacity=capacity,
        )
        is_all = self.asked is not None and capacity >= self.asked * (1.0 - _ROUNDING)
        expires = now.at + now.remaining(answer.gets)
        held = Held(capacity, expires, self._after(), is_all, ends=answer.gets.expiry_time)
        self.resource.hold(held, now.at)

    def not_answered(self, now: float) -> None:
        """There is no answer: what is held stays until it runs out."""
        held = self.resource.held._replace(after=self._after(), is_all=False)
        if held != self.resource.held:
            self.resource.hold(held, now)

    def maybe_answered(self, now: float) -> None:
        """There is no answer, but a node may have lent what was asked for, and the rest to
        others."""
        self.not_answered(now)
        held = self.resource.held
        if held.capacity > (self.asked or 0.0):
            self.resource.hold(held._replace(capacity=self.asked or 0.0), now)

    def refused(self, now: float) -> None:
        """The nodes refuse to lease it."""
        self.not_answered(now)
        self.is_refused = True

    def _after(self) -> float:
        """The capacity without a lease."""
        if self.resource.mode is Mode.PESSIMISTIC:
            return 0.0
        if self.resource.mode is Mode.OPTIMISTIC:
            return self.asked or 0.0
        if self._safe == _NO_BOUND:
            return math.inf
        return self._safe if self._safe is not None and self._safe > 0.0 else 0.0

    @property
    def is_urgent(self) -> bool:
        """Whether it can't wait for the next refresh of all."""
        return self.asked is None or (self.resource.is_urgent and not self.is_refused)
