"""What a keeper, and those who wait for what it keeps, need done."""

from __future__ import annotations

from typing import Callable, Protocol

from .._decide.effects import Plan

Clock = Callable[[], float]

FOREVER = 24 * 60 * 60.0
"""Longer than a timer needs to wait at once."""


class Signal(Protocol):
    """Wakes one caller."""

    def set(self) -> None:
        """Wakes the caller, now or when it waits next."""

    def clear(self) -> None:
        """Has the caller wait again."""


class Rest:
    """A pause until the keeper is woken, for some seconds at most."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Begin:
    """A plan that is performed in the background, while the keeper goes on."""

    __slots__ = ("plan", "ended")

    def __init__(self, plan: Plan[None], ended: Callable[[], None]) -> None:
        """``ended`` is called when the plan has ended, in whatever way, perhaps by another
        thread."""
        self.plan = plan
        self.ended = ended


class Await:
    """A pause until a signal is set, for some seconds at most."""

    __slots__ = ("signal", "seconds", "is_first")

    def __init__(self, signal: Signal, seconds: float, is_first: bool) -> None:
        self.signal = signal
        self.seconds = seconds
        self.is_first = is_first
