"""What a smart bucket asks for, and when. Pure."""

from __future__ import annotations

import math
from typing import Optional, Tuple

from .._decide.level import Level, level
from ..answers import Granted, Reason, Refused
from ..request import Request
from .meter import Meter

TICK = 0.1
"""How often, in seconds, demand is measured, and what is too much thrown away."""

SOON = 0.1
"""Seconds that tokens which are asked for may take to come. While demand is greater than the bucket's
rate, this is how much is asked for at a time."""

_STEP = 0.02
"""The least pause in seconds after a refusal that says where the bucket stands, unless half of the
bucket is there before: else a request for the one token that comes next would follow the other."""

_PAUSES = 0.5, 10.0
"""The bounds of the pause in seconds after requests without tokens: it doubles."""

_LIMIT_TIME = 60.0
"""Seconds that the bucket is taken to refuse more tokens at once than it has refused."""


class Supply:
    """The supply of one smart bucket."""

    def __init__(self, ahead: float, now: float) -> None:
        """ahead: seconds of use that are taken ahead at most."""
        self._ahead = ahead
        self._meter = Meter(now)
        self._refused = Meter(now)
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
        # The tokens that are there for the next request, if a refusal has said so.
        self._part: Optional[int] = None
        # When some came last.
        self._added_at = -math.inf
        # Whether the bucket lends tokens: has them used before they have come.
        self._lends = False
        # Whether others keep the bucket in debt, so that its tokens are not to be had soon.
        self._is_contested = False
        # The longest pause after a request without tokens.
        self._pause = _PAUSES[0]

    def measure(self, used: int, refused: int, now: float) -> None:
        """So many tokens were used since the start, and so many more refused."""
        self._meter.count(used + refused, now)
        self._refused.count(refused, now)
        demanded = self._meter.demanded
        # A single use, or a burst, says nothing about the next second; but who was refused may come
        # again.
        expected = demanded if self._meter.is_steady else self._refused.demanded
        self.target = int(expected * self._ahead)
        self.look_at = now + TICK if demanded else math.inf

    def is_fresh(self, now: float) -> bool:
        """Whether the tokens came a moment ago: those who wait for them could not use them all yet."""
        return now - self._added_at < self._ahead

    def look_again(self, now: float) -> None:
        """There are tokens that may be too many later."""
        self.look_at = min(self.look_at, now + TICK)

    @property
    def low(self) -> int:
        """With fewer tokens than these, more are asked for."""
        return (self.target + 1) // 2

    def wanted(self, there: int, waiting: int) -> int:
        """The tokens to ask for, if so many are there, and so many are waited for."""
        is_low = there < self.low or there < waiting
        return max(self.target + waiting - there, 0) if is_low else 0

    def at_once(self, wanted: int, now: float) -> int:
        """How many of them to ask for now: what is there; and what comes soon, of a bucket that
        lends."""
        if self._part is not None:
            part, self._part = self._part, None
            return max(min(wanted, part), 1)
        most = float(wanted)
        if self._limit is not None and now < self._limit[1]:
            most = min(most, self._limit[0])
        if self._level is not None:
            (available, rate, size), at = self._level
            there, soon = min(available + rate * (now - at), size), rate * SOON
            if self._is_contested:
                most = min(most, soon)
            else:
                most = min(most, there + soon if self._lends else there)
        return max(int(most), 1)

    def request(self, request: Request, tokens: int) -> Request:
        """The request for so many. Where others wait for longer, too, nothing comes soon."""
        return request._replace(tokens=tokens, max_wait=None if self._is_contested else SOON)

    def granted(self, granted: Granted, now: float) -> None:
        """Tokens were granted, and are not there before their time."""
        self.coming = granted.tokens
        self._added_at = now + granted.wait
        self._pause_until(self._added_at)
        self._level = None if granted.level is None else (granted.level, now)
        self._lends = self._lends or (granted.level is not None and granted.level.available < 0)
        self._is_contested = self._is_contested and granted.wait > SOON
        self._pause = _PAUSES[0]

    def refused(self, tokens: int, refused: Refused, now: float) -> bool:
        """So many were refused. Returns whether it is known when there may be some."""
        reason, retry_after = refused.reason, refused.retry_after
        if reason in (Reason.LIMIT, Reason.BANNED) and retry_after is not None:
            self._is_contested = refused.debt > SOON
            if not self._is_contested:
                # It would have lent them.
                self._lends = False
            stands = refused.level
            there = 0 if stands is None else int(stands.available)
            if stands is not None and not self._is_contested and 0 < there < tokens:
                # A window does not refill before it ends: what is left of it is to be had now.
                self._part, self._level = there, (stands, now)
                self._pause_until(now)
                return True
            # Where nobody says how fast tokens come: so many until the retry time.
            rate = tokens / retry_after if retry_after > 0 else math.inf
            known = refused.level or level(0.0, rate, math.inf)
            is_part = known is not None and tokens > max(known.rate * SOON, 1)
            if known is not None:
                # Less is there than it seems: others have come, or the rest is kept in reserve.
                available = min(known.available, tokens // 2)
                self._level = known._replace(available=available), now
            # A part of them comes before the others; one has no part.
            pause = min(retry_after, refused.debt + SOON) if is_part else retry_after
            if stands is not None:
                pause = max(pause, min(stands.until_half_full, _STEP))
            if pause > self._pause:
                pause, self._pause = self._pause, min(2 * self._pause, _PAUSES[1])
            self._pause_until(now + pause)
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
        self._pause_until(now + _PAUSES[0])

    def _pause_until(self, end: float) -> None:
        self.paused_until = self.look_at = end
