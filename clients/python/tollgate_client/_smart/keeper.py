"""What takes the tokens of smart buckets. A plan without input and output: a thread, a task or a fake
performs it."""

from __future__ import annotations

import math

from .._decide.decider import Decider
from .._decide.effects import Plan
from .._keep.desk import Desk
from .._keep.effects import FOREVER, Clock, Rest
from ..answers import Refused
from ..errors import RefusedError, TollgateError
from .stock import Stock


class Keeper:
    """Takes the tokens of the smart buckets of one client."""

    def __init__(self, desk: Desk[Stock], decider: Decider, clock: Clock) -> None:
        self._desk = desk
        self._decider = decider
        self._clock = clock

    def run(self) -> Plan[None]:
        """Runs until no smart bucket is left, or the client is closed."""
        while not self._desk.is_closed:
            live = self._desk.live(False)
            if live is None:
                return
            wake = math.inf
            for stock in live:
                wake = min(wake, (yield from self._attend(stock)))
            now = self._clock()
            if wake > now:
                yield Rest(min(wake - now, FOREVER))

    def _attend(self, stock: Stock) -> Plan[float]:
        """Does what there is to do for one. Returns when there is more."""
        supply, now = stock.supply, self._clock()
        if now < supply.paused_until:
            return supply.paused_until
        if supply.coming:
            stock.add(supply.coming)
            supply.coming = 0
        elif not stock.is_woken and now < supply.look_at:
            return supply.look_at
        wanted = stock.look(now)
        if not wanted:
            return supply.look_at
        yield from self._ask(stock, supply.at_once(wanted, now))
        return supply.paused_until

    def _ask(self, stock: Stock, tokens: int) -> Plan[None]:
        supply = stock.supply
        try:
            answer = yield from self._decider.decide(supply.request(stock.request, tokens))
        except TollgateError as error:
            supply.failed(self._clock())
            stock.fail(error)
        else:
            now = self._clock()
            if not isinstance(answer, Refused):
                supply.granted(answer, now)
            elif supply.refused(tokens, answer, now):
                stock.refuse(RefusedError(answer))
            else:
                stock.fail(RefusedError(answer))
