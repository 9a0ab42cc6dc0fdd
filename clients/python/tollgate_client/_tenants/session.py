"""A session with one hold, shared by the hold's handle and the keeper."""

from __future__ import annotations

import math
import secrets
import threading
from typing import Callable, NamedTuple, Optional, Set

from .._decide.effects import Plan
from .._decide.log import LOG
from .._decide.metrics import METRICS
from .._keep.desk import Desk
from .._keep.effects import FOREVER, Await, Clock, Signal
from ..answers import DecidedBy
from ..request import TenantRequest

_LONGEST_NAME = 128
"""The most bytes of a hold's name."""


class Reserved(NamedTuple):
    """A hold that was granted."""

    copies: int
    decided_by: DecidedBy
    shadow: bool = False

    @property
    def is_recorded(self) -> bool:
        """Whether the shared state has it."""
        return self.decided_by is DecidedBy.NODE and not self.shadow


class Session:
    """A session of one resource, with one hold, from before it is asked for until it has ended."""

    def __init__(
        self,
        request: TenantRequest,
        client_id: str,
        desk: Desk[Session],
        on_lost: Optional[Callable[[], object]] = None,
    ) -> None:
        # Whoever knows it can release the hold.
        self.name = secrets.token_hex(16)
        self.resource = request.resource
        self.domain = request.domain
        # For those who look at what is held.
        encoded = client_id.encode(errors="replace")[:_LONGEST_NAME]
        self.hold = encoded.decode(errors="ignore") or "client"
        self.ttl = request.ttl
        self.copies = request.copies
        self.min_copies = request.min_copies
        self.reserved: Optional[Reserved] = None
        """What was granted; ``None`` before."""
        self.is_asking = False
        """Whether a call that asks for the hold is under way."""
        self.is_held = False
        self.is_released = False
        """Whether nobody wants it any more, and the keeper has to end it."""
        self.may_exist = False
        """Whether a node may have granted it, so that it has to be ended."""
        self.sent_at = self.silent_from = 0.0
        """When the last call that asked for it was sent, and when the last call of all has ended."""
        self.until = 0.0
        """When a recorded hold ends that nobody renews."""
        self.due = self.end_due = 0.0
        """When the keeper has to renew it, or to end it."""
        self._desk = desk
        self._on_lost = on_lost
        # A signal handler may release it while its thread holds the lock.
        self._lock = threading.RLock()
        self._watchers: Set[Signal] = set()

    @property
    def ttl_millis(self) -> int:
        """The ttl in whole milliseconds."""
        return int(self.ttl * 1000)

    @property
    def is_recorded(self) -> bool:
        """Whether it is held, and the shared state has the hold."""
        return self.is_held and self.reserved is not None and self.reserved.is_recorded

    @property
    def interval(self) -> float:
        """Seconds between two renewals; also so long before its end a hold is lost, so that the
        application has stopped when others get the copies."""
        return self.ttl / 3

    @property
    def lost_at(self) -> float:
        """When a recorded hold is lost that nobody renews."""
        return self.until - self.interval

    @property
    def due_at(self) -> float:
        """When the keeper has to do something."""
        if self.is_held:
            return min(self.due, self.lost_at) if self.is_recorded else self.due
        return self.end_due if self.is_released and not self.is_asking else math.inf

    def grant(self, reserved: Reserved) -> bool:
        """Takes what was granted, unless the client was closed meanwhile."""
        with self._lock:
            if self.is_released:
                return False
            self.copies = self.min_copies = reserved.copies
            self.renew(reserved, self.sent_at)
            self.is_held = True
            if METRICS is not None:
                METRICS.held(self.copies)
        self._desk.wake()
        return True

    def renew(self, reserved: Reserved, sent_at: float) -> None:
        """Takes the answer to a call, or what the fallback says."""
        self.reserved = reserved
        self.until = sent_at + self.ttl
        self.due = sent_at + self.interval

    def release(self) -> None:
        """It is not wanted any more."""
        self._end()
        self._desk.wake()

    def drop(self) -> None:
        """The same when its handle was collected. May be called at any moment."""
        self.is_released = True
        self._desk.wake()

    def lose(self, why: str) -> None:
        """Others may get the copies soon."""
        if self._end():
            if METRICS is not None:
                METRICS.hold_lost()
            LOG.warning("the copies of %s for %s are lost: %s", self.resource, self.domain, why)
            self._tell()

    def close(self) -> None:
        """The client is closed, or nobody keeps its holds any more."""
        if self._end():
            self._tell()

    def after_fork(self) -> None:
        """The hold is the parent's."""
        self._lock = threading.RLock()
        self._watchers = set()
        self.is_held, self.is_released = False, True

    def ended(self, timeout: Optional[float], signal: Signal, clock: Clock) -> Plan[bool]:
        """Waits until it is not held any more; returns whether that was within the timeout."""
        end = math.inf if timeout is None else clock() + timeout
        with self._lock:
            self._watchers.add(signal)
        try:
            while self.is_held:
                left = end - clock()
                if left <= 0:
                    return False
                signal.clear()
                if self.is_held:
                    yield Await(signal, min(left, FOREVER), True)
            return True
        finally:
            with self._lock:
                self._watchers.discard(signal)

    def _end(self) -> bool:
        """Returns whether it was held."""
        with self._lock:
            self.is_released = True
            was_held, self.is_held = self.is_held, False
            if was_held and METRICS is not None:
                METRICS.held(-self.copies)
            for watcher in self._watchers:
                watcher.set()
        return was_held

    def _tell(self) -> None:
        if self._on_lost is None:
            return
        try:
            self._on_lost()
        except Exception:  # The other holds have to be kept.
            LOG.exception("on_lost of a hold on %s has failed", self.resource)
