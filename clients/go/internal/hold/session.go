package hold

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"sync"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/pb/holds"
)

// session is a session on a resource with one hold: what the application and
// the keeper both know.
type session struct {
	holds            *Holds
	resource, domain string
	// name is a secret: who knows it can end the session.
	name string
	ttl  time.Duration

	// ended is closed when the copies are not held any more.
	ended chan struct{}

	mu  sync.Mutex
	now status
}

// status is where a hold stands.
type status struct {
	copies         int64
	by             By
	shadow, isHeld bool
}

func newSession(h *Holds, resource, domain string, ttl time.Duration) *session {
	var name [16]byte
	// It never fails.
	_, _ = rand.Read(name[:])
	return &session{
		holds:    h,
		resource: resource,
		domain:   domain,
		name:     hex.EncodeToString(name[:]),
		ttl:      ttl,
		ended:    make(chan struct{}),
	}
}

// again returns another session for the same.
func (s *session) again() *session {
	return newSession(s.holds, s.resource, s.domain, s.ttl)
}

func (s *session) status() status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// begin begins to hold the copies.
func (s *session) begin(answer Answer) {
	s.mu.Lock()
	s.now = status{copies: answer.Copies, by: answer.By, shadow: answer.Shadow, isHeld: true}
	s.mu.Unlock()
	s.holds.settings.Metrics.AddHeldCopies(answer.Copies)
}

// goesOn says that the copies are held as another decision says.
func (s *session) goesOn(by By) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.by = by
}

// end says that the copies are not held any more. It returns whether they were.
func (s *session) end() bool {
	s.mu.Lock()
	wasHeld, copies := s.now.isHeld, s.now.copies
	s.now.isHeld = false
	if wasHeld {
		close(s.ended)
	}
	s.mu.Unlock()
	if wasHeld {
		s.holds.settings.Metrics.AddHeldCopies(-copies)
	}
	return wasHeld
}

// reserve asks for copies.
func (s *session) reserve(ctx context.Context, copies, fewest int64) (Answer, error) {
	response, err := s.holds.caller.Reserve(ctx, &holds.ReserveRequest{
		Resource:         s.resource,
		Session:          s.name,
		SessionTtlMillis: s.ttl.Milliseconds(),
		Hold:             s.holds.settings.Name,
		Domain:           s.domain,
		Copies:           copies,
		MinCopies:        fewest,
	})
	if err != nil {
		return Answer{}, err
	}
	return answerOf(response)
}

// endOnce asks for the end of the session. It returns whether it need not be
// asked for again.
func (s *session) endOnce(ctx context.Context) bool {
	ended, err := s.holds.caller.EndSession(ctx, &holds.EndSessionRequest{
		Resource: s.resource,
		Session:  s.name,
	})
	return (err == nil && ended) || isRefused(err)
}

func (s *session) renewal() *holds.SessionToRenew {
	return &holds.SessionToRenew{
		Resource:  s.resource,
		Session:   s.name,
		TtlMillis: s.ttl.Milliseconds(),
	}
}

// isOf says whether the renewal is one of the session.
func (s *session) isOf(renewed *holds.RenewedSession) bool {
	return renewed.GetSession() == s.name
}

// hasHold says whether a node knows the hold of the session.
func (s *session) hasHold(renewed *holds.RenewedSession) bool {
	for _, one := range renewed.GetHolds() {
		if one.GetHold() == s.holds.settings.Name {
			return true
		}
	}
	return false
}
