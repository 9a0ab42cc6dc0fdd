package tollgate

import (
	"context"
	"fmt"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/pb/throttle"
)

// Hits asks for hits on a resource on behalf of a domain, which are to be used now. The error for a
// request that is refused is a *[RefusedError].
//
// With [MaxWait], a refusal is not the end: Hits asks again when the hits may be granted, until that
// time is over. It takes MaxWait and the deadline at most, and no longer than the context lasts.
//
// A refusal is remembered until its retry time, for a second at most: who asks for as many hits or more
// of the same resource and domain before is refused without a call.
//
// If the context ends first, its error is returned, and hits that were granted are lost.
func (c *Client) Hits(ctx context.Context, resource, domain string, options ...TenantOption) (TenantDecision, error) {
	start := time.Now()
	request, err := newTenantRequest(resource, domain, options)
	if err != nil {
		return TenantDecision{}, err
	}
	waiting := c.waitingOf(ctx, &request, start)
	ask := func(deadline time.Duration) (TenantDecision, error) {
		return c.decideHits(ctx, &request, deadline)
	}
	decision, err := askAgain(ctx, ask, waiting.answer, waiting.pause, nil)
	return c.reportTenant(ctx, "hits", &request, start, decision, err)
}

// decideHits asks once.
func (c *Client) decideHits(ctx context.Context, request *TenantRequest, deadline time.Duration) (TenantDecision, error) {
	start := time.Now()
	// The resource and the domain stand for a bucket.
	remembered := Request{
		Namespace: request.Resource, Bucket: request.Domain, Tokens: request.MinCopies, maxWait: -1,
	}
	if refusal, ok := c.refusedHits.get(&remembered, start); ok {
		return tenantDecision(refusal), nil
	}
	answerCtx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	response, err := c.backend.Hits(answerCtx, &throttle.ThrottleRequest{
		Resource: request.Resource, Domain: request.Domain, Copies: request.Copies, MinCopies: request.MinCopies,
	})
	c.settings.metrics.Asked(time.Since(start))
	var decision TenantDecision
	if err == nil {
		decision, err = fromThrottle(response)
	}
	if err == nil && !decision.Granted && c.backend.remembersRefusals() {
		refusal := decision.refusal()
		c.refusedHits.add(&remembered, &refusal, time.Now())
	}
	return c.orFallBack(ctx, request, decision, err)
}

// fromThrottle is the answer of a node about hits, as a decision.
func fromThrottle(response *throttle.ThrottleResponse) (TenantDecision, error) {
	decision := TenantDecision{DecidedBy: ByNode}
	if response.GetDegraded() {
		decision.DecidedBy = ByDegradedNode
	}
	switch response.GetStatus() {
	case throttle.ThrottleResponse_OK:
		if response.GetGranted() <= 0 {
			text := fmt.Sprintf("granted %d", response.GetGranted())
			return TenantDecision{}, &fault.Error{Kind: ErrFailed, Message: text}
		}
		decision.Granted, decision.Copies = true, response.GetGranted()
		decision.Tier = int(max(response.GetTierIndex(), 0))
		decision.Burst, decision.Shadow = response.GetBurst(), response.GetShadow()
		return decision, nil
	case throttle.ThrottleResponse_REJECTED:
		decision.Reason, decision.RetryAfter = ReasonLimit, millis(response.GetRetryAfterMillis())
		// By a share of the limits, a degraded node says when.
		if response.GetDegraded() && decision.RetryAfter == 0 {
			decision.Reason = ReasonUnavailable
		}
		return decision, nil
	}
	text := fmt.Sprintf("the status %d is unknown to this version", response.GetStatus())
	return TenantDecision{}, &fault.Error{Kind: ErrFailed, Message: text}
}
