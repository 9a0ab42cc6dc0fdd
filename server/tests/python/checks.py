"""A client of a node that holds every answer against what must be true of all of them."""

import math
import time
from dataclasses import dataclass, field
from typing import List, Optional, Sequence, Tuple, Union

import doorman_pb2 as messages
import doorman_pb2_grpc as services
import grpc

PATIENCE_S = 20

# Of a capacity: how far an answer may be from what is expected.
PRECISION = 1e-6


@dataclass(frozen=True)
class Template:
    """What limits.yaml says of the resources that begin with one name."""

    capacity: float
    kind: int
    lease_length_s: int
    refresh_interval_s: int
    safe_capacity: Optional[float] = None


Answer = Union[messages.ResourceResponse, messages.ServerCapacityResourceResponse]

FAIR_SHARE = messages.Algorithm.FAIR_SHARE
PROPORTIONAL_SHARE = messages.Algorithm.PROPORTIONAL_SHARE
STATIC = messages.Algorithm.STATIC

# By what stands before the one "/" of a resource's name.
TEMPLATES = {
    "fair-120": Template(120, FAIR_SHARE, 300, 7),
    "fair-160": Template(160, FAIR_SHARE, 300, 7),
    "proportional-120": Template(120, PROPORTIONAL_SHARE, 200, 11),
    "proportional-90": Template(90, PROPORTIONAL_SHARE, 200, 11),
    "static-40": Template(40, STATIC, 100, 13, safe_capacity=7.5),
}


def template_of(resource: str) -> Optional[Template]:
    kind, _, name = resource.partition("/")
    matched = "/" in resource and "/" not in name
    return TEMPLATES.get(kind) if matched else None


@dataclass
class Checks:
    """Counts what was compared, and prints what was wrong."""

    compared: int = 0
    failures: int = 0

    def that(self, holds: bool, what: str, found: object, expected: object) -> None:
        self.compared += 1
        if not holds:
            self.failures += 1
            print(f"FAILED {what}: found {found!r}, expected {expected!r}", flush=True)

    def equal(self, what: str, found: object, expected: object) -> None:
        self.that(found == expected, what, found, expected)

    def close(self, what: str, found: float, expected: float, capacity: float) -> None:
        near = abs(found - expected) <= PRECISION * capacity
        self.that(near, what, found, expected)

    def within(self, what: str, found: float, low: float, high: float) -> None:
        self.that(low <= found <= high, what, found, f"{low} to {high}")


@dataclass(frozen=True)
class Want:
    """What one client asks of one resource."""

    resource: str
    wants: float
    has: Optional[messages.Lease] = None
    priority: int = 0


@dataclass(frozen=True)
class Bands:
    """What one cluster asks of one resource: (priority, clients, wants)."""

    resource: str
    bands: Sequence[Tuple[int, int, float]]
    has: Optional[messages.Lease] = None


@dataclass
class Node:
    """One node, as its clients see it."""

    address: str
    checks: Checks
    stub: services.CapacityStub = field(init=False)

    def __post_init__(self) -> None:
        # An environment's proxy is not for a node on this host.
        channel = grpc.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)])
        grpc.channel_ready_future(channel).result(timeout=PATIENCE_S)
        self.stub = services.CapacityStub(channel)

    def discovery(self) -> messages.DiscoveryResponse:
        return self.stub.Discovery(messages.DiscoveryRequest(), timeout=PATIENCE_S)

    def get(self, client: str, wants: Sequence[Want]) -> List[messages.ResourceResponse]:
        before = time.time()
        response = self.stub.GetCapacity(get_request(client, wants), timeout=PATIENCE_S)
        after = time.time()
        self.checks.equal("GetCapacity: mastership", response.HasField("mastership"), False)
        answers = list(response.response)
        self.check_order(answers, [want.resource for want in wants])
        for answer in answers:
            self.check_lease(answer.resource_id, answer, before, after)
        return answers

    def get_one(self, client: str, want: Want) -> messages.ResourceResponse:
        return self.get(client, [want])[0]

    def get_server(
        self, server: str, wants: Sequence[Bands]
    ) -> List[messages.ServerCapacityResourceResponse]:
        before = time.time()
        response = self.stub.GetServerCapacity(server_request(server, wants), timeout=PATIENCE_S)
        after = time.time()
        self.checks.equal("GetServerCapacity: mastership", response.HasField("mastership"), False)
        answers = list(response.response)
        self.check_order(answers, [want.resource for want in wants])
        for answer in answers:
            self.check_lease(answer.resource_id, answer, before, after)
            self.check_algorithm(answer)
        return answers

    def release(self, client: str, resources: Sequence[str]) -> None:
        request = messages.ReleaseCapacityRequest(client_id=client, resource_id=resources)
        response = self.stub.ReleaseCapacity(request, timeout=PATIENCE_S)
        self.checks.equal("ReleaseCapacity: mastership", response.HasField("mastership"), False)

    def check_order(self, answers: Sequence[Answer], expected: List[str]) -> None:
        found = [answer.resource_id for answer in answers]
        self.checks.equal("the resources of the answer", found, expected)

    def check_lease(self, what: str, answer: Answer, before: float, after: float) -> None:
        """Whatever was asked. With learning_mode_duration 0 a store never learns."""
        self.checks.equal(f"{what}: learning_until", answer.HasField("learning_until"), False)
        self.checks.equal(f"{what}: degraded", answer.degraded, False)
        capacity = answer.gets.capacity
        sane = math.isfinite(capacity) and capacity >= 0
        self.checks.that(sane, f"{what}: capacity", capacity, "finite, at least 0")
        template = template_of(answer.resource_id)
        if template is None:
            return
        expiry = answer.gets.expiry_time - template.lease_length_s
        self.checks.within(f"{what}: expiry_time - lease_length", expiry, before - 1, after + 1)
        refresh = answer.gets.refresh_interval
        self.checks.equal(f"{what}: refresh_interval", refresh, template.refresh_interval_s)
        self.checks.equal(f"{what}: has safe_capacity", answer.HasField("safe_capacity"), True)
        if template.safe_capacity is not None:
            found = answer.safe_capacity
            self.checks.equal(f"{what}: safe_capacity", found, template.safe_capacity)

    def check_algorithm(self, answer: messages.ServerCapacityResourceResponse) -> None:
        template = template_of(answer.resource_id)
        if template is None:
            return
        found = answer.algorithm
        self.checks.equal(
            f"{answer.resource_id}: algorithm",
            (found.kind, found.lease_length, found.refresh_interval, found.learning_mode_duration),
            (template.kind, template.lease_length_s, template.refresh_interval_s, 0),
        )


def get_request(client: str, wants: Sequence[Want]) -> messages.GetCapacityRequest:
    request = messages.GetCapacityRequest(client_id=client)
    for want in wants:
        request.resource.add(
            resource_id=want.resource, priority=want.priority, has=want.has, wants=want.wants
        )
    return request


def server_request(server: str, wants: Sequence[Bands]) -> messages.GetServerCapacityRequest:
    request = messages.GetServerCapacityRequest(server_id=server)
    for want in wants:
        resource = request.resource.add(resource_id=want.resource, has=want.has)
        for priority, clients, wanted in want.bands:
            resource.wants.add(priority=priority, num_clients=clients, wants=wanted)
    return request


def lease(capacity: float) -> messages.Lease:
    return messages.Lease(
        expiry_time=int(time.time()) + 60, refresh_interval=5, capacity=capacity
    )
