"""Leases of the asyncio client."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Optional, Type, TypeVar, Union

from .._decide.effects import run_async
from .._keep.asynchronous import AsyncKeeping, Taking
from .desk import Desk
from .handle import CapacityHandle, GaugeHandle, Handle, Place, RateHandle
from .leasing import Leases

if TYPE_CHECKING:
    from .._nodes.asynchronous import AsyncNodes
    from ..fake import AsyncFake

H = TypeVar("H", bound="_Closing")


class AsyncLeases(Leases[Union["AsyncNodes", "AsyncFake"]], AsyncKeeping[Desk]):
    """The leases of an asyncio client in one event loop."""


class _Closing(Handle):
    _leases: AsyncLeases

    async def close(self) -> None:
        """Gives the lease back. Whoever waits, or uses it later, gets ``ClosedError``."""
        self._close()

    async def __aenter__(self: H) -> H:
        return self

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        await self.close()


class RateLimiter(RateHandle, _Closing):
    """Limits what this process does to its leased rate, as
    :class:`tollgate_client.RateLimiter` does."""

    async def wait(self, n: int = 1, timeout: Optional[float] = None) -> None:
        """Waits until ``n`` may be used, in the order of the calls. A tenth of a second's capacity
        can be used at once, and 1 in any case; after more than that, the next callers wait for the
        rest.

        Raises ``LeaseTimeoutError`` if that takes longer than ``timeout`` seconds, and
        ``ClosedError``. Nothing is used then, nor if the task is cancelled.
        """
        leases = self._leases
        leases.catch_up()
        await run_async(self._rate.wait(n, timeout, leases.new_signal), leases.perform)


class Gauge(GaugeHandle, _Closing):
    """Limits how much this process does at once, as :class:`tollgate_client.Gauge` does.

    >>> async with gauge.acquire(timeout=1.0):
    ...     connection = await connect()
    """

    def acquire(self, timeout: Optional[float] = None) -> Acquiring:
        """Waits for a place, in the order of the calls, with ``async with`` or ``await``. When the
        capacity shrinks, those who have a place keep it.

        Raises ``LeaseTimeoutError`` if that takes longer than ``timeout`` seconds, and
        ``ClosedError``.
        """
        return Acquiring(partial(self._acquire, timeout))

    async def _acquire(self, timeout: Optional[float]) -> Place:
        leases = self._leases
        leases.catch_up()
        await run_async(self._places.acquire(timeout, leases.new_signal()), leases.perform)
        return Place(self, self._places)


class Acquiring(Taking[Place]):
    """The wait for a place of a gauge: to be awaited, or for ``async with``."""


class Capacity(CapacityHandle, _Closing):
    """A leased capacity that the application uses as it likes, as
    :class:`tollgate_client.Capacity` is."""

    async def changed(self, timeout: Optional[float] = None) -> float:
        """Waits until another capacity may be used than this returned last, and returns it. At
        first, waits for one other than what the mode allows before the first answer.

        Raises ``LeaseTimeoutError`` if that takes longer than ``timeout`` seconds, and
        ``ClosedError``.
        """
        leases = self._leases
        leases.catch_up()
        plan = self._changes.changed(timeout, leases.new_signal())
        return await run_async(plan, leases.perform)
