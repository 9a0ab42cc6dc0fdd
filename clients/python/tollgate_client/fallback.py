"""What decides when no node does."""

from __future__ import annotations

import math
import threading
from typing import ClassVar, Mapping, Optional, Tuple

from . import _fork
from .answers import DecidedBy, Decision, Granted, Reason, Refused


class Fallback:
    """What decides when no node does: there is no answer in time, no node can be reached, a node
    answers with an error, the nodes can't reach the shared state and their policy is to refuse, or
    the limits have no bucket of the name. Of hits and holds, it grants the fewest copies that were
    asked for, or none.

    Use ``Fallback.ALLOW``, ``Fallback.DENY``, or :meth:`Fallback.rate`.
    """

    ALLOW: ClassVar[Fallback]
    """Grants everything."""
    DENY: ClassVar[Fallback]
    """Refuses everything, with ``Reason.UNAVAILABLE``."""

    @staticmethod
    def rate(per_second: float, burst: int) -> Fallback:
        """Grants ``per_second`` tokens a second, and up to ``burst`` at once. All buckets that the
        fallback is set for share the rate.

        Each process has a rate of its own: with ten processes, a tenth of what the resource bears
        is the right size.

        Raises ``ValueError`` if a number is negative, or ``per_second`` not a number.
        """
        return _Rate(LocalRate(per_second, burst))

    def decide(self, tokens: int, now: float) -> Decision:
        """Decides without a node."""
        raise NotImplementedError


class LocalRate:
    """A token bucket in this process. It is full at first."""

    def __init__(self, per_second: float, burst: int) -> None:
        if not per_second >= 0 or not burst >= 0:
            raise ValueError(f"a rate of {per_second} tokens a second, {burst} at once")
        self._per_second = per_second
        self._burst = burst
        self._tokens = float(burst)
        self._counted_at: Optional[float] = None
        self._lock = threading.Lock()
        _fork.remember(self)

    def take(self, tokens: int, now: float) -> Optional[float]:
        """Takes tokens and returns 0; or the seconds after which there are enough, ``None`` for
        never."""
        if tokens > self._burst:
            return None
        with self._lock:
            before = now if self._counted_at is None else self._counted_at
            # Others may have come first with a later time.
            now = max(now, before)
            there = min(self._tokens + (now - before) * self._per_second, float(self._burst))
            if there < tokens:
                pause = (tokens - there) / self._per_second if self._per_second else math.inf
                return pause if math.isfinite(pause) else None
            self._tokens, self._counted_at = there - tokens, now
            return 0.0

    def after_fork(self) -> None:
        self._lock = threading.Lock()


class _Allow(Fallback):
    def decide(self, tokens: int, now: float) -> Decision:
        return Granted(tokens, 0.0, False, False, DecidedBy.FALLBACK)

    def __repr__(self) -> str:
        return "Fallback.ALLOW"


class _Deny(Fallback):
    def decide(self, tokens: int, now: float) -> Decision:
        return Refused(Reason.UNAVAILABLE, None, DecidedBy.FALLBACK)

    def __repr__(self) -> str:
        return "Fallback.DENY"


class _Rate(Fallback):
    def __init__(self, rate: LocalRate) -> None:
        self._rate = rate

    def decide(self, tokens: int, now: float) -> Decision:
        retry_after = self._rate.take(tokens, now)
        if retry_after == 0.0:
            return Granted(tokens, 0.0, False, False, DecidedBy.FALLBACK)
        return Refused(Reason.LIMIT, retry_after, DecidedBy.FALLBACK)


Fallback.ALLOW = _Allow()
Fallback.DENY = _Deny()


class Fallbacks:
    """The fallbacks of a client: the most specific one counts."""

    def __init__(
        self,
        everything: Optional[Fallback],
        namespaces: Mapping[str, Fallback],
        buckets: Mapping[Tuple[str, str], Fallback],
        resources: Mapping[str, Fallback] = {},
    ) -> None:
        self._everything = everything
        self._namespaces = dict(namespaces)
        self._buckets = dict(buckets)
        self._resources = dict(resources)

    def get(self, namespace: str, bucket: str) -> Optional[Fallback]:
        """The fallback of a bucket, if it has one."""
        of_bucket = self._buckets.get((namespace, bucket))
        return of_bucket or self._namespaces.get(namespace, self._everything)

    def of_resource(self, resource: str) -> Optional[Fallback]:
        """The fallback of a resource of tenants, if it has one."""
        return self._resources.get(resource, self._everything)
