package tollgate

import (
	"errors"
	"time"
)

// Metrics are told what a client does; see [WithMetrics]. The package tollgateprom shows them to
// Prometheus. All methods are called by many goroutines at once, and must not block.
//
// Embed [NoMetrics] in a type of your own: later versions may have more methods.
type Metrics interface {
	// Answered tells that a request was answered: outcome is "granted", "refused", "invalid" or
	// "no_decision", decidedBy one of [DecidedBy] or "nobody". The namespace is empty if the request
	// is invalid, or the limits have no such bucket.
	Answered(namespace, outcome, decidedBy string)
	// TenantAnswered tells that a request for hits or copies was answered: kind is "hits" or "hold", the
	// others are as above. Names of resources and domains may be many.
	TenantAnswered(kind, outcome, decidedBy string)
	// Asked tells how long it took until a node had decided, or none would.
	Asked(time.Duration)
	// Waited tells how long [Client.Acquire], [Client.Hits] or [Client.Hold] took.
	Waited(time.Duration)
	// CallFailed tells that a call to a node has failed: "timeout", "unreachable", "overloaded",
	// "forbidden", "not_configured" or "error".
	CallFailed(reason string)
	// AddNodes tells that more nodes are known, and more of them called; negative numbers are fewer.
	AddNodes(known, called int)
	// Lease tells what the client asked for at the last refresh of a lease, and what it may use.
	Lease(resource string, wants, capacity float64)
	// RefreshFailed tells that the leases could not be refreshed.
	RefreshFailed()
	// SmartTokens tells how many tokens of smart buckets were used, and how many were refused.
	SmartTokens(used, refused int64)
	// Charged tells that tokens were taken for what was charged.
	Charged(tokens int64)
	// AddHeldCopies tells that more copies are held; negative numbers are fewer.
	AddHeldCopies(more int64)
	// HoldLost tells that the application has lost copies that it held.
	HoldLost()
}

// NoMetrics are told, and do nothing.
type NoMetrics struct{}

func (NoMetrics) Answered(namespace, outcome, decidedBy string)  {}
func (NoMetrics) TenantAnswered(kind, outcome, decidedBy string) {}
func (NoMetrics) Asked(time.Duration)                            {}
func (NoMetrics) Waited(time.Duration)                           {}
func (NoMetrics) CallFailed(reason string)                       {}
func (NoMetrics) AddNodes(known, called int)                     {}
func (NoMetrics) Lease(resource string, wants, capacity float64) {}
func (NoMetrics) RefreshFailed()                                 {}
func (NoMetrics) SmartTokens(used, refused int64)                {}
func (NoMetrics) Charged(tokens int64)                           {}
func (NoMetrics) AddHeldCopies(more int64)                       {}
func (NoMetrics) HoldLost()                                      {}

// answered tells the metrics of an answer.
func answered(metrics Metrics, namespace string, decision *Decision, err error) {
	switch {
	case errors.Is(err, ErrInvalid):
		metrics.Answered("", "invalid", string(ByNode))
	case err != nil:
		metrics.Answered(namespace, "no_decision", "nobody")
	default:
		// Names that the limits do not know may come from users, in any number.
		if decision.Reason == ReasonNoBucket {
			namespace = ""
		}
		outcome := "refused"
		if decision.Granted {
			outcome = "granted"
		}
		metrics.Answered(namespace, outcome, string(decision.DecidedBy))
	}
}
