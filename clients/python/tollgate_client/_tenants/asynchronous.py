"""Holds of the asyncio client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, Union

from .._decide.effects import run_async
from .._keep.asynchronous import AsyncKeeping, Taking
from .._keep.desk import Desk
from .holding import Handle, Holds
from .session import Session

if TYPE_CHECKING:
    from .._nodes.asynchronous import AsyncNodes
    from ..fake import AsyncFake


class AsyncHolds(Holds[Union["AsyncNodes", "AsyncFake"]], AsyncKeeping[Desk[Session]]):
    """The holds of an asyncio client in one event loop."""

    most_calls = 32
    # Ends sessions.
    outlives_close = True


class Hold(Handle):
    """Copies of a resource that are held, and renewed by a task, as :class:`tollgate_client.Hold`
    is."""

    _holds: AsyncHolds

    async def lost(self, timeout: Optional[float] = None) -> bool:
        """Waits until the copies are not held any more, for ``timeout`` seconds at most; returns
        whether it is so. That is when they are lost, because the session has ended or no node has
        renewed it in time, when the client is closed, or after :meth:`release`."""
        self._holds.catch_up()
        plan = self._session.ended(timeout, self._holds.new_signal(), self._holds.clock)
        return await run_async(plan, self._holds.perform)


class Holding(Taking[Hold]):
    """The wait for a hold: to be awaited, or for ``async with``, which releases it at the end."""
