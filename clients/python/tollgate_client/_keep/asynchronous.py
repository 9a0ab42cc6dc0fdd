"""What an asyncio client keeps."""

from __future__ import annotations

import asyncio
from functools import partial
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Awaitable,
    Callable,
    Collection,
    Generator,
    Generic,
    Optional,
    Protocol,
    Set,
    Type,
    TypeVar,
    Union,
)

from .._decide.effects import Plan, run_async
from .effects import FOREVER, Await, Begin, Rest
from .keeping import LONGEST_CLOSE, D, Keeping

if TYPE_CHECKING:
    from .._nodes.asynchronous import AsyncNodes
    from ..fake import AsyncFake


class _Releasable(Protocol):
    def release(self) -> None:
        """Gives it back."""


R = TypeVar("R", bound=_Releasable)

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
        waiter = self._waiter
        if waiter is not None and not waiter.done() and not self._loop.is_closed():
            waiter.set_result(None)

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


class AsyncKeeping(Keeping[Union["AsyncNodes", "AsyncFake"], D]):
    """What an asyncio client keeps in one event loop, in a task."""

    outlives_close = False
    """Whether the keeper may go on after the client was closed."""

    def __init__(
        self, engine: Union[AsyncNodes, AsyncFake], new_desk: Callable[[Callable[[], None]], D]
    ) -> None:
        self.loop = engine.loop
        self._bell = _Signal(self.loop)
        self._task: Optional[asyncio.Task[None]] = None
        self._calls: Set[asyncio.Task[None]] = set()
        super().__init__(engine, new_desk)

    @property
    def is_gone(self) -> bool:  # type: ignore[override]
        """Whether the event loop has ended."""
        return self.loop.is_closed()

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
        if type(effect) is Begin:
            self._begin(effect)
            return None
        return await self.engine.perform(effect)

    @property
    def task(self) -> Optional[asyncio.Task[None]]:
        """The keeper, if it runs in the present event loop."""
        task = self._task
        is_here = self.loop is asyncio.get_running_loop()
        return task if task is not None and is_here and not task.done() else None

    def abandon(self) -> None:
        """The event loop has ended, and what was kept ends when nobody renews it."""
        self.desk.close()

    def _start_keeper(self, plan: Plan[None]) -> None:
        self._task = task = self.loop.create_task(self._keep(plan))
        task.add_done_callback(lambda _: self._has_ended(plan, False))

    async def _keep(self, plan: Plan[None]) -> None:
        is_regular = False
        try:
            await run_async(plan, self.perform)
            is_regular = True
        finally:
            if not self.loop.is_closed():
                for call in self._calls:
                    call.cancel()
            self._has_ended(plan, is_regular)

    def _has_ended(self, plan: Plan[None], is_regular: bool) -> None:
        """Also if its task was cancelled before it began."""
        if plan in self.engine.keepers:
            self._ended(plan, is_regular)

    def _begin(self, begin: Begin) -> None:
        """In a task of its own."""
        call = self.loop.create_task(run_async(begin.plan, self.perform))
        self._calls.add(call)
        call.add_done_callback(partial(self._called, begin))

    def _called(self, begin: Begin, call: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before it began."""
        self._calls.discard(call)
        begin.ended()

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


async def close_all(keepings: Collection[AsyncKeeping[Any]]) -> None:
    """Lets nothing be used any more, and waits for the release of all."""
    for keeping in keepings:
        keeping.shut()
    tasks = {keeping.task: keeping for keeping in keepings}
    waited = [task for task in tasks if task is not None]
    if waited:
        await asyncio.wait(waited, timeout=LONGEST_CLOSE)
        for task in waited:
            if not tasks[task].outlives_close:
                task.cancel()


class Taking(Generic[R]):
    """The wait for something: to be awaited, or for ``async with``, which releases it."""

    def __init__(self, take: Callable[[], Awaitable[R]]) -> None:
        self._take = take
        self._taken: Optional[R] = None

    def __await__(self) -> Generator[Any, None, R]:
        return self._take().__await__()

    async def __aenter__(self) -> R:
        self._taken = await self
        return self._taken

    async def __aexit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if self._taken is not None:
            self._taken.release()
