package tollgate

import (
	"context"
	"fmt"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/hold"
)

// newHolds are the holds of a client, none yet.
func newHolds(backend backend, settings settings) *hold.Holds {
	return hold.New(backend, hold.Settings{
		Name:     settings.clientID,
		Deadline: settings.deadline,
		Fallback: func(resource string, copies int64, now time.Time) bool {
			fallback := settings.fallbacks.ofResource(resource)
			return fallback != nil && fallback.decide(copies, now).Granted
		},
		Metrics: settings.metrics,
		Logger:  settings.logger,
	})
}

// Hold reserves copies of a resource on behalf of a domain, which are held until [Hold.Release]. The
// error for a request that is refused is a *[RefusedError].
//
// With [MaxWait], a refusal is not the end: Hold asks again, about once a second, until that time is
// over. It takes MaxWait and the deadline at most, and no longer than the context lasts.
//
// If the context ends first, its error is returned, and copies that were granted are released. Once
// there is a hold, the context has no say.
func (c *Client) Hold(ctx context.Context, resource, domain string, options ...TenantOption) (*Hold, error) {
	start := time.Now()
	request, err := newTenantRequest(resource, domain, options)
	if err != nil {
		return nil, err
	}
	attempt, err := c.holds.Attempt(resource, domain, request.ttl)
	if err != nil {
		return nil, &NoDecisionError{err}
	}
	defer attempt.End()
	waiting := c.waitingOf(ctx, &request, start)
	ask := func(deadline time.Duration) (TenantDecision, error) {
		return c.decideCopies(ctx, attempt, &request, deadline)
	}
	decision, err := askAgain(ctx, ask, waiting.answer, waiting.pauseOfGuess, attempt.Closed())
	decision, err = c.reportTenant(ctx, "hold", &request, start, decision, err)
	if err != nil {
		return nil, err
	}
	held, err := attempt.Succeed(hold.Answer{
		Copies: decision.Copies, Shadow: decision.Shadow, By: hold.By(decision.DecidedBy),
	})
	if err != nil {
		return nil, &NoDecisionError{err}
	}
	return &Hold{held}, nil
}

// decideCopies asks once.
func (c *Client) decideCopies(ctx context.Context, attempt *hold.Attempt, request *TenantRequest, deadline time.Duration) (TenantDecision, error) {
	start := time.Now()
	answer, err := attempt.Reserve(ctx, request.Copies, request.MinCopies, deadline)
	c.settings.metrics.Asked(time.Since(start))
	return c.orFallBack(ctx, request, fromAnswer(answer), err)
}

// fromAnswer is the answer of a node about copies, as a decision.
func fromAnswer(answer hold.Answer) TenantDecision {
	decision := TenantDecision{
		Granted: answer.IsGranted(), Copies: answer.Copies, Shadow: answer.Shadow,
		RetryAfter: answer.RetryAfter, DecidedBy: DecidedBy(answer.By),
	}
	switch {
	case decision.Granted:
	case decision.DecidedBy == ByDegradedNode:
		decision.Reason = ReasonUnavailable
	default:
		decision.Reason = ReasonLimit
	}
	return decision
}

// Hold is copies of a resource that a domain holds. The client keeps them until [Hold.Release]. Made by
// [Client.Hold].
//
// They can be lost, as an operator can end the session, and so can a store that loses its memory; and if
// no node has renewed it for two thirds of its [TTL], the hold counts as lost, unless a [Fallback] grants
// the copies. Others get them after the last third: it is the time in which to stop using them.
type Hold struct{ hold *hold.Hold }

// Resource is the resource.
func (h *Hold) Resource() string { return h.hold.Resource() }

// Domain is whom they are held for.
func (h *Hold) Domain() string { return h.hold.Domain() }

// Copies is how many.
func (h *Hold) Copies() int64 { return h.hold.Copies() }

// DecidedBy is who has granted them, as of now: what a degraded node or the fallback has granted is asked
// for again until a node has recorded it.
func (h *Hold) DecidedBy() DecidedBy { return DecidedBy(h.hold.DecidedBy()) }

// Shadow says whether so many were granted only because the limits are not enforced yet.
func (h *Hold) Shadow() bool { return h.hold.Shadow() }

// IsHeld says whether they are still held.
func (h *Hold) IsHeld() bool { return h.hold.IsHeld() }

// Lost is closed when the copies are lost, or released, or the client is closed.
func (h *Hold) Lost() <-chan struct{} { return h.hold.Lost() }

// Release releases the copies, and waits until a node knows that, for five seconds at most. Further
// calls wait for the same. A hold that is lost is released, too: it says that the copies are not used
// any more.
func (h *Hold) Release() { h.hold.Release() }

// String describes the hold, without the secret name of its session.
func (h *Hold) String() string {
	return fmt.Sprintf("Hold(%s, %s, copies: %d, held: %t)", h.Resource(), h.Domain(), h.Copies(), h.IsHeld())
}
