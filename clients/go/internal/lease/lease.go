// Package lease keeps the leases of a client: a client that makes many calls
// asks every few seconds for a share of a resource's capacity, and limits
// itself to it.
//
// A [RateLimiter], a [Gauge] or a [Capacity] is the handle of one lease. While
// there are handles, one goroutine, the keeper, asks for all of them in one
// call at the interval that the nodes say. What a handle and the keeper share
// is the resource.
package lease

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/pb/doorman"
)

const (
	// longestClose is how long closing may take: a refresh and a release,
	// without an answer.
	longestClose = 5 * time.Second

	// longestName is the most bytes of a resource's name.
	longestName = 1024
)

// Why a resource is not leased, besides [fault.ErrClosed].
var (
	// ErrAlreadyLeased is returned when the client has a lease of the resource
	// already: its handle can be shared.
	ErrAlreadyLeased = errors.New("the client has a lease on this resource already")

	// ErrInvalidName is returned when the name of a resource is empty, has more
	// than 1,024 bytes, or is not UTF-8.
	ErrInvalidName = errors.New("the name of a resource has 1 to 1024 bytes of UTF-8")
)

// Caller makes the calls to the nodes. It returns soon after the context ends,
// and may be used by several goroutines at once. Its errors are those of package
// fault; after one that does not say that no node got the request, a node may
// have answered.
type Caller interface {
	GetCapacity(
		ctx context.Context, request *doorman.GetCapacityRequest,
	) (*doorman.GetCapacityResponse, error)
	ReleaseCapacity(
		ctx context.Context, request *doorman.ReleaseCapacityRequest,
	) (*doorman.ReleaseCapacityResponse, error)
}

// Metrics is told about the leases. Only the keeper calls it.
type Metrics interface {
	// Lease is called once a second for each resource, and with zeros at its
	// end.
	Lease(resource string, wants, capacity float64)
	RefreshFailed()
}

// Mode says what may be used once a lease has run out and no node has renewed
// it.
type Mode int

// The modes. The zero value is Safe.
const (
	// Safe is the safe capacity that a node last said; nothing if none ever did.
	Safe Mode = iota
	// Pessimistic is nothing.
	Pessimistic
	// Optimistic is what was wanted.
	Optimistic
)

// Settings are the settings of a lease.
type Settings struct {
	// Mode says what may be used once the lease has run out, and before the
	// first answer.
	Mode Mode

	// Wants is the capacity to ask for; a number below 0 means 0. If it is nil,
	// as much is asked for as is demanded: a fifth more than the average of the
	// last ten seconds, or what was demanded in the last one if that is more;
	// and twice as much while callers wait for a rate, or a gauge refuses them.
	Wants *float64
}

// Leases are the leases of one client.
type Leases struct {
	caller   Caller
	clientID string
	metrics  Metrics
	logger   *slog.Logger

	// context is that of all calls, and ends when the client has been closed.
	context context.Context
	cancel  context.CancelFunc

	// bell wakes the keeper.
	bell chan struct{}

	// mu may be held while a resource's lock is taken, and not the other way
	// round.
	mu sync.Mutex
	// resources are those that have handles, by name.
	resources map[string]*resource
	// ended is closed when the keeper has ended; nil if there is no keeper.
	ended    chan struct{}
	isClosed bool
}

// New returns the leases of a client that has none yet.
func New(caller Caller, clientID string, metrics Metrics, logger *slog.Logger) *Leases {
	ctx, cancel := context.WithCancel(context.Background())
	return &Leases{
		caller:    caller,
		clientID:  clientID,
		metrics:   metrics,
		logger:    logger,
		context:   ctx,
		cancel:    cancel,
		bell:      make(chan struct{}, 1),
		resources: make(map[string]*resource),
	}
}

// Close closes all handles, and returns when their leases are released, after
// five seconds at most. Leases that could not be released expire.
func (l *Leases) Close() {
	defer l.cancel()
	l.mu.Lock()
	l.isClosed = true
	for _, resource := range l.resources {
		resource.close()
	}
	ended := l.ended
	l.mu.Unlock()
	if ended == nil {
		return
	}
	l.ring()
	timer := time.NewTimer(longestClose)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
	}
}

// lease adds a resource, and starts a keeper if there is none.
func (l *Leases) lease(id string, settings Settings, usage usage) (*resource, error) {
	if len(id) < 1 || len(id) > longestName || !utf8.ValidString(id) {
		return nil, ErrInvalidName
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isClosed {
		return nil, fault.ErrClosed
	}
	if l.resources[id] != nil {
		return nil, ErrAlreadyLeased
	}
	resource := newResource(l, id, settings, usage)
	l.resources[id] = resource
	if l.ended == nil {
		l.ended = make(chan struct{})
		go newKeeper(l).run(l.ended)
	} else {
		l.ring()
	}
	return resource, nil
}

// drop takes a resource from its handle, so that its lease is released.
func (l *Leases) drop(resource *resource) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.resources[resource.id] == resource {
		delete(l.resources, resource.id)
		l.ring()
	}
}

// ring wakes the keeper.
func (l *Leases) ring() {
	select {
	case l.bell <- struct{}{}:
	default:
	}
}

// live returns the resources that have handles, by name; or whether the keeper
// has to end: because the client was closed, or because there are none and the
// keeper holds no leases. After that, the next resource starts another keeper.
func (l *Leases) live(holdsLeases bool) (resources map[string]*resource, isOver bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.isClosed:
		return nil, true
	case len(l.resources) == 0 && !holdsLeases:
		l.ended = nil
		return nil, true
	}
	return maps.Clone(l.resources), false
}
