"""A resource of which a client holds a lease."""

from __future__ import annotations

import enum
import threading
import time
from typing import Optional, Protocol, Set

from .._keep.effects import Clock, Signal
from .held import CLOSED, Held, nothing_but


class Mode(enum.Enum):
    """What may be used once a lease has run out and no node has renewed it, and before the first
    answer."""

    SAFE = "safe"
    """The safe capacity that a node last said; nothing if none ever did."""
    PESSIMISTIC = "pessimistic"
    """Nothing."""
    OPTIMISTIC = "optimistic"
    """What was wanted."""


class Usage(Protocol):
    """How a resource is used. All methods are called under the resource's lock."""

    def demand(self, seconds: float) -> float:
        """What was demanded since the last second began, so many seconds ago; with what was
        refused, and what waits."""

    def begin_second(self) -> None:
        """A second of demand begins."""

    def before_change(self, held: Held, now: float) -> None:
        """Another capacity will be held than ``held``, which counts until ``now``."""

    def sweep(self) -> bool:
        """Takes back what was collected, and returns whether there was any."""


class Unmeasured:
    """A use that the application says itself."""

    def demand(self, seconds: float) -> float:
        return 0.0

    def begin_second(self) -> None:
        pass

    def before_change(self, held: Held, now: float) -> None:
        pass

    def sweep(self) -> bool:
        return False


class Resource:
    """A resource, shared by its handle and the keeper."""

    def __init__(
        self,
        name: str,
        mode: Mode,
        wants: Optional[float],
        usage: Usage,
        now: float,
        epoch: Clock = time.time,
    ) -> None:
        self.name = name
        self.mode = mode
        self.wants = wants
        """What to ask for; ``None`` if it is measured."""
        self.usage = usage
        self.is_urgent = False
        """Whether the next refresh should not wait for its time."""
        self.lock = threading.Lock()
        """Guards the usage, what is held, and who waits."""
        is_optimistic = mode is Mode.OPTIMISTIC and wants is not None
        self.initial = max(wants or 0.0, 0.0) if is_optimistic else 0.0
        """What may be used before the first answer."""
        self.held = nothing_but(self.initial, now)
        self._epoch = epoch
        self.watchers: Set[Signal] = set()
        """Who is woken when another capacity is held."""

    def held_at(self, now: float) -> Held:
        """What is held now. A lease also runs out by the time of day: that clock goes on while the
        machine sleeps, when the other one may stand still."""
        held = self.held
        if now < held.expires and self._epoch() >= held.ends:
            return held._replace(capacity=held.after, is_all=False)
        return held

    def could_get_more(self, now: float) -> bool:
        """Whether another request may get more: the last one got all that it wanted, and it will
        want what is demanded then."""
        held = self.held_at(now)
        return held.is_all and now < held.expires and self.wants is None

    def hold(self, held: Held, now: float) -> None:
        """Changes what is held, unless the lease was given back."""
        with self.lock:
            if self.held.is_closed:
                return
            self.usage.before_change(self.held_at(now), now)
            self.held = held
            self._wake()

    def close(self) -> None:
        """Lets nothing be used any more."""
        with self.lock:
            self.held = CLOSED
            self._wake()

    def sweep(self) -> None:
        """Has those who wait look again if something was collected."""
        with self.lock:
            if self.usage.sweep():
                self._wake()

    def after_fork(self) -> None:
        """The lease is the parent's."""
        self.lock = threading.Lock()
        self.watchers = set()
        self.held = CLOSED

    def _wake(self) -> None:
        for watcher in self.watchers:
            watcher.set()
