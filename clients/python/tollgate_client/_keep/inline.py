"""The keeper of a fake whose time only moves when told to: it needs no thread."""

from __future__ import annotations

import math
import threading
from typing import Any, Optional

from .._decide.effects import Plan, run
from .effects import Begin, Clock, Rest


class Inline:
    """Whenever somebody looks, does what a keeper would have done until then, at the times at which
    it would have done so."""

    def __init__(self, clock: Clock, longest_lag: float = math.inf) -> None:
        """longest_lag: seconds of fake time that are made up for at most."""
        self._fake_now = clock
        self._longest_lag = longest_lag
        self._now = clock()
        self._wake_at = math.inf
        self._plan: Optional[Plan[None]] = None
        self._lock = threading.Lock()

    def clock(self) -> float:
        """The keeper's time."""
        return self._now

    def start(self, plan: Plan[None]) -> None:
        """Has a keeper begin."""
        self._plan = plan
        self.wake()

    def wake(self) -> None:
        """Wakes the keeper."""
        self._wake_at = min(self._wake_at, self._fake_now())

    @property
    def pause(self) -> float:
        """How long it rests."""
        return max(self._wake_at - self._fake_now(), 0.0)

    def catch_up(self) -> None:
        """Does what there is to do by now."""
        if not self._lock.acquire(blocking=False):
            return  # Another thread does it.
        try:
            while self._plan is not None and self._wake_at <= self._fake_now():
                wake_at = max(self._wake_at, self._fake_now() - self._longest_lag)
                self._now = max(self._now, wake_at)
                self._wake_at = math.inf
                self._step(self._plan)
        finally:
            self._lock.release()

    def _step(self, plan: Plan[None]) -> None:
        try:
            effect = plan.send(None)
            while isinstance(effect, Begin):
                self._begin(effect)
                effect = plan.send(None)
        except StopIteration:
            self._plan = None
            return
        assert isinstance(effect, Rest)
        self._wake_at = min(self._wake_at, self._now + effect.seconds)

    def _begin(self, begin: Begin) -> None:
        """A fake answers at once."""
        try:
            run(begin.plan, _impossible)
        finally:
            begin.ended()


def _impossible(effect: Any) -> Any:
    raise AssertionError(f"a fake has nothing to do: {effect}")
