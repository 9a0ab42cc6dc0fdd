"""Leases of the asyncio client."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Awaitable,
    Callable,
    Generator,
    Optional,
    Type,
    TypeVar,
    Union,
)

from .._decide.effects import run_async
from .handle import CapacityHandle, GaugeHandle, Handle, Place, RateHandle
from .keeper import Keeper, Rest
from .leasing import LONGEST_CLOSE, Leases
from .waiting import FOREVER, Await

if TYPE_CHECKING:
    from .._nodes.asynchronous import AsyncNodes
    from ..fake import AsyncFake

H = TypeVar("H", bound="_Closing")

_OTHER_TASKS = 0.001
"""Real seconds that a waiting caller of a fake leaves to other tasks."""


class _Signal:
    """Wakes one task of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_set = False
        self._waiter: Optional[asyncio.Future[None]] = None

    def set(self) -> None:
        """Wakes the task, now or when it waits next."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        """Has the task wait again."""
        self._is_set = False

    async def wait(self, seconds: float) -> None:
        """Waits until it is set, for so long at most."""
        if self._is_set:
            return
        self._waiter = waiter = self._loop.create_future()
        timer = self._loop.call_later(seconds, self.set)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None


class AsyncLeases(Leases[Union["AsyncNodes", "AsyncFake"]]):
    """The leases of an asyncio client in one event loop, whose task keeps them."""

    def __init__(self, engine: Union[AsyncNodes, AsyncFake], client_id: str) -> None:
        self.loop = engine.loop
        self._bell = _Signal(self.loop)
        self._task: Optional[asyncio.Task[None]] = None
        super().__init__(engine, client_id)

    def new_signal(self) -> _Signal:
        """What wakes a task that waits."""
        return _Signal(self.loop)

    async def perform(self, effect: Any) -> Any:
        """Performs an effect of the plans of handles and of the keeper."""
        if type(effect) is Await:
            if self.inline is not None:
                await self._pass_time(effect)
            else:
                await effect.signal.wait(effect.seconds)  # type: ignore[attr-defined]
            return None
        if type(effect) is Rest:
            await self._bell.wait(effect.seconds)
            self._bell.clear()
            return None
        return await self.engine.perform(effect)

    async def close(self) -> None:
        """Lets nothing be used any more, and waits for the release of all leases."""
        self.desk.close()
        self.catch_up()
        task = self._task
        if task is not None and not task.done() and self.loop is asyncio.get_running_loop():
            await asyncio.wait([task], timeout=LONGEST_CLOSE)
            task.cancel()

    def abandon(self) -> None:
        """The event loop has ended, and its leases end when they expire."""
        self.desk.close()

    def _start_keeper(self, keeper: Keeper) -> None:
        self._task = self.loop.create_task(self._keep(keeper))

    async def _keep(self, keeper: Keeper) -> None:
        is_regular = False
        try:
            await run_async(keeper.run(), self.perform)
            is_regular = True
        finally:
            self._ended(is_regular)

    def _wake(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self._bell.set)
        except RuntimeError:  # The loop is closed: nobody waits.
            pass

    async def _pass_time(self, pause: Await) -> None:
        """Lets fake time pass until what is waited for, or until the keeper has something to do."""
        assert self.inline is not None
        if not pause.is_first:
            await asyncio.sleep(_OTHER_TASKS)
            return
        self.engine.pass_time(min(pause.seconds, self.inline.pause))
        self.inline.catch_up()
        await asyncio.sleep(_OTHER_TASKS if pause.seconds == FOREVER else 0.0)


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
        return Acquiring(self._acquire, timeout)

    async def _acquire(self, timeout: Optional[float]) -> Place:
        leases = self._leases
        leases.catch_up()
        await run_async(self._places.acquire(timeout, leases.new_signal()), leases.perform)
        return Place(self, self._places)


class Acquiring:
    """The wait for a place of a gauge: to be awaited, or for ``async with``."""

    def __init__(
        self, acquire: Callable[[Optional[float]], Awaitable[Place]], timeout: Optional[float]
    ) -> None:
        self._acquire = acquire
        self._timeout = timeout
        self._place: Optional[Place] = None

    def __await__(self) -> Generator[Any, None, Place]:
        return self._acquire(self._timeout).__await__()

    async def __aenter__(self) -> Place:
        self._place = await self
        return self._place

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if self._place is not None:
            self._place.release()


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
