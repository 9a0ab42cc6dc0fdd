// Package hold keeps the copies of resources that an application holds.
//
// An [Attempt] asks the nodes for copies, and ends with a [Hold]. While there
// is something to keep, one goroutine, the keeper, renews all sessions of a
// client, many in one call, and ends those of holds that are released. What a
// hold and the keeper share is the session.
package hold

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/pb/holds"
)

const (
	// longestClose is how long closing may take.
	longestClose = 5 * time.Second

	// longestRelease is how long a release may take.
	longestRelease = 5 * time.Second

	// mostNameBytes is the most bytes of the name of a hold.
	mostNameBytes = 128
)

// Caller makes the calls to the nodes. It returns soon after the context ends,
// and may be used by several goroutines at once. Its errors are those of package
// fault.
type Caller interface {
	Reserve(ctx context.Context, request *holds.ReserveRequest) (*holds.ReserveResponse, error)
	KeepAlive(ctx context.Context, request *holds.KeepAliveRequest) (*holds.KeepAliveResponse, error)
	// EndSession returns false if the session may not be ended.
	EndSession(ctx context.Context, request *holds.EndSessionRequest) (ended bool, err error)
}

// Metrics is told about the holds, by several goroutines at once.
type Metrics interface {
	// AddHeldCopies tells that more copies are held; or fewer.
	AddHeldCopies(more int64)
	HoldLost()
}

// Settings are those of all holds of a client.
type Settings struct {
	// Name is the name of the client, which operators see.
	Name string
	// Deadline is the time that the client's requests have for an answer.
	Deadline time.Duration
	// Fallback says whether copies may be used although no node has said so.
	Fallback func(resource string, copies int64, now time.Time) bool
	Metrics  Metrics
	Logger   *slog.Logger
}

// Holds are the holds of one client.
type Holds struct {
	caller   Caller
	settings Settings

	// context is that of all calls, and ends when the client has been closed.
	context context.Context
	cancel  context.CancelFunc

	// bell wakes the keeper.
	bell chan struct{}
	// closed is closed when the client is.
	closed chan struct{}
	// ended is closed once the client is closed and nothing is left to do.
	ended chan struct{}

	mu sync.Mutex
	// events are those that the keeper has not seen yet.
	events []event
	// isKept says whether there is a keeper.
	isKept   bool
	isClosed bool
	// attempts are under way.
	attempts int
}

// event is something that the keeper is told.
type event func(k *keeper, now time.Time)

// New returns the holds of a client that has none yet.
func New(caller Caller, settings Settings) *Holds {
	settings.Name = nameOf(settings.Name)
	ctx, cancel := context.WithCancel(context.Background())
	return &Holds{
		caller:   caller,
		settings: settings,
		context:  ctx,
		cancel:   cancel,
		bell:     make(chan struct{}, 1),
		closed:   make(chan struct{}),
		ended:    make(chan struct{}),
	}
}

// nameOf returns a name that a node accepts.
func nameOf(client string) string {
	name := strings.ToValidUTF8(client, "\uFFFD")
	for len(name) > mostNameBytes {
		_, size := utf8.DecodeLastRuneInString(name)
		name = name[:len(name)-size]
	}
	return cmp.Or(name, "client")
}

// Close ends all holds, and returns when a node knows that, after five seconds
// at most. Sessions that could not be ended end with their ttl.
func (h *Holds) Close() {
	defer h.cancel()
	h.mu.Lock()
	if !h.isClosed {
		h.isClosed = true
		close(h.closed)
		if h.isKept {
			h.tell((*keeper).endAll)
		}
		h.mayEnd()
	}
	h.mu.Unlock()
	wait(h.ended, longestClose)
}

// wait waits for a channel to be closed, or until the time is over.
func wait(done <-chan struct{}, longest time.Duration) {
	timer := time.NewTimer(longest)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}

// tell tells the keeper of an event, and starts one if there is none. The lock
// must be held.
func (h *Holds) tell(event event) {
	h.events = append(h.events, event)
	if !h.isKept {
		h.isKept = true
		go newKeeper(h).run()
		return
	}
	select {
	case h.bell <- struct{}{}:
	default:
	}
}

// post tells the keeper of an event.
func (h *Holds) post(event event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tell(event)
}

// take returns the new events for the keeper; or whether it has to end, as there
// are none and it has nothing to do. After that, the next event starts another
// keeper.
func (h *Holds) take(isIdle bool) (events []event, isOver bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.events) == 0 && isIdle {
		h.isKept = false
		h.mayEnd()
		return nil, true
	}
	events, h.events = h.events, nil
	return events, false
}

// mayEnd tells those who close the client if nothing is left to do. The lock
// must be held.
func (h *Holds) mayEnd() {
	if !h.isClosed || h.isKept || h.attempts > 0 {
		return
	}
	select {
	case <-h.ended:
	default:
		close(h.ended)
	}
}

// Attempt asks for copies. Without them, it leaves nothing behind.
type Attempt struct {
	holds   *Holds
	session *session
	// mayLiveUntil is the time until which a node may keep the session; zero if
	// no node can know it.
	mayLiveUntil time.Time
	// grantedAt is when the request was sent with which a node has granted
	// copies.
	grantedAt time.Time
	isOver    bool
}

// Attempt begins to ask for copies. [Attempt.End] must be called in the end.
func (h *Holds) Attempt(resource, domain string, ttl time.Duration) (*Attempt, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.isClosed {
		return nil, fault.ErrClosed
	}
	h.attempts++
	return &Attempt{holds: h, session: newSession(h, resource, domain, ttl)}, nil
}

// Closed is closed when the client is.
func (a *Attempt) Closed() <-chan struct{} { return a.holds.closed }

// Reserve asks the nodes for copies, for as long as it may take.
func (a *Attempt) Reserve(
	ctx context.Context, copies, fewest int64, deadline time.Duration,
) (Answer, error) {
	sent, before := time.Now(), a.mayLiveUntil
	a.mayLiveUntil = later(before, sent.Add(deadline).Add(a.session.ttl))
	ctx, cancel := context.WithDeadline(ctx, sent.Add(deadline))
	defer cancel()
	// Once closing has taken too long, nobody waits for an answer.
	defer context.AfterFunc(a.holds.context, cancel)()
	answer, err := a.session.reserve(ctx, copies, fewest)
	if err != nil && a.holds.context.Err() != nil {
		return Answer{}, fault.ErrClosed
	}
	switch {
	case err == nil && answer.IsGranted():
		a.grantedAt = sent
	case err == nil && answer.By != ByNode:
		// The store of a degraded node may have recorded it.
	case err != nil && mayHaveArrived(err):
	default:
		a.mayLiveUntil = before
	}
	return answer, err
}

// mayHaveArrived says whether a node may have carried out a request that has
// this error.
func mayHaveArrived(err error) bool {
	for _, kind := range []error{
		fault.ErrInvalid, fault.ErrUnreachable, fault.ErrOverloaded, fault.ErrForbidden,
		fault.ErrNotConfigured, fault.ErrClosed,
	} {
		if errors.Is(err, kind) {
			return false
		}
	}
	return true
}

// Succeed ends the attempt with these copies.
func (a *Attempt) Succeed(answer Answer) (*Hold, error) {
	h := a.holds
	if answer.By != ByNode {
		// The nodes may have recorded more copies: that session ends, and another
		// one begins.
		before, until := a.session, a.mayLiveUntil
		a.session, a.mayLiveUntil = before.again(), time.Time{}
		if !until.IsZero() {
			h.post(func(k *keeper, now time.Time) { k.end(before, until, now) })
		}
	}
	session, grantedAt, mayLiveUntil := a.session, a.grantedAt, a.mayLiveUntil
	session.begin(answer)
	if !a.keep(func(k *keeper, now time.Time) { k.hold(session, grantedAt, mayLiveUntil, now) }) {
		// What was granted goes with the end of the attempt.
		session.end()
		return nil, fault.ErrClosed
	}
	return &Hold{session}, nil
}

// keep ends the attempt, and tells the keeper of its hold, unless the client is
// closed.
func (a *Attempt) keep(event event) bool {
	h := a.holds
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.isClosed {
		return false
	}
	a.isOver = true
	h.attempts--
	h.tell(event)
	return true
}

// End ends the attempt. If it has no copies, a session that a node may know is
// ended.
func (a *Attempt) End() {
	if a.isOver {
		return
	}
	a.isOver = true
	h, session, until := a.holds, a.session, a.mayLiveUntil
	h.mu.Lock()
	defer h.mu.Unlock()
	h.attempts--
	if !until.IsZero() {
		h.tell(func(k *keeper, now time.Time) { k.end(session, until, now) })
	}
	h.mayEnd()
}

// Hold is copies of a resource that a domain holds.
type Hold struct{ session *session }

// Resource is the resource.
func (h *Hold) Resource() string { return h.session.resource }

// Domain is whom they are held for.
func (h *Hold) Domain() string { return h.session.domain }

// Copies is how many.
func (h *Hold) Copies() int64 { return h.session.status().copies }

// DecidedBy is who has granted them, as of now.
func (h *Hold) DecidedBy() By { return h.session.status().by }

// Shadow says whether so many were granted only because the limits are not
// enforced yet.
func (h *Hold) Shadow() bool { return h.session.status().shadow }

// IsHeld says whether they are still held.
func (h *Hold) IsHeld() bool { return h.session.status().isHeld }

// Lost is closed when the copies are not held any more.
func (h *Hold) Lost() <-chan struct{} { return h.session.ended }

// Release releases the copies, and waits until a node knows that, for five
// seconds at most.
func (h *Hold) Release() {
	session, done := h.session, make(chan struct{})
	session.end()
	session.holds.post(func(k *keeper, now time.Time) { k.release(session, done, now) })
	wait(done, longestRelease)
}

// later is the later one of two times.
func later(one, other time.Time) time.Time {
	if one.After(other) {
		return one
	}
	return other
}
