"""The leases of one client: what the blocking and the asyncio client have in common."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Generic, Optional, Protocol, TypeVar

from .. import _fork
from .desk import Desk
from .inline import Inline
from .keeper import Keeper, Lessor
from .resource import Clock, Mode, Resource, Usage

LONGEST_CLOSE = 5.0
"""Seconds that closing may take: a refresh and a release, without an answer."""


class Engine(Protocol):
    """What a client asks with: nodes, or a fake."""

    @property
    def lessor(self) -> Lessor:
        """Who leases."""

    @property
    def clock(self) -> Clock:
        """The time in seconds."""

    @property
    def has_fake_time(self) -> bool:
        """Whether time only moves when told to."""

    is_left_to_keeper: bool
    """Whether the keeper of leases stops it, after their release."""

    def pass_time(self, seconds: float) -> bool:
        """Lets fake time pass; returns whether real time has to."""

    def stop(self) -> None:
        """Closes the connections."""


E = TypeVar("E", bound=Engine)


def when_collected(
    one: object, work: Callable[..., object], *arguments: object
) -> weakref.finalize[..., Any]:
    """Has work done when an object is collected, at any moment; but not at the end of the process,
    when nobody waits for it."""
    finalizer = weakref.finalize(one, work, *arguments)
    # Not all versions of the type stubs know that it can be set.
    setattr(finalizer, "atexit", False)
    return finalizer


class Leases(Generic[E]):
    """The leases of a client, without input and output."""

    def __init__(self, engine: E, client_id: str) -> None:
        self.engine = engine
        self.clock = engine.clock
        self._client_id = client_id
        self.inline = Inline(engine.clock) if engine.has_fake_time else None
        self.desk = Desk(self._wake if self.inline is None else self.inline.wake)
        # The client was collected, and the engine ends with the keeper.
        self._is_ending = False
        _fork.remember(self)

    def lease(self, name: str, mode: Mode, wants: Optional[float], usage: Usage) -> Resource:
        """A new lease."""
        resource = Resource(name, mode, wants, usage, self.clock())
        if self.desk.add(resource):
            try:
                self._start()
            except BaseException:
                self.desk.keeper_has_ended()
                self.desk.remove(resource)
                raise
        return resource

    def catch_up(self) -> None:
        """Has the keeper of a fake do what it would have done by now."""
        if self.inline is not None:
            self.inline.catch_up()

    def client_has_ended(self) -> None:
        """The client was collected, and so were all handles: releases the leases in the background,
        and stops the engine afterwards. May be called at any moment."""
        if self.desk.is_kept and self.inline is None:
            self.engine.is_left_to_keeper = self._is_ending = True
            self.desk.close_soon()
            if not self.desk.is_kept:
                # The keeper has ended in between, perhaps before it could know.
                self.engine.abandon()

    def after_fork(self) -> None:
        self.desk.after_fork()
        self.inline = None

    def _start(self) -> None:
        if self.inline is not None:
            self.inline.start(self._new_keeper(self.inline.clock).run())
        else:
            self._start_keeper(self._new_keeper(self.clock))

    def _new_keeper(self, clock: Callable[[], float]) -> Keeper:
        return Keeper(self.desk, self.engine.lessor, self._client_id, clock)

    def _ended(self, is_regular: bool) -> None:
        """The keeper has ended."""
        if self.desk.is_closed or not is_regular:
            self.desk.keeper_has_ended()
        if self._is_ending:
            self.engine.stop()

    def _start_keeper(self, keeper: Keeper) -> None:
        raise NotImplementedError

    def _wake(self) -> None:
        raise NotImplementedError
