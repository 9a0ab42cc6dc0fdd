"""Client of tollgate, the quota service.

A service asks tollgate for tokens before it calls what it shares with others: a database, an API.
:meth:`Client.acquire` waits for them, :meth:`Client.allow` only asks. With the library in the way,
an application never waits longer than it said, and goes on when the quota service does not answer:
a :class:`Fallback` decides then.

    from tollgate_client import Client, Fallback

    client = Client("tollgate.internal:10990", fallback=Fallback.rate(10, burst=20))
    client.acquire("db", "reads", max_wait=1.0)
    # Now call the database.

:meth:`Client.hits` and :meth:`Client.hold` ask for what the limits leave to one user or tenant.

:meth:`Client.smart_bucket` takes tokens ahead of need, so that their use costs no call, and
:meth:`Client.charge` takes what a request has cost beyond its tokens.

A client that makes many calls leases a share of a resource's capacity instead, and limits itself:
:meth:`Client.rate_limiter`, :meth:`Client.gauge` and :meth:`Client.capacity`.

``tollgate_client.aio`` has the same client for asyncio. All times are seconds.
"""

from . import aio
from ._leases.blocking import Capacity, Gauge, RateLimiter
from ._leases.handle import Place
from ._leases.resource import Mode
from ._smart.blocking import SmartBucket
from ._tenants.blocking import Hold
from ._version import VERSION as __version__
from .answers import DecidedBy, Decision, Granted, Hits, Reason, Refused
from .client import Client
from .errors import (
    AlreadyLeasedError,
    ClosedError,
    InvalidRequestError,
    LeaseTimeoutError,
    NoAnswer,
    NoDecisionError,
    RefusedError,
    SettingsError,
    TollgateError,
)
from .fake import Fake, FakeAnswer, FakeTime
from .fallback import Fallback
from .request import Request, TenantRequest

__all__ = [
    "AlreadyLeasedError",
    "Capacity",
    "Client",
    "ClosedError",
    "DecidedBy",
    "Decision",
    "Fake",
    "FakeAnswer",
    "FakeTime",
    "Fallback",
    "Gauge",
    "Granted",
    "Hits",
    "Hold",
    "InvalidRequestError",
    "LeaseTimeoutError",
    "Mode",
    "NoAnswer",
    "NoDecisionError",
    "Place",
    "RateLimiter",
    "Reason",
    "Refused",
    "RefusedError",
    "Request",
    "SettingsError",
    "SmartBucket",
    "TenantRequest",
    "TollgateError",
    "__version__",
    "aio",
]
