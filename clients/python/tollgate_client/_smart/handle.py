"""Smart buckets of the blocking and the asyncio client: what they have in common."""

from __future__ import annotations

import math
from typing import Any

from .._decide.effects import Plan
from .._keep import keeping
from .._keep.desk import Desk
from .._keep.effects import Clock
from ..errors import InvalidRequestError
from ..request import Request, message
from .keeper import Keeper
from .stock import Stock
from .supply import SOON, Supply


class SmartBuckets(keeping.Keeping[keeping.E, Desk[Stock]]):
    """The smart buckets of a client, without input and output."""

    kind = "smart-buckets"

    def __init__(self, engine: keeping.E) -> None:
        super().__init__(engine, Desk)

    def stock(self, namespace: str, bucket: str, ahead: float, critical: bool) -> Stock:
        """A new smart bucket."""
        # Neither holds for what is not a number.
        if not 0 <= ahead < math.inf:
            raise InvalidRequestError(f"invalid request: {ahead} seconds ahead")
        request = Request(namespace, bucket, max_wait=SOON, critical=critical)
        # Whoever opens it learns what is wrong with a name.
        message(request)
        stock = Stock(request, Supply(ahead, self.clock()), self.desk.wake, self.clock)
        self.add(stock)
        return stock

    def _plan(self, clock: Clock) -> Plan[None]:
        return Keeper(self.desk, self.engine.decider, clock).run()


class Handle:
    """A smart bucket. It ends when this is closed, or nothing refers to it any more."""

    def __init__(
        self,
        client: object,
        smart: SmartBuckets[Any],
        namespace: str,
        bucket: str,
        ahead: float,
        critical: bool,
    ) -> None:
        # Keeps the connections open.
        self._client = client
        self._smart = smart
        self._stock = stock = smart.stock(namespace, bucket, ahead, critical)
        self._finalizer = keeping.when_collected(self, smart.desk.drop, stock)

    def try_acquire(self, tokens: int = 1) -> bool:
        """Uses tokens if they are there, and nobody waits for them; returns whether they were. Costs
        no call to a node. A request for 0 tokens is one for 1."""
        if self._smart.inline is not None:
            self._smart.catch_up()
        return self._stock.try_acquire(tokens)

    def _close(self) -> None:
        self._finalizer.detach()
        self._smart.desk.remove(self._stock)
        self._smart.catch_up()

    def __repr__(self) -> str:
        namespace, bucket = self._stock.request[:2]
        return f"<{type(self).__qualname__} of {namespace}:{bucket}>"
