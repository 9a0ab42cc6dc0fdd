"""A session with one hold, shared by the hold's handle and the keeper."""

from __future__ import annotations

import itertools
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

_PART_OF_TTL = 3
"""Renewals are this part of the ttl apart, and so long before its end a hold is lost."""

_LONGEST_UNRECORDED = 5.0
"""The most seconds between two renewals of a hold that no node has recorded."""

_ANSWER_PART_OF_TTL = 12
"""An answer may take this part of the ttl, so that there is time for several attempts."""

_ANSWER_TIMES = 0.1, 2.0
"""The bounds of that in seconds."""

_PAUSE_PART_OF_TTL = 24
"""After an attempt without an answer, the next one comes after this part of the ttl."""

_LONGEST_PAUSE = 5.0
"""The most seconds of that."""

FIRST_END_PAUSE = 1.0
"""Seconds after which a session that was not ended is ended again."""

_numbers = itertools.count()


class Reserved(NamedTuple):
    """A hold that was granted."""

    copies: int
    decided_by: DecidedBy
    shadow: bool = False

    @property
    def is_recorded(self) -> bool:
        """Whether a node has recorded it. In shadow, it may not have."""
        return self.decided_by is DecidedBy.NODE and not self.shadow


class Session:
    """A session of one resource, with one hold, from before it is asked for until it has ended."""

    def __init__(
        self,
        request: TenantRequest,
        client_id: str,
        desk: Desk[Session],
        signal: Signal,
        on_lost: Optional[Callable[[], object]] = None,
    ) -> None:
        """``signal`` wakes the caller that asks for the hold."""
        self.name = str(next(_numbers))
        """Its name at the desk."""
        self.secret = secrets.token_hex(16)
        """Its name for the nodes. Whoever knows it can release the hold."""
        self.resource = request.resource
        self.domain = request.domain
        # For those who look at what is held.
        encoded = client_id.encode(errors="replace")[:_LONGEST_NAME]
        self.hold = encoded.decode(errors="ignore") or "client"
        self.ttl = request.ttl
        self.copies = request.copies
        self.min_copies = request.min_copies
        self.reserved: Optional[Reserved] = None
        """What counts now; ``None`` before it was granted."""
        self.shadow = False
        """Whether it was granted in shadow."""
        self.is_asking = True
        """Whether a caller asks for the hold still: the session is not ended meanwhile."""
        self.is_held = False
        self.is_released = False
        """Whether nobody wants it any more, and the keeper has to end it."""
        self.may_live_until = -math.inf
        """Until when a node may keep the session."""
        self.sent_at = 0.0
        """When the request was sent with which a node has granted it."""
        self.until = math.inf
        """Until when the last answer of a node counts; for ever if the fallback has granted it."""
        # What follows is the keeper's.
        self.due = self.end_due = 0.0
        """When it has to be renewed, or ended."""
        self.end_pause = FIRST_END_PAUSE
        """Seconds after which it is ended again."""
        self.is_called = False
        """Whether a call is under way, or waits for others."""
        self.is_alone = False
        """Whether a call for it and others was refused, so that it has calls of its own."""
        self.is_bounded = False
        """Whether it is ended for a short time only, as the client is closed."""
        self._request = request
        self._client_id = client_id
        self._desk = desk
        self._signal = signal
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
        """Whether a node has recorded the hold."""
        return self.reserved is not None and self.reserved.is_recorded

    @property
    def interval(self) -> float:
        """Seconds between two renewals."""
        part = self.ttl / _PART_OF_TTL
        return part if self.is_recorded else min(part / 2, _LONGEST_UNRECORDED)

    @property
    def pause(self) -> float:
        """Seconds after an attempt without an answer."""
        return min(self.ttl / _PAUSE_PART_OF_TTL, _LONGEST_PAUSE)

    @property
    def patience(self) -> float:
        """Seconds that an answer may take."""
        least, most = _ANSWER_TIMES
        return min(max(self.ttl / _ANSWER_PART_OF_TTL, least), most)

    @property
    def lost_at(self) -> float:
        """When it is lost without another answer, so that the application has stopped when others
        get the copies."""
        return self.until - self.ttl / _PART_OF_TTL

    @property
    def due_at(self) -> float:
        """When the keeper has to do something."""
        if self.is_held:
            return self.lost_at if self.is_called else min(self.due, self.lost_at)
        # In this order, as it is not asked for any more once it is released by its handle.
        is_to_end = self.is_released and not self.is_asking and not self.is_called
        return self.end_due if is_to_end else math.inf

    def grant(self, reserved: Reserved, now: float) -> bool:
        """Takes what was granted, unless the client was closed meanwhile."""
        if reserved.decided_by is not DecidedBy.NODE and self.may_live_until > -math.inf:
            # A node may have recorded more copies: that session ends, and another one begins.
            if not self._desk.add_along(self._leftover()):
                return False
            self.secret, self.may_live_until = secrets.token_hex(16), -math.inf
        with self._lock:
            if self.is_released:
                return False
            self.copies = self.min_copies = reserved.copies
            self.shadow = reserved.shadow
            is_by_node = reserved.decided_by is not DecidedBy.FALLBACK
            self.renew(reserved, self.sent_at if is_by_node else now)
            self.is_held, self.is_asking = True, False
            if METRICS is not None:
                METRICS.held(self.copies)
        self._desk.wake()
        return True

    def renew(self, reserved: Reserved, at: float) -> None:
        """Takes the answer to a call that was sent then, or what the fallback says then."""
        self.reserved = reserved
        is_by_node = reserved.decided_by is not DecidedBy.FALLBACK
        self.until = at + self.ttl if is_by_node else math.inf
        self.due = at + self.interval

    def may_live(self, deadline: float) -> None:
        """A call that may be carried out until then keeps it for its ttl."""
        self.may_live_until = max(self.may_live_until, deadline + self.ttl)

    def release(self) -> None:
        """It is not wanted any more."""
        self._end(True)
        self._desk.wake()

    def give_up(self) -> None:
        """Its caller asks for it no more."""
        self._end(True)
        self.is_asking = False
        self._desk.wake()

    def drop(self) -> None:
        """Its handle was collected, and so nobody asks for it. May be called at any moment."""
        self.is_released, self.is_asking = True, False
        self._desk.wake()

    def lose(self) -> bool:
        """Others may get the copies soon. Returns whether it was held."""
        was_held = self._end(False)
        if was_held:
            if METRICS is not None:
                METRICS.hold_lost()
            self._tell()
        return was_held

    def close(self) -> None:
        """The client is closed, or nobody keeps its holds any more."""
        if self._end(True):
            self._tell()

    def after_fork(self) -> None:
        """The hold is the parent's."""
        self._lock = threading.RLock()
        self._watchers = set()
        self.is_held, self.is_released = False, True

    def wait(self, seconds: float, clock: Clock) -> Plan[None]:
        """Waits for so long, or until it is released, as the client is closed."""
        yield from self._watch(lambda: self.is_released, seconds, self._signal, clock)

    def ended(self, timeout: Optional[float], signal: Signal, clock: Clock) -> Plan[bool]:
        """Waits until it is not held any more; returns whether that was within the timeout."""
        seconds = math.inf if timeout is None else timeout
        return (yield from self._watch(lambda: not self.is_held, seconds, signal, clock))

    def _watch(
        self, is_over: Callable[[], bool], seconds: float, signal: Signal, clock: Clock
    ) -> Plan[bool]:
        end = clock() + seconds
        with self._lock:
            self._watchers.add(signal)
        try:
            while not is_over():
                left = end - clock()
                if left <= 0:
                    return False
                signal.clear()
                if not is_over():
                    yield Await(signal, min(left, FOREVER), True)
            return True
        finally:
            with self._lock:
                self._watchers.discard(signal)

    def _leftover(self) -> Session:
        """A session under the same secret that is to be ended."""
        leftover = Session(self._request, self._client_id, self._desk, self._signal)
        leftover.secret, leftover.may_live_until = self.secret, self.may_live_until
        leftover.is_asking, leftover.is_released = False, True
        return leftover

    def _end(self, is_released: bool) -> bool:
        """Returns whether it was held."""
        with self._lock:
            self.is_released = self.is_released or is_released
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
