package tollgate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"
)

const (
	// defaultTTL is how long copies stay held after the client is killed or cut off, if it does not say
	// otherwise.
	defaultTTL = 10 * time.Second
	// Copies can stay held for so long without a renewal.
	leastTTL, mostTTL = time.Second, 24 * time.Hour
)

// TenantRequest is what is asked for on behalf of a domain: a user, or a tenant.
type TenantRequest struct {
	Resource, Domain string
	// The most hits or copies that are asked for.
	Copies int64
	// The fewest that are accepted, which a fallback grants.
	MinCopies int64

	maxWait time.Duration
	// 0 without one: that of the client counts.
	deadline time.Duration
	ttl      time.Duration
}

// TenantOption changes what [Client.Hits] or [Client.Hold] asks for: [Copies], [MinCopies], [TTL],
// [MaxWait] and [Deadline]. [Tokens] means the same as Copies here, and [NotCritical] nothing.
type TenantOption interface {
	ofTenant(*TenantRequest)
}

type tenantOption func(*TenantRequest)

func (o tenantOption) ofTenant(r *TenantRequest) { o(r) }

func (o RequestOption) ofTenant(r *TenantRequest) {
	if o == nil {
		return
	}
	request := Request{Tokens: r.Copies, maxWait: r.maxWait, deadline: r.deadline}
	o(&request)
	r.Copies, r.maxWait, r.deadline = request.Tokens, request.maxWait, request.deadline
}

// Copies sets the number of hits or copies; without it, and with 0, it is 1.
func Copies(copies int64) TenantOption {
	return tenantOption(func(r *TenantRequest) { r.Copies = copies })
}

// MinCopies accepts fewer, down to so many; 0 means 1. Without it, fewer than [Copies] are not granted.
func MinCopies(copies int64) TenantOption {
	return tenantOption(func(r *TenantRequest) { r.MinCopies = cmp.Or(copies, 1) })
}

// TTL sets how long copies stay held after the client is killed, or cut off from the nodes: from a
// second to a day; by default 10 seconds. Not used for hits.
func TTL(ttl time.Duration) TenantOption {
	return tenantOption(func(r *TenantRequest) { r.ttl = ttl })
}

// newTenantRequest returns a mistake that no node needs to find, too.
func newTenantRequest(resource, domain string, options []TenantOption) (TenantRequest, error) {
	r := TenantRequest{Resource: resource, Domain: domain, ttl: defaultTTL}
	for _, option := range options {
		if option != nil {
			option.ofTenant(&r)
		}
	}
	r.Copies = cmp.Or(r.Copies, 1)
	r.MinCopies = cmp.Or(r.MinCopies, r.Copies)
	switch {
	case !utf8.ValidString(resource) || !utf8.ValidString(domain):
		return r, invalid("the name of a resource or a domain is not UTF-8")
	case len(resource) > longestName || len(domain) > longestName:
		return r, invalid("the name of a resource or a domain is too long")
	case r.Copies < 0 || r.MinCopies < 0:
		return r, invalid(fmt.Sprintf("%d copies, %d at least", r.Copies, r.MinCopies))
	case r.MinCopies > r.Copies:
		return r, invalid(fmt.Sprintf("MinCopies is %d, more than Copies: %d", r.MinCopies, r.Copies))
	case r.ttl < leastTTL || r.ttl > mostTTL:
		return r, invalid(fmt.Sprintf("TTL is %v: allowed are %v to %v", r.ttl, leastTTL, mostTTL))
	}
	return r, nil
}

// TenantDecision is the answer to a request for hits or copies.
type TenantDecision struct {
	// Whether hits or copies are granted. If not, nothing has changed.
	Granted bool
	// How many are granted.
	Copies int64
	// The number of the domain's current tier: 1 is the first, 0 if none is active. Of hits only.
	Tier int
	// Whether these hits have entered a tier.
	Burst bool
	// Whether so many were granted only because the limits are not enforced yet.
	Shadow bool
	// Why the request was refused: [ReasonLimit] or [ReasonUnavailable].
	Reason Reason
	// After how long the refused request could be granted; for copies, a guess. 0 if it never could, or
	// if nobody knows.
	RetryAfter time.Duration
	// Who has decided.
	DecidedBy DecidedBy
}

// refusal is a refusal of hits or copies as one of tokens.
func (d *TenantDecision) refusal() Decision {
	return Decision{Reason: d.Reason, RetryAfter: d.RetryAfter, DecidedBy: d.DecidedBy}
}

// tenantDecision is a decision of the memory or a fallback.
func tenantDecision(d Decision) TenantDecision {
	return TenantDecision{
		Granted: d.Granted, Copies: d.Tokens, Reason: d.Reason, RetryAfter: d.RetryAfter, DecidedBy: d.DecidedBy,
	}
}

// WithResourceFallback sets what decides about hits and copies of a resource, instead of
// [WithFallback].
func WithResourceFallback(resource string, fallback Fallback) Option {
	return func(s *settings) { s.fallbacks.resources[resource] = fallback }
}

// OnTenantRefused calls a function with each request for hits or copies that is refused. It must not
// block.
func OnTenantRefused(callback func(TenantRequest, TenantDecision)) Option {
	return func(s *settings) { s.onTenantRefused = callback }
}

// waitingOf is the time for a request. A deadline of the context bounds it, too.
func (c *Client) waitingOf(ctx context.Context, request *TenantRequest, start time.Time) waiting {
	maxWait, deadline := request.maxWait, c.deadline(ctx, &Request{deadline: request.deadline})
	if end, ok := ctx.Deadline(); ok {
		maxWait = min(maxWait, max(time.Until(end)-deadline, 0))
	}
	return waiting{start, maxWait, deadline}
}

// askAgain asks until something is granted, or can't be in time; or the client is closed.
func askAgain(
	ctx context.Context,
	ask func(deadline time.Duration) (TenantDecision, error),
	answer func() time.Duration,
	pause func(retryAfter time.Duration) (time.Duration, bool),
	closed <-chan struct{},
) (TenantDecision, error) {
	for {
		if err := ctx.Err(); err != nil {
			return TenantDecision{}, err
		}
		decision, err := ask(answer())
		if err != nil || decision.Granted || decision.RetryAfter <= 0 {
			return decision, err
		}
		pause, ok := pause(decision.RetryAfter)
		if !ok {
			return decision, nil
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		case <-closed:
			timer.Stop()
			return TenantDecision{}, &NoDecisionError{ErrClosed}
		}
	}
}

// orFallBack has the fallback grant the fewest that are accepted, or refuse, where no node has decided.
func (c *Client) orFallBack(ctx context.Context, request *TenantRequest, decision TenantDecision, err error) (TenantDecision, error) {
	if err != nil {
		// The application is told of its own context first.
		err = cmp.Or(ctx.Err(), err)
	}
	isOpen := err != nil || decision.Reason == ReasonUnavailable
	if !isOpen || errors.Is(err, ErrInvalid) || err != nil && err == ctx.Err() {
		return decision, err
	}
	fallback := c.settings.fallbacks.ofResource(request.Resource)
	if fallback == nil {
		if err != nil {
			err = &NoDecisionError{err}
		}
		return decision, err
	}
	c.logFallback(decision.Reason, err, "resource", request.Resource, "domain", request.Domain)
	return tenantDecision(fallback.decide(request.MinCopies, time.Now())), nil
}

// reportTenant tells the metrics and the application of an answer. A refusal becomes an error.
func (c *Client) reportTenant(ctx context.Context, kind string, request *TenantRequest, start time.Time, decision TenantDecision, err error) (TenantDecision, error) {
	metrics := c.settings.metrics
	metrics.Waited(time.Since(start))
	switch {
	case err != nil && err == ctx.Err():
	case errors.Is(err, ErrInvalid):
		metrics.TenantAnswered(kind, "invalid", string(ByNode))
	case err != nil:
		metrics.TenantAnswered(kind, "no_decision", "nobody")
	case decision.Granted:
		metrics.TenantAnswered(kind, "granted", string(decision.DecidedBy))
	default:
		metrics.TenantAnswered(kind, "refused", string(decision.DecidedBy))
		if c.settings.onTenantRefused != nil {
			c.settings.onTenantRefused(*request, decision)
		}
		err = &RefusedError{decision.refusal()}
	}
	return decision, err
}
