"""What a smart bucket asks for, and when. Pure."""

from __future__ import annotations

import math
from typing import Optional, Tuple

from .._decide.level import Level, level
from ..answers import Granted, Reason, Refused
from .meter import Meter

TICK = 0.1
"""How often, in seconds, demand is measured, and what is too much thrown away."""

SOON = 0.1
"""Seconds that tokens which are asked for may take to come. While demand is greater than the bucket's
rate, this is how much is asked for at a time."""

_LONGEST_PAUSE = 1.0
"""The most seconds after a request that has no tokens."""

_LIMIT_TIME = 60.0
"""Seconds that the bucket is taken to refuse more tokens at once than it has refused."""


class Supply:
    """The supply of one smart bucket."""

    def __init__(self, ahead: float, now: float) -> None:
        """ahead: seconds of use that are taken ahead at most."""
        self._ahead = ahead
        self._meter = Meter(now)
        self.target = 0
        """The tokens to have."""
        self.coming = 0
        """Tokens that are granted, and may be used after the pause."""
        self.paused_until = -math.inf
        """Nothing is asked for before then."""
        self.look_at = -math.inf
        """When there is something to do if nobody demands tokens until then."""
        # Where the bucket stood, and when, if that is known.
        self._level: Optional[Tuple[Level, float]] = None
        # The most that the bucket gives at once, and until when that is believed.
        self._limit: Optional[Tuple[int, float]] = None
        self._pause = 0.0

    def measure(self, demanded: int, now: float) -> None:
        """So many tokens were demanded since the start."""
        self._meter.count(demanded, now)
        demanded = self._meter.demanded
        self.target = int(demanded * self._ahead)
        self.look_at = now + TICK if demanded else math.inf

    @property
    def low(self) -> int:
        """With fewer tokens than these, more are asked for."""
        return (self.target + 1) // 2

    def wanted(self, there: int, waiting: int) -> int:
        """The tokens to ask for, if so many are there, and so many are waited for."""
        is_low = there < self.low or there < waiting
        return max(self.target + waiting - there, 0) if is_low else 0

    def at_once(self, wanted: int, now: float) -> int:
        """How many of them to ask for now: what is there, and what comes soon. So a bucket that lends
        tokens does not lend more than that, and others get theirs."""
        most = float(wanted)
        if self._limit is not None and now < self._limit[1]:
            most = min(most, self._limit[0])
        if self._level is not None:
            (available, rate), at = self._level
            most = min(most, available + rate * (now - at + SOON))
        return max(int(most), 1)

    def granted(self, granted: Granted, now: float) -> None:
        """Tokens were granted, and are not there before their time."""
        self.coming = granted.tokens
        self._pause_until(now + granted.wait)
        self._level = None if granted.level is None else (granted.level, now)
        self._pause = 0.0

    def refused(self, tokens: int, refused: Refused, now: float) -> bool:
        """So many were refused. Returns whether it is known when there may be some."""
        reason, retry_after = refused.reason, refused.retry_after
        if reason in (Reason.LIMIT, Reason.BANNED) and retry_after is not None:
            # Where nobody says how fast tokens come: so many until the retry time. None are lent
            # there, so only those are asked for that have come by then.
            rate = tokens / retry_after if retry_after > 0 else math.inf
            known = refused.level or level(-rate * SOON, rate)
            self._level = None if known is None else (known, now)
            self._pause_until(now + min(retry_after, refused.debt + SOON, _LONGEST_PAUSE))
            return True
        is_too_much = reason in (Reason.LIMIT, Reason.TOO_MANY_TOKENS) and retry_after is None
        if is_too_much and tokens > 1:
            self._limit = (tokens // 2, now + _LIMIT_TIME)
            self._pause_until(now)
            return True
        self.failed(now)
        return False

    def failed(self, now: float) -> None:
        """There are no tokens, and nobody knows when there will be some."""
        self._pause = min(max(2 * self._pause, TICK), _LONGEST_PAUSE)
        self._pause_until(now + self._pause)

    def _pause_until(self, end: float) -> None:
        self.paused_until = self.look_at = end
