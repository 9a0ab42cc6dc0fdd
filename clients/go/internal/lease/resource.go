package lease

import (
	"context"
	"sync"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
)

// forever is longer than anybody waits, and safe to compute with.
const forever = 24 * time.Hour

// held is the capacity of a resource, as far as it is known.
type held struct {
	// capacity is that of the lease.
	capacity float64
	// expires is when the lease runs out.
	expires time.Time
	// after is the capacity without a lease.
	after float64
	// isAll says that the lease is all that was asked for.
	isAll bool
}

// isValid says whether the lease has not run out: neither by the clock that
// only goes on, nor by the time of day, which also goes on while the machine
// sleeps.
func (h held) isValid(now time.Time) bool {
	return now.Before(h.expires) && now.Round(0).Before(h.expires.Round(0))
}

// at is the capacity that may be used at this time.
func (h held) at(now time.Time) float64 {
	if h.isValid(now) {
		return h.capacity
	}
	return h.after
}

// usage is how the application uses a resource. The lock of the resource guards
// it.
type usage interface {
	// demand is what was demanded in the seconds since the last second of
	// demand began, including what was refused and what waits.
	demand(seconds float64) float64

	// isShort says whether this capacity is too small for the present demand.
	isShort(capacity float64) bool

	// beginSecond begins the next second of demand.
	beginSecond()

	// beforeChange is called when another capacity is about to be held.
	beforeChange(h held, now time.Time)
}

// resource is what a handle and the keeper share.
type resource struct {
	id     string
	mode   Mode
	leases *Leases

	// turn holds an element while somebody is first in the queue. The runtime
	// serves blocked senders in the order in which they came.
	turn chan struct{}

	mu    sync.Mutex
	usage usage
	// wants is the capacity to ask for; nil if it is measured.
	wants *float64
	held  held
	// changed is closed when something changes that others wait for.
	changed chan struct{}
	// isUrgent says that the next request should not wait for its time.
	isUrgent bool
	// isClosed says that the handle or the client was closed.
	isClosed bool
}

func newResource(leases *Leases, id string, settings Settings, usage usage) *resource {
	r := &resource{
		id:      id,
		mode:    settings.Mode,
		leases:  leases,
		turn:    make(chan struct{}, 1),
		usage:   usage,
		held:    held{expires: time.Now(), after: withoutLease(settings)},
		changed: make(chan struct{}),
	}
	if settings.Wants != nil {
		// The caller may change what it points to.
		wants := *settings.Wants
		r.wants = &wants
	}
	return r
}

// withoutLease is the capacity before the first answer.
func withoutLease(settings Settings) float64 {
	if settings.Mode != Optimistic || settings.Wants == nil {
		return 0
	}
	return notNegative(*settings.Wants)
}

// capacity is what may be used at this time. The lock must be held.
func (r *resource) capacity(now time.Time) float64 {
	if r.isClosed {
		return 0
	}
	return r.held.at(now)
}

// currentCapacity is what may be used now.
func (r *resource) currentCapacity() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.capacity(time.Now())
}

func (r *resource) setWants(wants float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	isSame := r.wants != nil && *r.wants == wants
	r.wants = &wants
	if !isSame {
		r.hurry()
	}
}

// hurry makes the next request urgent. The lock must be held.
func (r *resource) hurry() {
	if !r.isUrgent {
		r.isUrgent = true
		r.leases.ring()
	}
}

// askIfShort asks for more soon if the capacity is too small for the demand and
// more may be had: the last request got all that it wanted, and the next one
// will want what is demanded then. The lock must be held.
func (r *resource) askIfShort(now time.Time) {
	if r.held.isAll && r.held.isValid(now) && r.wants == nil &&
		r.usage.isShort(r.held.capacity) {
		r.hurry()
	}
}

// hold changes what is held.
func (r *resource) hold(change func(h *held)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.usage.beforeChange(r.held, time.Now())
	change(&r.held)
	r.wake()
}

// wake makes those who wait look again. The lock must be held.
func (r *resource) wake() {
	close(r.changed)
	r.changed = make(chan struct{})
}

// close lets nothing be used any more.
func (r *resource) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.isClosed = true
	r.wake()
}

// wait calls try until it succeeds. It calls try with the lock held, first now,
// and then when something has changed or the time that try returned is over.
func (r *resource) wait(ctx context.Context, try func(now time.Time) (time.Duration, bool)) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		pause, changed, err := r.attempt(try)
		if changed == nil {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// attempt calls try once. If it fails, attempt returns when to call it again:
// after a pause, or when the channel is closed.
func (r *resource) attempt(try func(now time.Time) (time.Duration, bool)) (
	pause time.Duration, changed <-chan struct{}, err error,
) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.isClosed {
		return 0, nil, fault.ErrClosed
	}
	now := time.Now()
	pause, ok := try(now)
	if ok {
		return 0, nil, nil
	}
	// The end of a lease is a change, too.
	if now.Before(r.held.expires) {
		pause = min(pause, r.held.expires.Sub(now))
	}
	return pause, r.changed, nil
}

// waitInTurn is wait for one caller after the other, in the order of the calls.
func (r *resource) waitInTurn(
	ctx context.Context, try func(now time.Time) (time.Duration, bool),
) error {
	select {
	case r.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-r.turn }()
	return r.wait(ctx, try)
}

// notNegative replaces what is no capacity, negative or not a number, by 0.
func notNegative(capacity float64) float64 {
	if capacity > 0 {
		return capacity
	}
	return 0
}
