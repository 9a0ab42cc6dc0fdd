package lease

import (
	"context"
	"time"
)

// Capacity is a leased capacity whose use is left to the application, which
// says what it wants.
type Capacity struct {
	resource *resource
	// seen is what Changed returned last; at first, what may be used without a
	// lease. The lock of the resource guards it.
	seen float64
}

// unmeasured is the usage of a Capacity.
type unmeasured struct{}

func (unmeasured) demand(float64) float64       { return 0 }
func (unmeasured) isShort(float64) bool         { return false }
func (unmeasured) beginSecond()                 {}
func (unmeasured) beforeChange(held, time.Time) {}

// Capacity leases a capacity, 0 until it is told what is wanted. Close the
// Capacity to release the lease.
func (l *Leases) Capacity(resource string, settings Settings) (*Capacity, error) {
	if settings.Wants == nil {
		settings.Wants = new(float64)
	}
	leased, err := l.lease(resource, settings, unmeasured{})
	if err != nil {
		return nil, err
	}
	return &Capacity{resource: leased, seen: withoutLease(settings)}, nil
}

// Get is what may be used now.
func (c *Capacity) Get() float64 {
	return c.resource.currentCapacity()
}

// Changed waits until another capacity may be used than Changed returned last,
// and returns it. At first, it waits for one other than what [Mode] allows
// before the first answer. Of several calls at once, one returns.
func (c *Capacity) Changed(ctx context.Context) (float64, error) {
	var capacity float64
	err := c.resource.wait(ctx, func(now time.Time) (time.Duration, bool) {
		capacity = c.resource.capacity(now)
		changed := capacity != c.seen
		c.seen = capacity
		return forever, changed
	})
	if err != nil {
		return 0, err
	}
	return capacity, nil
}

// SetWants asks for another capacity from now on.
func (c *Capacity) SetWants(wants float64) {
	c.resource.setWants(wants)
}

// Close releases the lease. It does not wait for the release.
func (c *Capacity) Close() {
	c.resource.close()
	c.resource.leases.drop(c.resource)
}
