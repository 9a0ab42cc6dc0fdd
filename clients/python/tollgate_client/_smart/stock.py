"""What the application and the keeper share of a smart bucket, without input and output."""

from __future__ import annotations

import copy
import itertools
import threading
from collections import OrderedDict
from operator import index
from typing import Callable, Optional

from .._decide.effects import Plan
from .._keep.effects import FOREVER, Await, Clock, Signal
from ..answers import DecidedBy, Reason, Refused
from ..errors import ClosedError, InvalidRequestError, RefusedError, TollgateError
from ..request import Request
from .supply import Supply

_numbers = itertools.count()


class _Waiter:
    """A caller who waits for tokens."""

    __slots__ = ("tokens", "signal", "is_served", "error")

    def __init__(self, tokens: int, signal: Signal) -> None:
        self.tokens = tokens
        self.signal = signal
        self.is_served = False
        self.error: Optional[TollgateError] = None


class Stock:
    """The tokens of one smart bucket."""

    def __init__(
        self, request: Request, supply: Supply, wake: Callable[[], None], clock: Clock
    ) -> None:
        """``request`` is what the keeper asks for, with another number of tokens each time."""
        # Several may take tokens of the same bucket.
        self.name = str(next(_numbers))
        self.request = request
        self.supply = supply
        """Used by the keeper alone."""
        self.is_woken = False
        """Whether there is news for the keeper."""
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = 0
        # All tokens that were used, and refused.
        self._used = self._refused = 0
        # With fewer tokens than these, the keeper is woken.
        self._low = 0
        # Those who wait, the first one at the front, and their tokens.
        self._line: OrderedDict[_Waiter, None] = OrderedDict()
        self._waiting = 0
        # Why the last tokens that were asked for are not there.
        self._trouble: Optional[TollgateError] = None
        self._is_closed = False

    def try_acquire(self, tokens: int) -> bool:
        """Uses tokens if they are there, and nobody waits for them."""
        if tokens < 1:
            tokens = _at_least_one(tokens)
        if self._use(tokens):
            return True
        tokens = index(tokens)
        with self._lock:
            self._refused += tokens
        self._call_keeper()
        return False

    def acquire(self, tokens: int, max_wait: float, new_signal: Callable[[], Signal]) -> Plan[None]:
        """Uses tokens, and waits for them if they are not there."""
        tokens = _at_least_one(index(tokens))
        # What is not at least 0 may also be no number.
        if not max_wait >= 0:
            raise InvalidRequestError(f"invalid request: a max_wait of {max_wait} seconds")
        if self._use(tokens):
            return
        waiter, is_done = _Waiter(tokens, new_signal()), False
        end = self._clock() + max_wait
        try:
            with self._lock:
                if self._is_closed:
                    raise ClosedError("the smart bucket is closed")
                self._line[waiter] = None
                self._waiting += tokens
                # Some may have come meanwhile.
                self._serve()
            self._call_keeper()
            while True:
                with self._lock:
                    waiter.signal.clear()
                    if waiter.is_served:
                        is_done = True
                        return
                    if waiter.error is not None:
                        # Each caller's own, as it gets a traceback.
                        raise copy.copy(waiter.error)
                    left = end - self._clock()
                    if left <= 0:
                        raise self._refusal()
                    is_first = next(iter(self._line)) is waiter
                yield Await(waiter.signal, min(left, FOREVER), is_first)
        finally:
            if not is_done:
                self._leave(waiter)

    def look(self, now: float) -> int:
        """Measures demand, throws away what is too much for it, and returns the tokens to ask
        for."""
        supply = self.supply
        with self._lock:
            self.is_woken = False
            supply.measure(self._used, self._refused, now)
            self._low = supply.low
            if not supply.is_fresh(now):
                self._tokens = min(self._tokens, supply.target + self._waiting)
            if self._tokens:
                supply.look_again(now)
            return supply.wanted(self._tokens, self._waiting)

    def add(self, tokens: int) -> None:
        """Tokens are there."""
        with self._lock:
            self._trouble = None
            if not self._is_closed:
                self._tokens += tokens
                self._serve()

    def refuse(self, trouble: TollgateError) -> None:
        """There are no tokens now. Whoever has waited for too long is told why."""
        with self._lock:
            self._trouble = trouble

    def fail(self, trouble: TollgateError) -> None:
        """Nobody knows when there will be tokens. Whoever waits is told."""
        with self._lock:
            self._trouble = trouble
            self._dismiss(trouble)

    def close(self) -> None:
        """Lets nothing be used any more."""
        with self._lock:
            self._is_closed, self._tokens = True, 0
            self._dismiss(ClosedError("the smart bucket is closed"))

    def after_fork(self) -> None:
        """The tokens are the parent's."""
        self._lock = threading.Lock()
        self._line = OrderedDict()
        self._is_closed, self._tokens, self._waiting = True, 0, 0

    def _use(self, tokens: int) -> bool:
        with self._lock:
            left = self._tokens - tokens
            # Neither holds for what is not a number.
            if self._line or not left >= 0:
                return False
            self._tokens = left
            self._used += tokens
        if left < self._low:
            self._call_keeper()
        return True

    def _call_keeper(self) -> None:
        if not self.is_woken:
            self.is_woken = True
            self._wake()

    def _serve(self) -> None:
        """Gives what is there to those who came first."""
        while self._line:
            first = next(iter(self._line))
            if first.tokens > self._tokens:
                return
            del self._line[first]
            self._tokens -= first.tokens
            self._waiting -= first.tokens
            self._used += first.tokens
            first.is_served = True
            first.signal.set()

    def _leave(self, waiter: _Waiter) -> None:
        """A caller gives up, or is told that there is nothing."""
        with self._lock:
            self._refused += waiter.tokens
            if waiter.is_served:
                # Just now. Others may use them.
                self._used -= waiter.tokens
                self._tokens += 0 if self._is_closed else waiter.tokens
            elif waiter in self._line:
                del self._line[waiter]
                self._waiting -= waiter.tokens
            self._serve()

    def _dismiss(self, error: TollgateError) -> None:
        """Tells all who wait."""
        for waiter in self._line:
            waiter.error = error
            waiter.signal.set()
        self._line.clear()
        self._waiting = 0

    def _refusal(self) -> TollgateError:
        """What is told to a caller who has waited for too long."""
        if self._trouble is not None:
            return copy.copy(self._trouble)
        return RefusedError(Refused(Reason.LIMIT, None, DecidedBy.NODE))


def _at_least_one(tokens: int) -> int:
    if tokens < 0:
        raise InvalidRequestError(f"invalid request: {tokens} tokens")
    return tokens or 1
