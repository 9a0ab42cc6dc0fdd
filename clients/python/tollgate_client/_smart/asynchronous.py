"""Smart buckets of the asyncio client."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Optional, Type, Union

from .._decide.effects import run_async
from .._keep.asynchronous import AsyncKeeping
from .._keep.desk import Desk
from .handle import Handle, SmartBuckets
from .stock import Stock

if TYPE_CHECKING:
    from .._nodes.asynchronous import AsyncNodes
    from ..fake import AsyncFake


class AsyncSmartBuckets(SmartBuckets[Union["AsyncNodes", "AsyncFake"]], AsyncKeeping[Desk[Stock]]):
    """The smart buckets of an asyncio client in one event loop."""


class SmartBucket(Handle):
    """Tokens of a bucket that are taken ahead of need, by a task, as
    :class:`tollgate_client.SmartBucket` does. To be used in the event loop in which it was made.

    >>> reads = client.smart_bucket("db", "reads")
    >>> await reads.acquire(max_wait=1.0)  # Now read from the database.
    """

    _smart: AsyncSmartBuckets

    async def acquire(self, tokens: int = 1, *, max_wait: float) -> None:
        """Uses tokens, and waits for them up to ``max_wait`` seconds if they are not there. The
        errors are those of :meth:`tollgate_client.SmartBucket.acquire`. If the task is cancelled,
        nothing is used."""
        smart = self._smart
        smart.catch_up()
        await run_async(self._stock.acquire(tokens, max_wait, smart.new_signal), smart.perform)

    async def close(self) -> None:
        """Ends it: what was taken and not used is lost. Whoever waits, or uses it later, gets
        ``ClosedError``."""
        self._close()

    async def __aenter__(self) -> SmartBucket:
        return self

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        await self.close()
