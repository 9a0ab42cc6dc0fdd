"""Smart buckets of the blocking client."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Optional, Type, Union

from .._decide.effects import run
from .._keep.blocking import BlockingKeeping
from .._keep.desk import Desk
from .handle import Handle, SmartBuckets
from .stock import Stock

if TYPE_CHECKING:
    from .._nodes.blocking import BlockingNodes
    from ..fake import BlockingFake


class BlockingSmartBuckets(
    SmartBuckets[Union["BlockingNodes", "BlockingFake"]], BlockingKeeping[Desk[Stock]]
):
    """The smart buckets of a blocking client."""


class SmartBucket(Handle):
    """Tokens of a bucket that are taken ahead of need, in the background. Made by
    :meth:`tollgate_client.Client.smart_bucket`. Threads may share it. As a context manager, it ends
    with the block.

    >>> reads = client.smart_bucket("db", "reads")
    >>> reads.acquire(max_wait=1.0)  # Now read from the database.
    """

    _smart: BlockingSmartBuckets

    def acquire(self, tokens: int = 1, *, max_wait: float) -> None:
        """Uses tokens, and waits for them up to ``max_wait`` seconds if they are not there. Those who
        came first are served first. A request for 0 tokens is one for 1.

        Raises ``RefusedError`` if they do not come within ``max_wait``, or never will;
        ``NoDecisionError`` if no node decides and no fallback is set; ``InvalidRequestError`` and
        ``ClosedError``. Nothing is used then.
        """
        self._smart.catch_up()
        run(self._stock.acquire(tokens, max_wait, threading.Event), self._smart.perform)

    def close(self) -> None:
        """Ends it: what was taken and not used is lost. Whoever waits, or uses it later, gets
        ``ClosedError``."""
        self._close()

    def __enter__(self) -> SmartBucket:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()
