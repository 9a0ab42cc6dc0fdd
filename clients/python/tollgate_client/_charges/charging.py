"""The charges of the blocking and the asyncio client."""

from __future__ import annotations

from functools import partial
from operator import index
from typing import TYPE_CHECKING, Union

from .._decide.effects import Plan
from .._keep import keeping
from .._keep.asynchronous import AsyncKeeping
from .._keep.blocking import BlockingKeeping
from .._keep.effects import Clock
from ..errors import InvalidRequestError
from .desk import Desk
from .keeper import Keeper

if TYPE_CHECKING:
    from .._nodes.asynchronous import AsyncNodes
    from .._nodes.blocking import BlockingNodes
    from ..fake import AsyncFake, BlockingFake


class Charges(keeping.Keeping[keeping.E, Desk]):
    """The charges of a client, without input and output."""

    kind = "charges"

    def __init__(self, engine: keeping.E) -> None:
        super().__init__(engine, partial(Desk, clock=engine.clock))

    def charge(self, namespace: str, bucket: str, tokens: int) -> None:
        """Adds a charge, and does not wait for it."""
        tokens = index(tokens)
        if tokens < 0:
            raise InvalidRequestError(f"invalid request: {tokens} tokens")
        if tokens and self.desk.charge(namespace, bucket, tokens):
            try:
                self._start()
            except BaseException:
                self.desk.keeper_has_ended()
                raise
        self.catch_up()

    def _plan(self, clock: Clock) -> Plan[None]:
        return Keeper(self.desk, self.engine.decider, clock).run()


class BlockingCharges(Charges[Union["BlockingNodes", "BlockingFake"]], BlockingKeeping[Desk]):
    """The charges of a blocking client."""


class AsyncCharges(Charges[Union["AsyncNodes", "AsyncFake"]], AsyncKeeping[Desk]):
    """The charges of an asyncio client in one event loop."""
