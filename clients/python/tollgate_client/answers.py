"""What is answered."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Optional, Union

from ._decide.level import Level


class DecidedBy(enum.Enum):
    """Who has decided. The values are those of the metrics' label ``decided_by``."""

    NODE = "node"
    """A node, by the shared state."""
    DEGRADED_NODE = "degraded_node"
    """A node that can't reach the shared state, by the namespace's failure policy."""
    REMEMBERED = "remembered"
    """The client, without a call: a node has refused as much a moment ago."""
    FALLBACK = "fallback"
    """The client's :class:`~tollgate_client.Fallback`, as no node has decided."""


class Reason(enum.Enum):
    """Why a request was refused."""

    LIMIT = "the limit is reached"
    """The bucket, or the fallback's rate, has not enough tokens within the accepted wait; or there
    is no room for so many hits or copies."""
    BANNED = "banned"
    """More was asked for than the bucket's ban allows."""
    TOO_MANY_TOKENS = "more tokens than the bucket gives to one request"
    """More tokens than the bucket gives to one request."""
    TOO_MANY_BUCKETS = "the namespace has too many buckets"
    """The namespace holds as many dynamic buckets as it may."""
    NO_BUCKET = "there is no such bucket"
    """The limits have no bucket of this name, and there is no fallback."""
    UNAVAILABLE = "the quota service can't decide"
    """The nodes can't decide, and refuse by their policy for that case, or
    ``Fallback.DENY`` does."""


@dataclass(frozen=True)
class Granted:
    """Granted tokens."""

    tokens: int
    """How many."""
    wait: float
    """Seconds to wait before the tokens are used. ``acquire`` has waited so long."""
    soft_limited: bool
    """Whether the bucket is past its soft limit: a warning that refusals may follow."""
    shadow: bool
    """Whether they were granted only because the limit is not enforced yet."""
    decided_by: DecidedBy
    """Who has decided."""
    level: Optional[Level] = field(default=None, compare=False, repr=False)
    """Where the bucket stands, if that is known."""

    is_granted: ClassVar[Literal[True]] = True
    """``True``, to tell it from :class:`Refused`."""


@dataclass(frozen=True)
class Refused:
    """A refusal. No tokens were taken."""

    reason: Reason
    """Why."""
    retry_after: Optional[float]
    """Seconds after which the same request could be granted, if nobody else asked meanwhile.
    ``None`` if it never could, or if nobody knows."""
    decided_by: DecidedBy
    """Who has decided."""
    debt: float = field(default=0.0, compare=False, repr=False)
    """Seconds that the bucket takes to pay its debt, which a request waits for at least."""
    level: Optional[Level] = field(default=None, compare=False, repr=False)
    """Where the bucket stands, if that is known."""

    is_granted: ClassVar[Literal[False]] = False
    """``False``, to tell it from :class:`Granted`."""


@dataclass(frozen=True)
class Hits:
    """Granted hits."""

    granted: int
    """How many."""
    tier: int
    """The number of the current tier; 1 is the first. 0 if there is none."""
    burst: bool
    """Whether this request has entered a tier."""
    shadow: bool
    """Whether they were granted only because the limits are not enforced yet."""
    decided_by: DecidedBy
    """Who has decided."""


Decision = Union[Granted, Refused]
"""The answer to a request."""
