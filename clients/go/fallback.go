package tollgate

import (
	"fmt"
	"sync"
	"time"
)

// Fallback decides when no node does: there is no answer in time, no node can be reached, a node
// answers with an error, the nodes can't reach the shared state and their policy is to refuse, or
// the limits have no bucket or resource of the name. Of hits and copies, it grants the fewest that the
// request accepts.
type Fallback interface {
	decide(tokens int64, now time.Time) Decision
}

var (
	// FallbackAllow grants everything.
	FallbackAllow Fallback = fixed{Granted: true, DecidedBy: ByFallback}
	// FallbackDeny refuses everything, with [ReasonUnavailable].
	FallbackDeny Fallback = fixed{Reason: ReasonUnavailable, DecidedBy: ByFallback}
)

// FallbackRate grants so many tokens a second, and up to burst at once. All buckets that it is set
// for share the rate. Each process has a rate of its own: with ten processes, a tenth of what the
// resource bears is the right size.
//
// It panics if perSecond is negative or not a number.
func FallbackRate(perSecond float64, burst int64) Fallback { return newRate(perSecond, burst) }

// fixed is the same decision each time.
type fixed Decision

func (f fixed) decide(tokens int64, _ time.Time) Decision {
	decision := Decision(f)
	if decision.Granted {
		decision.Tokens = tokens
	}
	return decision
}

// rate is a token bucket in this process.
type rate struct {
	perSecond float64
	burst     int64

	mu     sync.Mutex
	tokens float64
	// When they were counted; zero if the bucket is full.
	counted time.Time
}

func newRate(perSecond float64, burst int64) *rate {
	if !(perSecond >= 0) {
		panic(fmt.Sprintf("a rate of %v tokens a second", perSecond))
	}
	return &rate{perSecond: perSecond, burst: burst}
}

func (r *rate) decide(tokens int64, now time.Time) Decision {
	retryAfter, ok := r.take(tokens, now)
	if !ok {
		return Decision{Reason: ReasonLimit, RetryAfter: retryAfter, DecidedBy: ByFallback}
	}
	return Decision{Granted: true, Tokens: tokens, DecidedBy: ByFallback}
}

// take takes tokens; or says after how long there are enough, 0 for never.
func (r *rate) take(tokens int64, now time.Time) (retryAfter time.Duration, ok bool) {
	if tokens > r.burst {
		return 0, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	there := float64(r.burst)
	if !r.counted.IsZero() {
		// Others may have come first with a later time.
		if now.Before(r.counted) {
			now = r.counted
		}
		there = min(r.tokens+now.Sub(r.counted).Seconds()*r.perSecond, there)
	}
	left := there - float64(tokens)
	if left < 0 {
		// With a rate of 0, or one that takes longer than any time there is, never.
		if wait := seconds(-left / r.perSecond); wait < longest {
			return max(wait, 1), false
		}
		return 0, false
	}
	r.tokens, r.counted = left, now
	return 0, true
}

// fallbacks are those of a client: the most specific one counts.
type fallbacks struct {
	everything Fallback
	namespaces map[string]Fallback
	buckets    map[[2]string]Fallback
	// Of hits and holds.
	resources map[string]Fallback
}

func (f *fallbacks) ofResource(resource string) Fallback {
	if fallback, ok := f.resources[resource]; ok {
		return fallback
	}
	return f.everything
}

func (f *fallbacks) get(namespace, bucket string) Fallback {
	if fallback, ok := f.buckets[[2]string{namespace, bucket}]; ok {
		return fallback
	}
	if fallback, ok := f.namespaces[namespace]; ok {
		return fallback
	}
	return f.everything
}
