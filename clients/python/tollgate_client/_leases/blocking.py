"""Leases of the blocking client."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Optional, Type, TypeVar, Union

from .._decide.effects import run
from .._keep.blocking import BlockingKeeping
from .desk import Desk
from .handle import CapacityHandle, GaugeHandle, Handle, Place, RateHandle
from .leasing import Leases

if TYPE_CHECKING:
    from .._nodes.blocking import BlockingNodes
    from ..fake import BlockingFake

H = TypeVar("H", bound="_Closing")


class BlockingLeases(Leases[Union["BlockingNodes", "BlockingFake"]], BlockingKeeping[Desk]):
    """The leases of a blocking client."""


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
