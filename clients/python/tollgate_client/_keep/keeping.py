"""What a client keeps in the background: what the blocking and the asyncio client have in common."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, Callable, Generic, Protocol, Set, TypeVar

from .. import _fork
from .._decide.effects import Plan
from .desk import Desk
from .effects import Clock, Signal
from .inline import Inline

if TYPE_CHECKING:
    from .._decide.decider import Decider

LONGEST_CLOSE = 5.0
"""Seconds that closing may take, without an answer."""


class Engine(Protocol):
    """What a client asks with: nodes, or a fake."""

    @property
    def clock(self) -> Clock:
        """The time in seconds."""

    @property
    def has_fake_time(self) -> bool:
        """Whether time only moves when told to."""

    @property
    def decider(self) -> Decider:
        """What decides requests for tokens."""

    @property
    def keepers(self) -> Set[object]:
        """The keepers that use it. When the client is collected, the last one stops it."""

    def keeper_has_ended(self, keeper: object) -> None:
        """A keeper uses it no more."""

    def pass_time(self, seconds: float) -> bool:
        """Lets fake time pass; returns whether real time has to."""


E = TypeVar("E", bound=Engine)
D = TypeVar("D", bound=Desk[Any])


def when_collected(
    one: object, work: Callable[..., object], *arguments: object
) -> weakref.finalize[..., Any]:
    """Has work done when an object is collected, at any moment; but not at the end of the process,
    when nobody waits for it."""
    finalizer = weakref.finalize(one, work, *arguments)
    # Not all versions of the type stubs know that it can be set.
    setattr(finalizer, "atexit", False)
    return finalizer


class Keeping(Generic[E, D]):
    """What a client keeps of one kind, without input and output."""

    kind: str
    """What it is, for the name of the keeper."""
    is_gone = False
    """Whether nobody can keep it any more."""
    longest_lag = math.inf
    """Seconds of a fake's time that its keeper makes up for at most."""

    def __init__(self, engine: E, new_desk: Callable[[Callable[[], None]], D]) -> None:
        self.engine = engine
        self.clock = engine.clock
        self.inline = Inline(engine.clock, self.longest_lag) if engine.has_fake_time else None
        self.desk = new_desk(self._wake if self.inline is None else self.inline.wake)
        _fork.remember(self)

    def add(self, one: Any) -> None:
        """Begins to keep something."""
        if self.desk.add(one):
            try:
                self._start()
            except BaseException:
                self.desk.keeper_has_ended()
                self.desk.remove(one)
                raise

    def new_signal(self) -> Signal:
        """What wakes a caller that waits."""
        raise NotImplementedError

    def catch_up(self) -> None:
        """Has the keeper of a fake do what it would have done by now."""
        if self.inline is not None:
            self.inline.catch_up()

    def shut(self) -> None:
        """Lets nothing be used any more, and has the keeper release all."""
        self.desk.close()
        self.catch_up()

    def client_has_ended(self) -> None:
        """The client was collected, and so were all handles: releases all in the background. May be
        called at any moment."""
        if self.desk.is_kept and self.inline is None:
            self.desk.close_soon()

    def after_fork(self) -> None:
        self.desk.after_fork()
        self.inline = None

    def _start(self) -> None:
        if self.inline is not None:
            self.inline.start(self._plan(self.inline.clock))
            return
        plan = self._plan(self.clock)
        self.engine.keepers.add(plan)
        try:
            self._start_keeper(plan)
        except BaseException:
            self.engine.keepers.discard(plan)
            raise

    def _ended(self, plan: Plan[None], is_regular: bool) -> None:
        """The keeper has ended."""
        if self.desk.is_closed or not is_regular:
            self.desk.keeper_has_ended()
        self.engine.keeper_has_ended(plan)

    def _plan(self, clock: Clock) -> Plan[None]:
        """What a new keeper does."""
        raise NotImplementedError

    def _start_keeper(self, plan: Plan[None]) -> None:
        raise NotImplementedError

    def _wake(self) -> None:
        raise NotImplementedError
