package lease

import (
	"context"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
)

const (
	// gaugeGrowth is how many times their number is asked for while places are
	// refused at once: nobody knows how many callers there are.
	gaugeGrowth = 2

	// rounding is the part by which a share may be too small: shares are sums
	// of fractions.
	rounding = 1e-9
)

// Gauge limits how much this process does at once: a semaphore that grows and
// shrinks with the leased capacity, rounded down. A share below 1 lets nobody
// in. A Gauge may be used by several goroutines at once.
type Gauge struct {
	resource *resource
	// places is guarded by the lock of the resource.
	places *places
}

// places is the usage of a gauge.
type places struct {
	inUse   int
	waiting int
	// peak is the most who had a place, waited or were refused at once since
	// the second began.
	peak int
	// isRefused says that a place was refused since the second began.
	isRefused bool
}

// present is how many have a place or wait for one.
func (p *places) present() int {
	return p.inUse + p.waiting
}

func (p *places) demand(float64) float64 {
	if p.isRefused {
		return float64(p.peak * gaugeGrowth)
	}
	return float64(p.peak)
}

func (p *places) isShort(capacity float64) bool {
	return p.isRefused || float64(p.present()) > capacity+rounding
}

func (p *places) beginSecond() {
	p.peak, p.isRefused = p.present(), false
}

func (p *places) beforeChange(held, time.Time) {}

// isFree says whether there is a place more.
func (p *places) isFree(capacity float64) bool {
	return float64(p.inUse)+1 <= capacity+rounding
}

// takeAtOnce takes a place unless others wait for one.
func (p *places) takeAtOnce(capacity float64) bool {
	if p.waiting > 0 || !p.isFree(capacity) {
		return false
	}
	p.inUse++
	p.peak = max(p.peak, p.present())
	return true
}

// takeAwaited gives a place to one who waits.
func (p *places) takeAwaited(capacity float64) bool {
	if !p.isFree(capacity) {
		return false
	}
	p.waiting--
	p.inUse++
	return true
}

func (p *places) beginWait() {
	p.waiting++
	p.peak = max(p.peak, p.present())
}

func (p *places) refuse() {
	p.isRefused = true
	p.peak = max(p.peak, p.present()+1)
}

// Gauge leases a number of places. Close the Gauge to release the lease.
func (l *Leases) Gauge(resource string, settings Settings) (*Gauge, error) {
	places := &places{}
	leased, err := l.lease(resource, settings, places)
	if err != nil {
		return nil, err
	}
	return &Gauge{resource: leased, places: places}, nil
}

// Place is a place of a [Gauge], which is taken until it is released.
type Place struct {
	gauge *Gauge
	// isReleased is guarded by the lock of the resource.
	isReleased bool
}

// Acquire waits for a place, in the order of the calls. When the capacity
// shrinks, those who have a place keep it.
//
// Acquire returns the context's error if the context ends first, and fault.ErrClosed
// if the gauge or the client is closed.
func (g *Gauge) Acquire(ctx context.Context) (*Place, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if place, err := g.begin(); place != nil || err != nil {
		return place, err
	}
	err := g.resource.waitInTurn(ctx, func(now time.Time) (time.Duration, bool) {
		ok := g.places.takeAwaited(g.resource.capacity(now))
		if !ok {
			// The last answer may be of a request from before this call.
			g.resource.askIfShort(now)
		}
		return forever, ok
	})
	if err != nil {
		g.resource.mu.Lock()
		defer g.resource.mu.Unlock()
		g.places.waiting--
		return nil, err
	}
	return &Place{gauge: g}, nil
}

// begin takes a place at once, or begins to wait for one and returns nil.
func (g *Gauge) begin() (*Place, error) {
	g.resource.mu.Lock()
	defer g.resource.mu.Unlock()
	now := time.Now()
	switch {
	case g.resource.isClosed:
		return nil, fault.ErrClosed
	case g.places.takeAtOnce(g.resource.capacity(now)):
		return &Place{gauge: g}, nil
	}
	g.places.beginWait()
	g.resource.askIfShort(now)
	return nil, nil
}

// TryAcquire takes a place if there is one now and nobody waits. It returns
// false once the gauge or the client is closed.
func (g *Gauge) TryAcquire() (*Place, bool) {
	g.resource.mu.Lock()
	defer g.resource.mu.Unlock()
	now := time.Now()
	switch {
	case g.resource.isClosed:
		return nil, false
	case g.places.takeAtOnce(g.resource.capacity(now)):
		return &Place{gauge: g}, true
	}
	g.places.refuse()
	g.resource.askIfShort(now)
	return nil, false
}

// Release frees the place. Only the first call does anything.
func (p *Place) Release() {
	if g := p.gauge; p.release() {
		g.resource.leases.drop(g.resource)
	}
}

// release frees the place. It returns whether it was the last of a closed
// gauge.
func (p *Place) release() (isLast bool) {
	g := p.gauge
	g.resource.mu.Lock()
	defer g.resource.mu.Unlock()
	if p.isReleased {
		return false
	}
	p.isReleased = true
	g.places.inUse--
	if g.places.waiting > 0 {
		g.resource.wake()
	}
	return g.resource.isClosed && g.places.inUse == 0
}

// InUse is how many places are taken now.
func (g *Gauge) InUse() int {
	g.resource.mu.Lock()
	defer g.resource.mu.Unlock()
	return g.places.inUse
}

// Capacity is how many places may be taken now.
func (g *Gauge) Capacity() float64 {
	return g.resource.currentCapacity()
}

// SetWants asks for this capacity from now on, whatever is demanded.
func (g *Gauge) SetWants(wants float64) {
	g.resource.setWants(wants)
}

// Close lets nobody in any more. The lease is released when the last place is,
// and Close does not wait for that.
func (g *Gauge) Close() {
	g.resource.close()
	if g.InUse() == 0 {
		g.resource.leases.drop(g.resource)
	}
}
