"""Every metric of the library. They are counted if ``prometheus_client`` is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Optional, Set, Tuple

from ..answers import Decision, Reason
from ..errors import InvalidRequestError, NoAnswer, TollgateError
from .log import LOG

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

_MOST_NAMESPACES = 1000
"""The most that have figures of their own."""


class Metrics:
    """What is counted with Prometheus."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._requests = Counter(
            "tollgate_client_requests_total",
            "Requests.",
            ("namespace", "outcome", "decided_by"),
        )
        self._tenant_requests = Counter(
            "tollgate_client_tenant_requests_total",
            "Requests for hits and holds.",
            ("kind", "outcome", "decided_by"),
        )
        self._held_copies: Gauge = Gauge(
            "tollgate_client_held_copies", "Copies that this process holds."
        )
        self._lost_holds = Counter("tollgate_client_lost_holds_total", "Holds that were lost.")
        self._namespaces: Set[str] = {""}
        self._by_labels: Dict[Tuple[str, str, str], Counter] = {}
        self._failed_calls = Counter(
            "tollgate_client_failed_calls_total", "Calls to nodes that have failed.", ("reason",)
        )
        self._request_seconds: Histogram = Histogram(
            "tollgate_client_request_seconds",
            "Seconds until a node had decided, or none would.",
            buckets=_SECONDS,
        )
        self._wait_seconds = Histogram(
            "tollgate_client_wait_seconds", "Seconds that acquire, hits or hold took.", buckets=_SECONDS
        )
        self._nodes: Gauge = Gauge("tollgate_client_nodes", "Nodes that are known.")
        self._nodes_called = Gauge("tollgate_client_nodes_called", "Nodes that are called.")
        self._lease_wants = Gauge(
            "tollgate_client_lease_wants", "What is wanted of a leased resource.", ("resource",)
        )
        self._lease_capacity = Gauge(
            "tollgate_client_lease_capacity", "What may be used of a leased resource.", ("resource",)
        )
        self._failed_refreshes = Counter(
            "tollgate_client_failed_refreshes_total", "Refreshes of leases that have failed."
        )
        self._charged_tokens = Counter(
            "tollgate_client_charged_tokens_total", "Tokens that were taken for charges."
        )

    def decided(self, namespace: str, decision: Decision) -> None:
        """A request of the application was answered."""
        if not decision.is_granted and decision.reason is Reason.NO_BUCKET:
            # Names that the limits do not know may come from users, in any number.
            namespace = ""
        outcome = "granted" if decision.is_granted else "refused"
        self._count(namespace, outcome, decision.decided_by._value_)

    def not_decided(self, namespace: str, error: TollgateError) -> None:
        """A request of the application was not decided."""
        if isinstance(error, InvalidRequestError):
            self._count("", "invalid", "node")
        else:
            self._count(namespace, "no_decision", "nobody")

    def _count(self, namespace: str, outcome: str, decided_by: str) -> None:
        if namespace not in self._namespaces:
            # A fallback decides for names that the limits do not know, too.
            if len(self._namespaces) >= _MOST_NAMESPACES:
                namespace = ""
            self._namespaces.add(namespace)
        labels = (namespace, outcome, decided_by)
        counter = self._by_labels.get(labels)
        if counter is None:
            counter = self._by_labels[labels] = self._requests.labels(*labels)
        counter.inc()

    def tenant_decided(self, kind: str, outcome: str, decided_by: str) -> None:
        """A request for hits or a hold was answered, or not."""
        self._tenant_requests.labels(kind, outcome, decided_by).inc()

    def held(self, more: int) -> None:
        """Counts more or fewer copies that are held."""
        self._held_copies.inc(more)

    def hold_lost(self) -> None:
        """A hold was lost."""
        self._lost_holds.inc()

    def asked(self, seconds: float) -> None:
        """How long it took until a node had decided, or none would."""
        self._request_seconds.observe(seconds)

    def waited(self, seconds: float) -> None:
        """How long ``acquire``, ``hits`` or ``hold`` took."""
        self._wait_seconds.observe(seconds)

    def call_failed(self, why: NoAnswer) -> None:
        """A call to a node has failed."""
        self._failed_calls.labels(why.value).inc()

    def nodes(self, more: int, more_called: int) -> None:
        """Counts more or fewer nodes, and more or fewer that are called."""
        self._nodes.inc(more)
        self._nodes_called.inc(more_called)

    def lease(self, resource: str, wants: float, capacity: float) -> None:
        """What is wanted of a resource, and what may be used."""
        self._lease_wants.labels(resource).set(wants)
        self._lease_capacity.labels(resource).set(capacity)

    def refresh_failed(self) -> None:
        """The leases were not refreshed."""
        self._failed_refreshes.inc()

    def charged(self, tokens: int) -> None:
        """Tokens were taken for a charge."""
        self._charged_tokens.inc(tokens)


def _metrics() -> Optional[Metrics]:
    try:
        return Metrics()
    except ImportError:
        return None
    except ValueError as error:
        LOG.warning("nothing is counted, as another copy of this package counts: %s", error)
        return None


METRICS = _metrics()
"""``None`` without ``prometheus_client``."""
