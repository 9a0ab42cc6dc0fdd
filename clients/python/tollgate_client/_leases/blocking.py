"""Leases of the blocking client."""

from __future__ import annotations

import queue
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional, Type, TypeVar, Union

from .._decide.effects import run
from .handle import CapacityHandle, GaugeHandle, Handle, Place, RateHandle
from .keeper import Keeper, Rest
from .leasing import LONGEST_CLOSE, Leases
from .waiting import FOREVER, Await

if TYPE_CHECKING:
    from .._nodes.blocking import BlockingNodes
    from ..fake import BlockingFake

H = TypeVar("H", bound="_Closing")

_OTHER_THREADS = 0.001
"""Real seconds that a waiting caller of a fake leaves to other threads."""


class BlockingLeases(Leases[Union["BlockingNodes", "BlockingFake"]]):
    """The leases of a blocking client, which a thread keeps."""

    def __init__(self, engine: Union[BlockingNodes, BlockingFake], client_id: str) -> None:
        # Its put may be called at any moment, by finalizers, too.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: Optional[threading.Thread] = None
        super().__init__(engine, client_id)

    def perform(self, effect: Any) -> Any:
        """Performs an effect of the plans of handles and of the keeper."""
        if type(effect) is Await:
            if self.inline is not None:
                self._pass_time(effect)
            else:
                effect.signal.wait(effect.seconds)  # type: ignore[attr-defined]
            return None
        if type(effect) is Rest:
            self._rest(effect.seconds)
            return None
        return self.engine.perform(effect)

    def close(self) -> None:
        """Lets nothing be used any more, and waits for the release of all leases."""
        self.desk.close()
        self.catch_up()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(LONGEST_CLOSE)

    def _start_keeper(self, keeper: Keeper) -> None:
        self._thread = threading.Thread(
            target=self._keep, args=(keeper,), name="tollgate-client-leases", daemon=True
        )
        self._thread.start()

    def _keep(self, keeper: Keeper) -> None:
        is_regular = False
        try:
            run(keeper.run(), self.perform)
            is_regular = True
        finally:
            self._ended(is_regular)

    def _wake(self) -> None:
        self._bell.put(None)

    def _rest(self, seconds: float) -> None:
        try:
            self._bell.get(timeout=seconds)
            while True:
                self._bell.get_nowait()
        except queue.Empty:
            pass

    def _pass_time(self, pause: Await) -> None:
        """Lets fake time pass until what is waited for, or until the keeper has something to do."""
        assert self.inline is not None
        if not pause.is_first:
            time.sleep(_OTHER_THREADS)
            return
        self.engine.pass_time(min(pause.seconds, self.inline.pause))
        self.inline.catch_up()
        time.sleep(_OTHER_THREADS if pause.seconds == FOREVER else 0.0)


class _Closing(Handle):
    _leases: BlockingLeases

    def close(self) -> None:
        """Gives the lease back. Whoever waits, or uses it later, gets ``ClosedError``."""
        self._close()

    def __enter__(self: H) -> H:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()


class RateLimiter(RateHandle, _Closing):
    """Limits what this process does to its leased rate: the capacity is so much a second. Made by
    :meth:`tollgate_client.Client.rate_limiter`. Threads may share it. As a context manager, it
    gives the lease back at the end."""

    def wait(self, n: int = 1, timeout: Optional[float] = None) -> None:
        """Waits until ``n`` may be used, in the order of the calls. A tenth of a second's capacity
        can be used at once, and 1 in any case; after more than that, the next callers wait for the
        rest.

        Raises ``LeaseTimeoutError`` if that takes longer than ``timeout`` seconds, and
        ``ClosedError``. Nothing is used then.
        """
        self._leases.catch_up()
        run(self._rate.wait(n, timeout, threading.Event), self._leases.perform)


class Gauge(GaugeHandle, _Closing):
    """Limits how much this process does at once: a semaphore that grows and shrinks with the leased
    capacity, rounded down: a share below 1 lets nobody in. Made by
    :meth:`tollgate_client.Client.gauge`. Threads may share it. As a context manager, it gives the
    lease back at the end.

    >>> with gauge.acquire(timeout=1.0):
    ...     connection = connect()
    """

    def acquire(self, timeout: Optional[float] = None) -> Place:
        """Waits for a place, in the order of the calls. When the capacity shrinks, those who have a
        place keep it.

        Raises ``LeaseTimeoutError`` if that takes longer than ``timeout`` seconds, and
        ``ClosedError``.
        """
        self._leases.catch_up()
        run(self._places.acquire(timeout, threading.Event()), self._leases.perform)
        return Place(self, self._places)


class Capacity(CapacityHandle, _Closing):
    """A leased capacity that the application uses as it likes. Made by
    :meth:`tollgate_client.Client.capacity`. As a context manager, it gives the lease back at the
    end."""

    def changed(self, timeout: Optional[float] = None) -> float:
        """Waits until another capacity may be used than this returned last, and returns it. At
        first, waits for one other than what the mode allows before the first answer.

        Raises ``LeaseTimeoutError`` if that takes longer than ``timeout`` seconds, and
        ``ClosedError``.
        """
        self._leases.catch_up()
        return run(self._changes.changed(timeout, threading.Event()), self._leases.perform)
