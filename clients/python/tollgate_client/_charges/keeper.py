"""What takes charges from their buckets. A plan without input and output: a thread, a task or a fake
performs it."""

from __future__ import annotations

import math

from .._decide.decider import Decider
from .._decide.effects import Plan
from .._decide.metrics import METRICS
from .._keep.effects import FOREVER, Clock, Rest
from .._keep.keeping import LONGEST_CLOSE
from ..answers import Reason, Refused
from ..errors import InvalidRequestError, NoAnswer, NoDecisionError, TollgateError
from ..request import Request
from .desk import LEAST_PAUSE, Charge, Desk

TOGETHER = 0.1
"""Seconds in which charges are put together."""

_ANSWER_TIMEOUT = 2.0
"""Seconds that an answer may take."""

_LONGEST_PAUSE = 10.0
"""The most seconds before a charge that was refused is tried again: the pause doubles."""

_LONGEST_OPEN = 60.0
"""A bucket of which nothing could be taken for so many seconds is not charged: what it is charged is
of the past, and would refuse the present."""

_MOST_IN_TURN = 20
"""The most calls for one bucket in a row."""


class Keeper:
    """Takes the charges of one client."""

    def __init__(self, desk: Desk, decider: Decider, clock: Clock) -> None:
        self._desk = desk
        self._decider = decider
        self._clock = clock

    def run(self) -> Plan[None]:
        """Runs until the client is closed, and tries once more what is open then."""
        desk, round_at = self._desk, math.inf
        while not desk.is_closed:
            now = self._clock()
            round_at = math.inf if desk.is_empty else min(round_at, now + TOGETHER)
            if now < round_at:
                yield Rest(min(round_at - now, FOREVER))
                continue
            round_at = math.inf
            for charge in desk.due(now):
                # Without an answer, the others are not tried in this round.
                if desk.is_closed or not (yield from self._take(charge, math.inf)):
                    break
        end = self._clock() + LONGEST_CLOSE
        for charge in desk.due(math.inf):
            if self._clock() < end:
                yield from self._take(charge, end)

    def _take(self, charge: Charge, end: float) -> Plan[bool]:
        """Takes one charge, as far as that is possible now. Returns whether there was an answer."""
        total = left = charge.tokens
        is_answered, has_taken, pause = True, False, 0.0
        for _ in range(_MOST_IN_TURN):
            tokens = left if charge.most is None else min(left, charge.most)
            request = Request(charge.namespace, charge.bucket, tokens)
            deadline = min(self._clock() + _ANSWER_TIMEOUT, end)
            try:
                answer = yield from self._decider.charge(request, deadline)
            except InvalidRequestError as error:
                self._desk.log_dropped(charge.namespace, charge.bucket, str(error))
                left = 0
            except NoDecisionError as error:
                if error.reason in (NoAnswer.TIMEOUT, NoAnswer.FAILED):
                    # They may have been taken, and are not charged twice.
                    left -= tokens
                elif error.reason is NoAnswer.FORBIDDEN:
                    self._desk.log_dropped(charge.namespace, charge.bucket, str(error))
                    left = 0
                is_answered, pause = False, _LONGEST_PAUSE
            except TollgateError:
                is_answered, pause = False, _LONGEST_PAUSE
            else:
                if not isinstance(answer, Refused):
                    # Who is charged does not wait.
                    left, has_taken = max(left - answer.tokens, 0), True
                    if METRICS is not None:
                        METRICS.charged(answer.tokens)
                elif answer.retry_after is not None or answer.reason is Reason.UNAVAILABLE:
                    pause = answer.retry_after or _LONGEST_PAUSE
                elif answer.reason in (Reason.LIMIT, Reason.TOO_MANY_TOKENS) and tokens > 1:
                    charge.most = tokens // 2
                else:
                    self._desk.log_dropped(charge.namespace, charge.bucket, answer.reason.value)
                    left = 0
            if not left or pause:
                break
        self._desk.settle(charge, total - left)
        if self._put_off(charge, pause, has_taken) > _LONGEST_OPEN and left:
            why = "nothing could be taken for a minute"
            self._desk.log_dropped(charge.namespace, charge.bucket, why)
            self._desk.settle(charge, charge.tokens)
        return is_answered

    def _put_off(self, charge: Charge, pause: float, has_taken: bool) -> float:
        """Leaves a charge alone for a while. Returns for how long nothing could be taken."""
        now = self._clock()
        charge.due = now + min(pause, charge.pause)
        if has_taken:
            charge.since, charge.pause = now, LEAST_PAUSE
        else:
            charge.since = now if charge.since is None else charge.since
            charge.pause = min(charge.pause * 2, _LONGEST_PAUSE)
        return now - charge.since
