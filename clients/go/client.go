package tollgate

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/charge"
	"github.com/tollgate/tollgate/clients/go/internal/hold"
	"github.com/tollgate/tollgate/clients/go/internal/lease"
	"github.com/tollgate/tollgate/clients/go/internal/smart"
	"github.com/tollgate/tollgate/clients/go/internal/throttle"
)

// Client asks tollgate for tokens and leases. It may be used by many goroutines at once; one per
// process is enough. Made by [New].
type Client struct {
	backend  backend
	settings settings
	refusals refusals
	log      throttle.Log
	leases   *lease.Leases
	smart    *smart.Buckets
	charges  *charge.Charges
	// Refused hits, by resource and domain.
	refusedHits refusals
	holds       *hold.Holds
}

func newClient(backend backend, settings settings) *Client {
	return &Client{
		backend:  backend,
		settings: settings,
		leases:   lease.New(backend, settings.clientID, settings.metrics, settings.logger),
		holds:    newHolds(backend, settings),
		smart:    smart.New(settings.metrics),
		charges:  charge.New(chargeBy(backend), settings.metrics, settings.logger),
	}
}

// Close releases all leases and holds, so that others get them at once, tries once more to
// [Client.Charge] what is not charged yet, ends the smart buckets, and closes the connections. It takes
// up to five seconds if no node answers. Later requests are left to the fallback, but for [Client.Hold],
// which returns [ErrClosed]. Callbacks, loggers and metrics must call neither this nor [Hold.Release],
// which wait for them.
func (c *Client) Close() {
	c.smart.Close()
	var closing sync.WaitGroup
	closing.Go(c.leases.Close)
	closing.Go(c.holds.Close)
	closing.Go(c.charges.Close)
	closing.Wait()
	c.backend.close()
}

// Allow asks for tokens. It waits for the answer, up to the deadline of the request or the client,
// but not for the tokens: [Decision.Wait] is left to the caller.
//
// A refusal is remembered until its retry time, for a second at most: who asks for as many tokens or
// more before is refused without a call.
//
// If the context ends first, its error is returned, and tokens that were granted are lost.
func (c *Client) Allow(ctx context.Context, namespace, bucket string, options ...RequestOption) (Decision, error) {
	request := newRequest(namespace, bucket, options)
	decision, err := c.decide(ctx, &request)
	c.report(ctx, &request, &decision, err)
	return decision, err
}

// Acquire asks for tokens, and waits until they may be used. The error for a request that is refused
// is a *[RefusedError].
//
// With [MaxWait], a refusal is not the end: Acquire asks again when the tokens may be there, until
// that time is over. It takes MaxWait and the deadline at most. Without MaxWait, it waits as long as
// the bucket's own limit has a request wait.
//
// A deadline of the context bounds the wait, too: the answer gets three quarters of the time at most,
// and what is left is for the wait. If the context ends first all the same, its error is returned, and tokens that were granted are
// lost.
func (c *Client) Acquire(ctx context.Context, namespace, bucket string, options ...RequestOption) (Decision, error) {
	start := time.Now()
	request := newRequest(namespace, bucket, options)
	decision, err := c.decideInTime(ctx, request, start)
	c.report(ctx, &request, &decision, err)
	if err == nil && decision.Granted {
		err = sleep(ctx, decision.Wait)
	}
	c.settings.metrics.Waited(time.Since(start))
	if err == nil && !decision.Granted {
		err = &RefusedError{decision}
	}
	return decision, err
}

// decideInTime asks until tokens are granted, or can't be in time.
func (c *Client) decideInTime(ctx context.Context, request Request, start time.Time) (Decision, error) {
	isPatient := request.hasMaxWait()
	if end, ok := ctx.Deadline(); ok {
		// What is left after the answer.
		request.deadline = c.deadline(ctx, &request)
		left := max(time.Until(end)-request.deadline, 0)
		if !isPatient || left < request.maxWait {
			request.maxWait = left
		}
	}
	if !isPatient {
		return c.decide(ctx, &request)
	}
	waiting := waiting{start, request.maxWait, c.deadline(ctx, &request)}
	for {
		request.maxWait, request.deadline = waiting.left(), waiting.answer()
		decision, err := c.decide(ctx, &request)
		// The debt shrinks no faster than what is left: too long now is too long later.
		if err != nil || decision.Granted || decision.RetryAfter == 0 || decision.debt() > waiting.left() {
			return decision, err
		}
		pause, ok := waiting.pause(decision.RetryAfter)
		if !ok {
			return decision, nil
		}
		if err := sleep(ctx, pause); err != nil {
			return Decision{}, err
		}
	}
}

// decide asks once.
func (c *Client) decide(ctx context.Context, request *Request) (Decision, error) {
	if err := cmp.Or(ctx.Err(), request.check()); err != nil {
		return Decision{}, err
	}
	if refusal, ok := c.refusals.get(request, time.Now()); ok {
		return refusal, nil
	}
	decision, err := c.ask(ctx, request)
	isOpen := err != nil || decision.Reason == ReasonNoBucket || decision.Reason == ReasonUnavailable
	switch {
	case errors.Is(err, ErrInvalid), err != nil && err == ctx.Err():
		return Decision{}, err
	case isOpen:
		return c.fallBack(request, decision, err)
	case !decision.Granted && c.backend.remembersRefusals():
		c.refusals.add(request, &decision, time.Now())
	}
	return decision, nil
}

func (c *Client) ask(ctx context.Context, request *Request) (Decision, error) {
	start := time.Now()
	answerCtx, cancel := context.WithTimeout(ctx, c.deadline(ctx, request))
	defer cancel()
	response, err := c.backend.allow(answerCtx, request.message())
	c.settings.metrics.Asked(time.Since(start))
	if err != nil {
		// The application is told of its own context first.
		return Decision{}, cmp.Or(ctx.Err(), err)
	}
	return fromResponse(response)
}

// fallBack has the fallback decide, if there is one, as no node does.
func (c *Client) fallBack(request *Request, refusal Decision, err error) (Decision, error) {
	fallback := c.settings.fallbacks.get(request.Namespace, request.Bucket)
	if fallback == nil {
		if err != nil {
			err = &NoDecisionError{err}
		}
		return refusal, err
	}
	c.logFallback(refusal.Reason, err, "namespace", request.Namespace, "bucket", request.Bucket)
	return fallback.decide(request.Tokens, time.Now()), nil
}

// logFallback tells that a fallback decides, and why: the reason of a refusal, or the error.
func (c *Client) logFallback(reason Reason, err error, about ...any) {
	heldBack, ok := c.log.Pass()
	if !ok {
		return
	}
	why := reason.String()
	if err != nil {
		why = err.Error()
	}
	c.settings.logger.Warn("the fallback decides", append(about, "why", why, "held_back", heldBack)...)
}

// deadline is the time for an answer: three quarters of what the context leaves at most, so that there
// is time for the fallback, and for a short wait.
func (c *Client) deadline(ctx context.Context, request *Request) time.Duration {
	deadline := c.settings.deadline
	if request.deadline > 0 {
		deadline = min(request.deadline, longestDeadline)
	}
	if end, ok := ctx.Deadline(); ok {
		deadline = max(min(deadline, time.Until(end)/4*3), 1)
	}
	return deadline
}

// report tells the metrics and the application of an answer.
func (c *Client) report(ctx context.Context, request *Request, decision *Decision, err error) {
	if err != nil && err == ctx.Err() {
		return
	}
	answered(c.settings.metrics, request.Namespace, decision, err)
	switch {
	case err != nil:
	case !decision.Granted && c.settings.onRefused != nil:
		c.settings.onRefused(*request, *decision)
	case decision.SoftLimited && c.settings.onSoftLimited != nil:
		c.settings.onSoftLimited(*request, *decision)
	}
}
