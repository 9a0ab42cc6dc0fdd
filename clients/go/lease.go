package tollgate

import (
	"context"
	"fmt"

	"github.com/tollgate/tollgate/clients/go/internal/lease"
)

// Errors of leases, to be found with errors.Is. Besides them, there is [ErrClosed].
var (
	// The client has a lease of the resource already: share its handle.
	ErrAlreadyLeased = lease.ErrAlreadyLeased
	// The name of a resource is empty, has more than 1,024 bytes, or is not UTF-8.
	ErrInvalidName = lease.ErrInvalidName
)

// Mode says what may be used once a lease has run out and no node has renewed it, and before the first
// answer.
type Mode int

const (
	// The resource's safe capacity, as the nodes last said it; nothing if none ever did.
	Safe = Mode(lease.Safe)
	// Nothing.
	Pessimistic = Mode(lease.Pessimistic)
	// What was wanted.
	Optimistic = Mode(lease.Optimistic)
)

// String names the mode.
func (m Mode) String() string {
	switch m {
	case Safe:
		return "safe"
	case Pessimistic:
		return "pessimistic"
	case Optimistic:
		return "optimistic"
	}
	return fmt.Sprintf("Mode(%d)", int(m))
}

// LeaseOption is a setting of a lease.
type LeaseOption struct{ set func(*lease.Settings) }

// WithMode sets what may be used without a lease; [Safe] by default.
func WithMode(mode Mode) LeaseOption {
	return LeaseOption{func(s *lease.Settings) { s.Mode = lease.Mode(mode) }}
}

// Wants sets the capacity to ask for; a number below 0 means 0. Without it, as much as is demanded: a
// fifth more than the average of the last ten seconds, or what was demanded in the last one if that is
// more; and twice as much while callers wait for a rate, or a gauge refuses them.
func Wants(wants float64) LeaseOption {
	return LeaseOption{func(s *lease.Settings) { s.Wants = &wants }}
}

func leaseSettings(options []LeaseOption) lease.Settings {
	var settings lease.Settings
	for _, option := range options {
		if option.set != nil {
			option.set(&settings)
		}
	}
	return settings
}

// RateLimiter leases a share of a resource whose capacity is so much a second. All leases of a client
// are refreshed in one call, at the interval that the nodes say.
func (c *Client) RateLimiter(resource string, options ...LeaseOption) (*RateLimiter, error) {
	rate, err := c.leases.RateLimiter(resource, leaseSettings(options))
	if err != nil {
		return nil, err
	}
	return &RateLimiter{rate}, nil
}

// Gauge leases a share of a resource whose capacity is so many at once.
func (c *Client) Gauge(resource string, options ...LeaseOption) (*Gauge, error) {
	gauge, err := c.leases.Gauge(resource, leaseSettings(options))
	if err != nil {
		return nil, err
	}
	return &Gauge{gauge}, nil
}

// Capacity leases a share of a resource, and leaves its use to the application, which says what it
// wants with [Wants] or [Capacity.SetWants].
func (c *Client) Capacity(resource string, options ...LeaseOption) (*Capacity, error) {
	capacity, err := c.leases.Capacity(resource, leaseSettings(options))
	if err != nil {
		return nil, err
	}
	return &Capacity{capacity}, nil
}

// RateLimiter limits what this process does to its leased rate. Made by [Client.RateLimiter]. Share it
// as long as the process uses the resource: a new one knows nothing of what the last one has used.
type RateLimiter struct{ rate *lease.RateLimiter }

// Wait waits until n may be used, in the order of the calls, or until the context ends: nothing is
// used then. A tenth of a second's capacity can be used at once, and 1 in any case; after more than
// that, the next callers wait for the rest. The error is [ErrClosed] after Close of this or the client.
//
// Fallbacks are for tokens. While there is no lease, [Mode] says what may be used: with [Safe], nothing
// before the nodes have said what is safe.
func (r *RateLimiter) Wait(ctx context.Context, n int) error { return r.rate.Wait(ctx, n) }

// Try uses n if that is possible now, and nobody waits; after Close, it never is. As with [RateLimiter.Wait], the next callers
// wait for what is more than a tenth of a second's capacity.
func (r *RateLimiter) Try(n int) bool { return r.rate.Try(n) }

// Capacity is what may be used a second now.
func (r *RateLimiter) Capacity() float64 { return r.rate.Capacity() }

// SetWants asks for this capacity from now on, whatever is demanded.
func (r *RateLimiter) SetWants(wants float64) { r.rate.SetWants(wants) }

// Close releases the lease.
func (r *RateLimiter) Close() { r.rate.Close() }

// Gauge limits how much this process does at once: a semaphore that grows and shrinks with the leased
// capacity, rounded down: a share below 1 lets nobody in. Made by [Client.Gauge].
type Gauge struct{ gauge *lease.Gauge }

// Acquire waits for a place, in the order of the calls, or until the context ends. The error is
// [ErrClosed] after Close of this or the client.
func (g *Gauge) Acquire(ctx context.Context) (*Place, error) {
	place, err := g.gauge.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	return &Place{place}, nil
}

// TryAcquire takes a place if one is free, and nobody waits for it.
func (g *Gauge) TryAcquire() (*Place, bool) {
	place, ok := g.gauge.TryAcquire()
	if !ok {
		return nil, false
	}
	return &Place{place}, true
}

// InUse is how many have a place now.
func (g *Gauge) InUse() int { return g.gauge.InUse() }

// Capacity is how many may have a place at once now.
func (g *Gauge) Capacity() float64 { return g.gauge.Capacity() }

// SetWants asks for this capacity from now on, whatever is demanded.
func (g *Gauge) SetWants(wants float64) { g.gauge.SetWants(wants) }

// Close releases the lease, once the last place is released, too.
func (g *Gauge) Close() { g.gauge.Close() }

// Place is a place of a [Gauge].
type Place struct{ place *lease.Place }

// Release gives the place back. Further calls do nothing.
func (p *Place) Release() { p.place.Release() }

// Capacity is a leased capacity. Made by [Client.Capacity].
type Capacity struct{ capacity *lease.Capacity }

// Get is what may be used now.
func (c *Capacity) Get() float64 { return c.capacity.Get() }

// Changed waits until another capacity may be used than it returned last, and returns it. At first, it
// waits for one other than what [Mode] allows before the first answer.
func (c *Capacity) Changed(ctx context.Context) (float64, error) { return c.capacity.Changed(ctx) }

// SetWants asks for another capacity from now on.
func (c *Capacity) SetWants(wants float64) { c.capacity.SetWants(wants) }

// Close releases the lease.
func (c *Capacity) Close() { c.capacity.Close() }
