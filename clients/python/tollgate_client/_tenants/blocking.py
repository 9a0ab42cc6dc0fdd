"""Holds of the blocking client."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Optional, Type, Union

from .._decide.effects import run
from .._keep.blocking import BlockingKeeping
from .._keep.desk import Desk
from .holding import Handle, Holds
from .session import Session

if TYPE_CHECKING:
    from .._nodes.blocking import BlockingNodes
    from ..fake import BlockingFake


class BlockingHolds(Holds[Union["BlockingNodes", "BlockingFake"]], BlockingKeeping[Desk[Session]]):
    """The holds of a blocking client."""

    # Each has a thread.
    most_calls = 8


class Hold(Handle):
    """Copies of a resource that are held, and renewed in the background. Made by
    :meth:`tollgate_client.Client.hold`. As a context manager, it releases them at the end. Threads
    may share it."""

    _holds: BlockingHolds

    def lost(self, timeout: Optional[float] = None) -> bool:
        """Waits until the copies are not held any more, for ``timeout`` seconds at most; returns
        whether it is so. That is when they are lost, because the session has ended or no node has
        renewed it in time, when the client is closed, or after :meth:`release`."""
        self._holds.catch_up()
        plan = self._session.ended(timeout, self._holds.new_signal(), self._holds.clock)
        return run(plan, self._holds.perform)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.release()
