"""A tollgate in memory, for unit tests of what uses a client."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Dict, List, Optional, Set, Tuple

from ._decide.decider import Decider, Rules
from ._decide.effects import Effect, Plan, Sleep
from ._proto.doorman_pb2 import (
    GetCapacityRequest,
    GetCapacityResponse,
    Lease,
    ReleaseCapacityRequest,
    ReleaseCapacityResponse,
    ResourceResponse,
)
from ._proto.quotaservice_pb2 import AllowRequest, AllowResponse
from ._tenants.decider import TenantDecider
from ._tenants.fake import Answer, FakeTenants
from .errors import NoAnswer, NoDecisionError
from .fallback import LocalRate

if TYPE_CHECKING:
    from .aio import Client as AioClient
    from .client import Client


class FakeTime:
    """A clock for a :class:`Fake` that only moves when told to: waits take no time."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds that have passed."""

    def advance(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds


class FakeAnswer:
    """How a :class:`Fake` answers: ``FakeAnswer.GRANT``, ``FakeAnswer.grant_after(0.5)`` and so
    on."""

    GRANT: ClassVar[FakeAnswer]
    """Grants the tokens."""
    NO_BUCKET: ClassVar[FakeAnswer]
    """There is no such bucket."""
    INVALID: ClassVar[FakeAnswer]
    """The request is invalid."""
    NO_NODE: ClassVar[FakeAnswer]
    """No node answers: what happens next is up to the client's fallback."""

    def __init__(self, answer: Callable[[AllowRequest, float], AllowResponse]) -> None:
        self._answer = answer

    @staticmethod
    def grant_after(wait: float) -> FakeAnswer:
        """Grants the tokens after a wait of so many seconds, if the request accepts it."""

        def answer(request: AllowRequest, now: float) -> AllowResponse:
            early = wait
            if request.max_wait_time_override:
                early -= request.max_wait_millis_override / 1000
                if early > 0:
                    return _refused(early)
            return _granted(request, wait)

        return FakeAnswer(answer)

    @staticmethod
    def refuse(retry_after: Optional[float] = None) -> FakeAnswer:
        """Refuses the request, and says after how many seconds to try again."""
        return FakeAnswer(lambda request, now: _refused(retry_after))

    @staticmethod
    def rate(per_second: float, burst: int) -> FakeAnswer:
        """Grants ``per_second`` tokens a second, and up to ``burst`` at once."""
        rate = LocalRate(per_second, burst)

        def answer(request: AllowRequest, now: float) -> AllowResponse:
            retry_after = rate.take(request.tokens_requested, now)
            return _granted(request, 0.0) if retry_after == 0.0 else _refused(retry_after)

        return FakeAnswer(answer)


def _granted(request: AllowRequest, wait: float) -> AllowResponse:
    return AllowResponse(tokens_granted=request.tokens_requested, wait_millis=_millis(wait))


def _refused(retry_after: Optional[float]) -> AllowResponse:
    # None would mean that there never will be enough.
    millis = max(_millis(retry_after), 1) if retry_after else 0
    return AllowResponse(status=AllowResponse.REJECTED_TIMEOUT, retry_after_millis=millis)


def _millis(seconds: float) -> int:
    """Whole milliseconds, rounded up: a wait is never shorter than it must be."""
    return math.ceil(round(seconds * 1000, 6))


def _no_node(request: AllowRequest, now: float) -> AllowResponse:
    raise NoDecisionError(NoAnswer.UNREACHABLE)


FakeAnswer.GRANT = FakeAnswer(lambda request, now: _granted(request, 0.0))
FakeAnswer.NO_BUCKET = FakeAnswer(
    lambda request, now: AllowResponse(status=AllowResponse.REJECTED_NO_BUCKET)
)
FakeAnswer.INVALID = FakeAnswer(
    lambda request, now: AllowResponse(status=AllowResponse.REJECTED_INVALID_REQUEST)
)
FakeAnswer.NO_NODE = FakeAnswer(_no_node)


_NEVER = 2**63 - 1
"""An expiry."""


class Fake:
    """Answers requests in place of nodes, so that unit tests need none. Threads may share it.

    >>> fake = Fake()
    >>> fake.answer("db", "reads", FakeAnswer.refuse(2.0))
    >>> fake.client().allow("db", "reads", 3).retry_after
    2.0
    >>> fake.asked("db", "reads")
    [3]
    """

    remembers = False

    def __init__(
        self, answer: FakeAnswer = FakeAnswer.GRANT, *, fake_time: Optional[FakeTime] = None
    ) -> None:
        """Answers all requests in the same way, until told otherwise.

        fake_time: what the waits and rates go by instead of real time.
        """
        self._default = answer
        self._answers: Dict[Tuple[str, str], FakeAnswer] = {}
        self._asked: List[Tuple[str, str, int]] = []
        self._capacities: Dict[str, float] = {}
        self._time = fake_time
        self._lock = threading.Lock()
        self._tenant_answers: Dict[Tuple[str, str], FakeAnswer] = {}
        self.tenants = FakeTenants(self._tenant_answer, _no_node, self.now)
        """What answers about hits and holds."""

    def answer(self, namespace: str, bucket: str, answer: FakeAnswer) -> None:
        """Sets the answer for one bucket."""
        with self._lock:
            self._answers[namespace, bucket] = answer

    def asked(self, namespace: str, bucket: str) -> List[int]:
        """The numbers of tokens that a bucket was asked for, in order. Requests that the client
        answered by itself are not among them."""
        with self._lock:
            return [tokens for *name, tokens in self._asked if name == [namespace, bucket]]

    def capacity(self, resource: str, capacity: float) -> None:
        """Sets the capacity of a resource, all of which a client gets if it wants it. Without this,
        clients get all that they want."""
        with self._lock:
            self._capacities[resource] = capacity

    def answer_tenant(self, resource: str, domain: str, answer: FakeAnswer) -> None:
        """Sets the answer to requests of a domain for hits and holds on a resource. A rate gives the
        copies, or else the fewest that are asked for; what would be granted after a wait is refused
        until then, and ``FakeAnswer.NO_BUCKET`` means that the limits do not have the resource."""
        with self._lock:
            self._tenant_answers[resource, domain] = answer

    def copies(self, resource: str, limit: int) -> None:
        """Lets no more than so many copies of a resource be held at once."""
        self.tenants.limit(resource, limit)

    def held(self, resource: str) -> int:
        """The copies of a resource that are held now."""
        return self.tenants.held(resource)

    def lose(self, resource: str) -> None:
        """Ends all sessions on a resource. Clients notice it when they renew their holds."""
        self.tenants.lose(resource)

    def client(self, **settings: Any) -> Client:
        """A blocking client of this fake, with settings as in production, such as ``fallback``."""
        from .client import Client

        return Client(self, **settings)

    def aio_client(self, **settings: Any) -> AioClient:
        """An asyncio client of this fake, with settings as in production, such as ``fallback``."""
        from .aio import Client

        return Client(self, **settings)

    def now(self) -> float:
        """The time of the fake in seconds."""
        return time.monotonic() if self._time is None else self._time.now

    def ask(self, message: AllowRequest, deadline: float) -> Plan[AllowResponse]:
        """Answers a client."""
        name = (message.namespace, message.bucket_name)
        with self._lock:
            self._asked.append((*name, message.tokens_requested))
            answer = self._answers.get(name, self._default)
        return answer._answer(message, self.now())
        yield  # A plan without effects.

    def get_capacity(
        self, message: GetCapacityRequest, deadline: float
    ) -> Plan[GetCapacityResponse]:
        """Leases to a client."""
        if self._default is FakeAnswer.NO_NODE:
            raise NoDecisionError(NoAnswer.UNREACHABLE)
        answer = GetCapacityResponse()
        with self._lock:
            for asked in message.resource:
                capacity = min(self._capacities.get(asked.resource_id, math.inf), asked.wants)
                gets = Lease(expiry_time=_NEVER, refresh_interval=1, capacity=capacity)
                answer.response.append(ResourceResponse(resource_id=asked.resource_id, gets=gets))
        return answer
        yield  # A plan without effects.

    def release_capacity(
        self, message: ReleaseCapacityRequest, deadline: float
    ) -> Plan[ReleaseCapacityResponse]:
        """Takes leases back."""
        return ReleaseCapacityResponse()
        yield  # A plan without effects.

    def _tenant_answer(self, resource: str, domain: str) -> Answer:
        with self._lock:
            return self._tenant_answers.get((resource, domain), self._default)._answer

    @property
    def has_fake_time(self) -> bool:
        """Whether time only moves when told to."""
        return self._time is not None

    def pass_time(self, seconds: float) -> bool:
        """Lets fake time pass; returns whether real time has to."""
        if self._time is None:
            return True
        self._time.advance(seconds)
        return False


class _FakeEngine:
    """A fake as a client uses it."""

    def __init__(self, rules: Rules, fake: Fake) -> None:
        self._fake = fake
        self.keepers: Set[object] = set()
        self.lessor = fake
        self.clock = fake.now
        self.has_fake_time = fake.has_fake_time
        self.pass_time = fake.pass_time
        self.decider = Decider(rules, fake, fake.now)
        self.tenants = TenantDecider(rules, fake.tenants, fake.now)

    def keeper_has_ended(self, keeper: object) -> None:
        """A keeper uses it no more."""
        self.keepers.discard(keeper)

    def stop(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""

    def abandon(self) -> None:
        """Does nothing."""


class BlockingFake(_FakeEngine):
    """A fake as a blocking client uses it."""

    def perform(self, effect: Effect) -> None:
        """Performs an effect of the decider's plans."""
        assert isinstance(effect, Sleep)
        if self._fake.pass_time(effect.seconds):
            time.sleep(effect.seconds)


class AsyncFake(_FakeEngine):
    """A fake as an asyncio client uses it."""

    def __init__(self, rules: Rules, fake: Fake) -> None:
        self.loop = asyncio.get_running_loop()
        super().__init__(rules, fake)

    async def perform(self, effect: Effect) -> None:
        """Performs an effect of the decider's plans."""
        assert isinstance(effect, Sleep)
        await asyncio.sleep(effect.seconds if self._fake.pass_time(effect.seconds) else 0.0)
