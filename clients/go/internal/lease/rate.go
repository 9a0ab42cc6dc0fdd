package lease

import (
	"context"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
)

// rateGrowth is how many times the demand is asked for while callers wait:
// those who call again only once they are served would call more often, but
// nobody knows how often.
const rateGrowth = 2

// RateLimiter limits what this process does to its leased rate: the capacity is
// so much a second. It may be used by several goroutines at once.
type RateLimiter struct {
	resource *resource
	// rate is guarded by the lock of the resource.
	rate *rate
}

// rate is the usage of a rate limiter.
type rate struct {
	meter meter
	// waiters is the number of callers that wait, and waiting what they wait
	// for.
	waiters int
	waiting float64
	// ended is what was used, refused or given up since the second began.
	ended float64
	// refused is what was refused since the second began.
	refused float64
}

func (r *rate) demand(seconds float64) float64 {
	// A debt is paid within a second.
	demand := max(r.ended/seconds, r.meter.debt()) + r.waiting
	if r.waiters > 0 {
		return demand * rateGrowth
	}
	return demand
}

// isShort says whether it would take more than a second to serve the demand.
func (r *rate) isShort(capacity float64) bool {
	return r.waiting+r.meter.debt()+r.refused > capacity
}

func (r *rate) beginSecond() {
	r.ended, r.refused = 0, 0
}

func (r *rate) beforeChange(h held, now time.Time) {
	r.meter.accrue(h, now)
}

// useAtOnce uses tokens unless others wait for some.
func (r *rate) useAtOnce(tokens float64, h held, now time.Time) bool {
	if r.waiters > 0 {
		return false
	}
	_, ok := r.meter.take(tokens, h, now)
	if ok {
		r.ended += tokens
	}
	return ok
}

func (r *rate) beginWait(tokens float64) {
	r.waiters++
	r.waiting += tokens
}

func (r *rate) endWait(tokens float64) {
	r.waiters--
	r.waiting -= tokens
	if r.waiters == 0 {
		// Very large numbers leave rounding errors.
		r.waiting = 0
	}
	r.ended += tokens
}

// RateLimiter leases a rate. Close the RateLimiter to release the lease.
func (l *Leases) RateLimiter(resource string, settings Settings) (*RateLimiter, error) {
	rate := &rate{meter: newMeter(time.Now())}
	leased, err := l.lease(resource, settings, rate)
	if err != nil {
		return nil, err
	}
	return &RateLimiter{resource: leased, rate: rate}, nil
}

// Wait waits until n may be used, in the order of the calls. A tenth of a
// second's capacity can be used at once, and 1 in any case; after more than
// that, the next callers wait for the rest. An n of 0 or less uses nothing and
// does not wait.
//
// Wait returns the context's error if the context ends first, and fault.ErrClosed if
// the rate limiter or the client is closed: then nothing is used.
func (l *RateLimiter) Wait(ctx context.Context, n int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	tokens := float64(n)
	if done, err := l.begin(tokens); done {
		return err
	}
	err := l.resource.waitInTurn(ctx, func(now time.Time) (time.Duration, bool) {
		wait, ok := l.rate.meter.take(tokens, l.resource.held, now)
		if ok {
			l.rate.endWait(tokens)
		} else {
			// The last answer may be of a request from before this call.
			l.resource.askIfShort(now)
		}
		return wait, ok
	})
	if err != nil {
		l.resource.mu.Lock()
		defer l.resource.mu.Unlock()
		l.rate.endWait(tokens)
	}
	return err
}

// begin uses tokens at once, or begins to wait for them.
func (l *RateLimiter) begin(tokens float64) (done bool, err error) {
	l.resource.mu.Lock()
	defer l.resource.mu.Unlock()
	now := time.Now()
	switch {
	case l.resource.isClosed:
		return true, fault.ErrClosed
	case tokens <= 0, l.rate.useAtOnce(tokens, l.resource.held, now):
		return true, nil
	}
	l.rate.beginWait(tokens)
	l.resource.askIfShort(now)
	return false, nil
}

// Try uses n if that is possible now and nobody waits. As with
// [RateLimiter.Wait], the next callers wait for what is more than a tenth of a
// second's capacity, and an n of 0 or less uses nothing. Try returns false once
// the rate limiter or the client is closed.
func (l *RateLimiter) Try(n int) bool {
	l.resource.mu.Lock()
	defer l.resource.mu.Unlock()
	now, tokens := time.Now(), float64(n)
	switch {
	case l.resource.isClosed:
		return false
	case n <= 0, l.rate.useAtOnce(tokens, l.resource.held, now):
		return true
	}
	l.rate.ended += tokens
	l.rate.refused += tokens
	l.resource.askIfShort(now)
	return false
}

// Capacity is what may be used a second now.
func (l *RateLimiter) Capacity() float64 {
	return l.resource.currentCapacity()
}

// SetWants asks for this capacity from now on, whatever is demanded.
func (l *RateLimiter) SetWants(wants float64) {
	l.resource.setWants(wants)
}

// Close releases the lease. It does not wait for the release.
func (l *RateLimiter) Close() {
	l.resource.close()
	l.resource.leases.drop(l.resource)
}
