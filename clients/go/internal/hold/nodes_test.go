package hold_test

import (
	"context"
	"log/slog"
	"maps"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/hold"
	"github.com/tollgate/tollgate/clients/go/internal/pb/holds"
)

// nodes is a Caller in memory, which the test leads: what it answers, and what
// it was asked.
type nodes struct {
	mu    sync.Mutex
	state state
}

type state struct {
	// sessions are those that live, by name.
	sessions map[string]*live
	// delay is how long an answer takes.
	delay time.Duration
	// noReplies carries requests out, and does not answer.
	noReplies bool
	// err is the answer to all requests, unless it is nil.
	err error
	// isDegraded says that the store does not answer.
	isDegraded bool
	// forbidden is a resource that may not be used, with which a request is
	// refused.
	forbidden string
	// change changes the answer to a renewal before it is given.
	change func(answer *holds.KeepAliveResponse)

	// reserves, renewals and ends are the calls so far.
	reserves, ends int
	renewals       [][]string
	// heldCopies and lost are what the metrics say.
	heldCopies int64
	lost       int
}

type live struct {
	resource string
	hold     *holds.Hold
	ends     time.Time
}

// set changes or reads the state.
func (n *nodes) set(change func(s *state)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	maps.DeleteFunc(n.state.sessions, func(_ string, one *live) bool { return !time.Now().Before(one.ends) })
	change(&n.state)
}

// now returns the state. Its references are not safe to use.
func (n *nodes) now() (now state) {
	n.set(func(s *state) { now = *s })
	return now
}

// held is how many copies the nodes know.
func (n *nodes) held() (copies int64) {
	n.set(func(s *state) {
		for _, one := range s.sessions {
			copies += one.hold.Copies
		}
	})
	return copies
}

// answer carries out a request, and then waits as long as the answer takes.
func (n *nodes) answer(ctx context.Context, resources []string, carryOut func(s *state)) (err error) {
	var delay time.Duration
	var noReplies bool
	n.set(func(s *state) {
		delay, noReplies, err = s.delay, s.noReplies, s.err
		for _, resource := range resources {
			if resource == s.forbidden {
				err = forbidden
			}
		}
		if err == nil {
			carryOut(s)
		}
	})
	if noReplies {
		<-ctx.Done()
		return timeout
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return err
	case <-ctx.Done():
		return timeout
	}
}

func (n *nodes) Reserve(ctx context.Context, r *holds.ReserveRequest) (*holds.ReserveResponse, error) {
	response := &holds.ReserveResponse{}
	err := n.answer(ctx, []string{r.Resource}, func(s *state) {
		s.reserves++
		ends := time.Now().Add(time.Duration(r.SessionTtlMillis) * time.Millisecond)
		switch known := s.sessions[r.Session]; {
		case s.isDegraded:
			response.Granted, response.Degraded = r.MinCopies, true
		case known != nil:
			known.ends, response.Granted = ends, known.hold.Copies
		default:
			hold := &holds.Hold{Hold: r.Hold, Domain: r.Domain, Copies: r.Copies}
			s.sessions[r.Session] = &live{r.Resource, hold, ends}
			response.Granted = r.Copies
		}
	})
	return response, err
}

func (n *nodes) KeepAlive(ctx context.Context, r *holds.KeepAliveRequest) (*holds.KeepAliveResponse, error) {
	response := &holds.KeepAliveResponse{}
	var resources, names []string
	for _, one := range r.Sessions {
		resources, names = append(resources, one.Resource), append(names, one.Session)
	}
	n.set(func(s *state) { s.renewals = append(s.renewals, names) })
	err := n.answer(ctx, resources, func(s *state) {
		response.Degraded = s.isDegraded
		for _, one := range r.Sessions {
			renewed := &holds.RenewedSession{Resource: one.Resource, Session: one.Session}
			known := s.sessions[one.Session]
			switch {
			case s.isDegraded:
				renewed.Alive = true
			case known != nil:
				known.ends = time.Now().Add(time.Duration(one.TtlMillis) * time.Millisecond)
				renewed.Alive, renewed.Holds = true, []*holds.Hold{known.hold}
			}
			response.Sessions = append(response.Sessions, renewed)
		}
		if s.change != nil {
			s.change(response)
		}
	})
	return response, err
}

func (n *nodes) EndSession(ctx context.Context, r *holds.EndSessionRequest) (ended bool, err error) {
	err = n.answer(ctx, []string{r.Resource}, func(s *state) {
		s.ends++
		ended = !s.isDegraded
		if ended {
			delete(s.sessions, r.Session)
		}
	})
	return ended, err
}

func (n *nodes) AddHeldCopies(more int64) { n.set(func(s *state) { s.heldCopies += more }) }

func (n *nodes) HoldLost() { n.set(func(s *state) { s.lost++ }) }

// start returns nodes, and the holds of a client of theirs.
func start(fallback bool) (*nodes, *hold.Holds) {
	n := &nodes{state: state{sessions: make(map[string]*live)}}
	return n, hold.New(n, hold.Settings{
		Name:     "client",
		Deadline: 200 * time.Millisecond,
		Fallback: func(string, int64, time.Time) bool { return fallback },
		Metrics:  n,
		Logger:   slog.New(slog.DiscardHandler),
	})
}

// scenario runs a test on fake time. No goroutine may be left once the holds are
// closed.
func scenario(t *testing.T, test func(t *testing.T, n *nodes, h *hold.Holds)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n, h := start(false)
		defer h.Close()
		test(t, n, h)
	})
}

// reserve asks for copies once.
func reserve(ctx context.Context, h *hold.Holds, resource string, copies int64, ttl time.Duration) (*hold.Hold, error) {
	attempt, err := h.Attempt(resource, "acme", ttl)
	if err != nil {
		return nil, err
	}
	defer attempt.End()
	answer, err := attempt.Reserve(ctx, copies, copies, time.Second)
	if err != nil {
		return nil, err
	}
	return attempt.Succeed(answer)
}

// holdOf asks for copies that are granted.
func holdOf(t *testing.T, h *hold.Holds, resource string, copies int64, ttl time.Duration) *hold.Hold {
	t.Helper()
	held, err := reserve(t.Context(), h, resource, copies, ttl)
	if err != nil || !held.IsHeld() {
		t.Fatal(err)
	}
	return held
}

// want compares a value.
func want[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}
