"""Where charges wait until the keeper takes them."""

from __future__ import annotations

import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

from .._decide.log import LOG, Throttle
from .._keep import desk
from .._keep.effects import Clock
from ..errors import ClosedError
from ..request import Request, message

MOST_BUCKETS = 10_000
"""The most buckets with charges at a time."""

LEAST_PAUSE = 0.5
"""The most seconds before a charge is tried again that was refused for the first time."""


class Charge:
    """What one bucket is charged."""

    __slots__ = ("namespace", "bucket", "tokens", "most", "due", "pause", "since")

    def __init__(self, namespace: str, bucket: str, tokens: int) -> None:
        self.namespace = namespace
        self.bucket = bucket
        self.tokens = tokens
        self.most: Optional[int] = None
        """The most that the bucket gives to one request, as far as is known."""
        self.due = 0.0
        """Not before then."""
        self.pause = LEAST_PAUSE
        """The next longest pause in seconds."""
        self.since: Optional[float] = None
        """Since when nothing could be taken; ``None`` if that was not tried."""


class Desk(desk.Desk[Any]):
    """The charges of one client that are not taken yet."""

    def __init__(self, wake: Callable[[], None], clock: Clock) -> None:
        super().__init__(wake)
        self._clock = clock
        self._open: Dict[Tuple[str, str], Charge] = {}
        # A signal handler may charge while its thread holds it.
        self._open_lock = threading.RLock()
        self._log = Throttle()

    @property
    def is_empty(self) -> bool:
        """Whether all is charged."""
        return not self._open

    def charge(self, namespace: str, bucket: str, tokens: int) -> bool:
        """Adds a charge. Returns whether a keeper has to be started."""
        name = (namespace, bucket)
        with self._open_lock:
            if self.is_closed:
                raise ClosedError("the client is closed")
            charge = self._open.get(name)
            if charge is not None:
                charge.tokens += tokens
                if self.is_kept:
                    return False
            elif len(self._open) < MOST_BUCKETS:
                # Whoever charges learns what is wrong with a name, as nobody else could.
                message(Request(namespace, bucket))
                self._open[name] = Charge(namespace, bucket, tokens)
            else:
                self.log_dropped(namespace, bucket, "there are charges of too many buckets")
                return False
            is_first, self.is_kept = not self.is_kept, True
            is_only = len(self._open) == 1
        if is_only:
            self.wake()
        return is_first

    def due(self, now: float) -> List[Charge]:
        """The charges that may be taken now; first those that have waited longest for their turn."""
        with self._open_lock:
            due = [charge for charge in self._open.values() if charge.due <= now]
        return sorted(due, key=lambda charge: charge.due)

    def settle(self, charge: Charge, tokens: int) -> None:
        """So many tokens are not open any more. Others may have been charged meanwhile."""
        with self._open_lock:
            charge.tokens -= tokens
            if charge.tokens <= 0:
                self._open.pop((charge.namespace, charge.bucket), None)

    def log_dropped(self, namespace: str, bucket: str, why: str) -> None:
        """Something will never be charged."""
        held_back = self._log.passes(self._clock())
        if held_back is not None:
            LOG.warning(
                "%s:%s can't be charged: %s (%d such messages held back)",
                namespace,
                bucket,
                why,
                held_back,
            )

    def after_fork(self) -> None:
        super().after_fork()
        self._open_lock = threading.RLock()
        self._open = {}
