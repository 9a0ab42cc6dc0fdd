// Package tollgateprom shows the metrics of a client to Prometheus:
//
//	metrics := tollgateprom.New()
//	prometheus.MustRegister(metrics)
//	client, err := tollgate.New(addresses, tollgate.WithMetrics(metrics))
//
// All clients of a process can share them. The metrics are
//
//	| metric | labels | meaning |
//	| tollgate_client_requests_total | namespace, outcome, decided_by | requests. outcome: granted, refused, invalid, no_decision. namespace is empty if the request is invalid or the limits have no such bucket, and beyond the first 1000. decided_by: node, degraded_node, remembered, fallback, nobody |
//	| tollgate_client_tenant_requests_total | kind, outcome, decided_by | requests for hits or copies. kind: hits, hold; outcome and decided_by as above |
//	| tollgate_client_held_copies | | the copies that are held |
//	| tollgate_client_lost_holds_total | | holds that were lost |
//	| tollgate_client_request_seconds | | how long it took until a node had decided, or none would; a histogram |
//	| tollgate_client_wait_seconds | | how long Acquire, Hits or Hold took; a histogram |
//	| tollgate_client_failed_calls_total | reason | calls to nodes that have failed: timeout, unreachable, overloaded, forbidden, not_configured, error |
//	| tollgate_client_lease_wants, tollgate_client_lease_capacity | resource | what the client asked for at the last refresh, and what it may use |
//	| tollgate_client_failed_refreshes_total | | refreshes of the leases that have failed |
//	| tollgate_client_smart_tokens_total | outcome | tokens of smart buckets: used, or refused |
//	| tollgate_client_charged_tokens_total | | tokens that were taken for charges |
//	| tollgate_client_nodes, tollgate_client_nodes_called | | the nodes that are known, and those that are called; the circuits of the others are open, or they do not answer yet |
package tollgateprom

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	tollgate "github.com/tollgate/tollgate/clients/go"
)

// Metrics are a collector of Prometheus. Made by [New].
type Metrics struct {
	tollgate.NoMetrics
	requests, failedCalls       *prometheus.CounterVec
	requestSeconds, waitSeconds prometheus.Histogram
	leaseWants, leaseCapacity   *prometheus.GaugeVec
	failedRefreshes             prometheus.Counter
	smartTokens                 *prometheus.CounterVec
	chargedTokens               prometheus.Counter
	knownNodes, calledNodes     prometheus.Gauge
	tenantRequests              *prometheus.CounterVec
	heldCopies                  prometheus.Gauge
	lostHolds                   prometheus.Counter
	collectors                  []prometheus.Collector

	namespaces         sync.Map
	numberOfNamespaces atomic.Int64
}

var (
	_ tollgate.Metrics     = (*Metrics)(nil)
	_ prometheus.Collector = (*Metrics)(nil)
)

// New makes metrics, to be registered.
func New() *Metrics {
	const prefix = "tollgate_client_"
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Name: prefix + name, Help: help}
	}
	gauge := func(name, help string) prometheus.GaugeOpts {
		return prometheus.GaugeOpts{Name: prefix + name, Help: help}
	}
	// From half a millisecond to half a minute.
	histogram := func(name, help string) prometheus.HistogramOpts {
		buckets := prometheus.ExponentialBuckets(0.0005, 2, 17)
		return prometheus.HistogramOpts{Name: prefix + name, Help: help, Buckets: buckets}
	}
	m := &Metrics{
		requests: prometheus.NewCounterVec(counter("requests_total", "Requests for tokens."),
			[]string{"namespace", "outcome", "decided_by"}),
		failedCalls: prometheus.NewCounterVec(counter("failed_calls_total", "Calls to nodes that have failed."),
			[]string{"reason"}),
		requestSeconds: prometheus.NewHistogram(histogram("request_seconds",
			"Time until a node had decided, or none would.")),
		waitSeconds: prometheus.NewHistogram(histogram("wait_seconds", "Time that Acquire, Hits or Hold took.")),
		leaseWants: prometheus.NewGaugeVec(gauge("lease_wants", "What was asked for at the last refresh."),
			[]string{"resource"}),
		leaseCapacity: prometheus.NewGaugeVec(gauge("lease_capacity", "What may be used of a resource."),
			[]string{"resource"}),
		failedRefreshes: prometheus.NewCounter(counter("failed_refreshes_total",
			"Refreshes of the leases that have failed.")),
		smartTokens: prometheus.NewCounterVec(counter("smart_tokens_total", "Tokens of smart buckets."),
			[]string{"outcome"}),
		chargedTokens: prometheus.NewCounter(counter("charged_tokens_total", "Tokens that were taken for charges.")),
		knownNodes:    prometheus.NewGauge(gauge("nodes", "Nodes that are known.")),
		calledNodes:   prometheus.NewGauge(gauge("nodes_called", "Nodes that are called.")),
		tenantRequests: prometheus.NewCounterVec(counter("tenant_requests_total", "Requests for hits or copies."),
			[]string{"kind", "outcome", "decided_by"}),
		heldCopies: prometheus.NewGauge(gauge("held_copies", "Copies that are held.")),
		lostHolds:  prometheus.NewCounter(counter("lost_holds_total", "Holds that were lost.")),
	}
	m.collectors = []prometheus.Collector{
		m.requests, m.failedCalls, m.requestSeconds, m.waitSeconds, m.leaseWants, m.leaseCapacity,
		m.failedRefreshes, m.smartTokens, m.chargedTokens, m.knownNodes, m.calledNodes, m.tenantRequests,
		m.heldCopies, m.lostHolds,
	}
	return m
}

// Describe describes the metrics to Prometheus.
func (m *Metrics) Describe(to chan<- *prometheus.Desc) {
	for _, one := range m.collectors {
		one.Describe(to)
	}
}

// Collect shows the metrics to Prometheus.
func (m *Metrics) Collect(to chan<- prometheus.Metric) {
	for _, one := range m.collectors {
		one.Collect(to)
	}
}

// mostNamespaces is the most that have labels of their own: names may come from users.
const mostNamespaces = 1000

// Answered counts a request.
func (m *Metrics) Answered(namespace, outcome, decidedBy string) {
	m.requests.WithLabelValues(m.label(namespace), outcome, decidedBy).Inc()
}

// label returns the namespace, or nothing if there are too many.
func (m *Metrics) label(namespace string) string {
	if _, known := m.namespaces.Load(namespace); known {
		return namespace
	}
	if m.numberOfNamespaces.Add(1) > mostNamespaces {
		m.numberOfNamespaces.Add(-1)
		return ""
	}
	if _, known := m.namespaces.LoadOrStore(namespace, nil); known {
		m.numberOfNamespaces.Add(-1)
	}
	return namespace
}

// Asked records the time of a question.
func (m *Metrics) Asked(time time.Duration) { m.requestSeconds.Observe(time.Seconds()) }

// Waited records the time of an Acquire.
func (m *Metrics) Waited(time time.Duration) { m.waitSeconds.Observe(time.Seconds()) }

// CallFailed counts a failed call.
func (m *Metrics) CallFailed(reason string) { m.failedCalls.WithLabelValues(reason).Inc() }

// AddNodes counts nodes.
func (m *Metrics) AddNodes(known, called int) {
	m.knownNodes.Add(float64(known))
	m.calledNodes.Add(float64(called))
}

// Lease shows what a lease is.
func (m *Metrics) Lease(resource string, wants, capacity float64) {
	m.leaseWants.WithLabelValues(resource).Set(wants)
	m.leaseCapacity.WithLabelValues(resource).Set(capacity)
}

// RefreshFailed counts a failed refresh.
func (m *Metrics) RefreshFailed() { m.failedRefreshes.Inc() }

// SmartTokens counts the tokens of smart buckets.
func (m *Metrics) SmartTokens(used, refused int64) {
	m.smartTokens.WithLabelValues("used").Add(float64(used))
	m.smartTokens.WithLabelValues("refused").Add(float64(refused))
}

// Charged counts tokens that were charged.
func (m *Metrics) Charged(tokens int64) { m.chargedTokens.Add(float64(tokens)) }

// TenantAnswered counts a request for hits or copies.
func (m *Metrics) TenantAnswered(kind, outcome, decidedBy string) {
	m.tenantRequests.WithLabelValues(kind, outcome, decidedBy).Inc()
}

// AddHeldCopies counts copies that are held.
func (m *Metrics) AddHeldCopies(more int64) { m.heldCopies.Add(float64(more)) }

// HoldLost counts a hold that was lost.
func (m *Metrics) HoldLost() { m.lostHolds.Inc() }
