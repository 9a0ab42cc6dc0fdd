package tollgate

import (
	"context"
	"fmt"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/pb/holds"
	"github.com/tollgate/tollgate/clients/go/internal/pb/quotaservice"
	"github.com/tollgate/tollgate/clients/go/internal/pb/throttle"
)

// fakeTenants is what a fake knows of hits and copies.
type fakeTenants struct {
	// By resource and domain.
	answers map[[2]string]FakeAnswer
	// The most copies that are held of a resource.
	limits map[string]int64
	// By resource and session.
	sessions map[[2]string]*fakeSession
}

type fakeSession struct {
	hold *holds.Hold
	// When it ends without a renewal.
	ends time.Time
}

func newFakeTenants() fakeTenants {
	return fakeTenants{
		answers: map[[2]string]FakeAnswer{}, limits: map[string]int64{}, sessions: map[[2]string]*fakeSession{},
	}
}

// end takes out the sessions that are over.
func (t *fakeTenants) end(now time.Time) {
	for name, session := range t.sessions {
		if !now.Before(session.ends) {
			delete(t.sessions, name)
		}
	}
}

func (t *fakeTenants) held(resource string) (copies int64) {
	for name, session := range t.sessions {
		if name[0] == resource {
			copies += session.hold.Copies
		}
	}
	return copies
}

// endOf is when a session ends that was renewed now.
func endOf(ttlMillis int64) time.Time { return time.Now().Add(millis(ttlMillis)) }

// AnswerTenant sets the answer about hits and copies of a resource for a domain. There is no wait in such
// an answer: [FakeGrantAfter] refuses with that retry time. With [FakeNoNode], the domain's holds are not
// renewed either.
func (f *Fake) AnswerTenant(resource, domain string, answer FakeAnswer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tenants.answers[[2]string{resource, domain}] = answer
}

// Copies sets the most copies of a resource that are held at once.
func (f *Fake) Copies(resource string, most int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tenants.limits[resource] = most
}

// Held is how many copies of a resource are held.
func (f *Fake) Held(resource string) int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tenants.end(time.Now())
	return f.tenants.held(resource)
}

// Lose ends all holds of a resource. The client notices that when it renews them next.
func (f *Fake) Lose(resource string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name := range f.tenants.sessions {
		if name[0] == resource {
			delete(f.tenants.sessions, name)
		}
	}
}

// answerOf is the answer for a domain. The lock must be held.
func (f *Fake) answerOf(resource, domain string) FakeAnswer {
	if answer, ok := f.tenants.answers[[2]string{resource, domain}]; ok {
		return answer
	}
	return f.byDefault
}

// grant says how many are granted, from fewest to most; or when to ask again.
func (f *Fake) grant(resource, domain string, most, fewest int64) (granted, retryAfterMillis int64, err error) {
	f.mu.Lock()
	answer := f.answerOf(resource, domain)
	f.mu.Unlock()
	for _, count := range []int64{most, fewest} {
		response, err := answer.to(&quotaservice.AllowRequest{
			Namespace: resource, BucketName: domain, TokensRequested: count, MaxWaitTimeOverride: true,
		})
		if err != nil {
			return 0, 0, err
		}
		switch response.Status {
		case quotaservice.AllowResponse_OK:
			return count, 0, nil
		case quotaservice.AllowResponse_REJECTED_NO_BUCKET:
			return 0, 0, &fault.Error{Kind: ErrNotConfigured, Message: "the limits do not have this resource"}
		case quotaservice.AllowResponse_REJECTED_TIMEOUT:
			retryAfterMillis = response.RetryAfterMillis
		case quotaservice.AllowResponse_REJECTED_INVALID_REQUEST:
			return 0, 0, invalid("a name is malformed")
		default:
			return 0, 0, &fault.Error{Kind: ErrFailed, Message: fmt.Sprintf("the fake answers %v", response.Status)}
		}
	}
	return 0, retryAfterMillis, nil
}

func (f *fakeBackend) Hits(_ context.Context, request *throttle.ThrottleRequest) (*throttle.ThrottleResponse, error) {
	if f.isClosed.Load() {
		return nil, ErrClosed
	}
	granted, retryAfter, err := f.grant(request.Resource, request.Domain, request.Copies, request.MinCopies)
	if err != nil {
		return nil, err
	}
	if granted == 0 {
		return &throttle.ThrottleResponse{
			Status: throttle.ThrottleResponse_REJECTED, RetryAfterMillis: retryAfter,
		}, nil
	}
	return &throttle.ThrottleResponse{Granted: granted}, nil
}

func (f *fakeBackend) Reserve(_ context.Context, request *holds.ReserveRequest) (*holds.ReserveResponse, error) {
	if f.isClosed.Load() {
		return nil, ErrClosed
	}
	granted, retryAfter, err := f.grant(request.Resource, request.Domain, request.Copies, request.MinCopies)
	if err != nil {
		return nil, err
	}
	refused := func(retryAfter int64) (*holds.ReserveResponse, error) {
		return &holds.ReserveResponse{
			Status: holds.ReserveResponse_REJECTED, RetryAfterMillis: retryAfter,
		}, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	tenants, ends := &f.tenants, endOf(request.SessionTtlMillis)
	tenants.end(time.Now())
	name := [2]string{request.Resource, request.Session}
	if session, ok := tenants.sessions[name]; ok {
		session.ends = ends
		return &holds.ReserveResponse{Granted: session.hold.Copies}, nil
	}
	if granted == 0 {
		return refused(retryAfter)
	}
	if limit, ok := tenants.limits[request.Resource]; ok {
		granted = min(granted, limit-tenants.held(request.Resource))
		switch {
		case limit < request.MinCopies:
			return refused(0)
		case granted < request.MinCopies:
			return refused(1000)
		}
	}
	hold := &holds.Hold{Hold: request.Hold, Domain: request.Domain, Copies: granted}
	tenants.sessions[name] = &fakeSession{hold, ends}
	return &holds.ReserveResponse{Granted: granted}, nil
}

func (f *fakeBackend) KeepAlive(_ context.Context, request *holds.KeepAliveRequest) (*holds.KeepAliveResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tenants.end(time.Now())
	response := &holds.KeepAliveResponse{}
	for _, asked := range request.Sessions {
		domain := ""
		session := f.tenants.sessions[[2]string{asked.Resource, asked.Session}]
		if session != nil {
			domain = session.hold.Domain
		}
		renewed := &holds.RenewedSession{}
		if _, err := f.answerOf(asked.Resource, domain).to(&quotaservice.AllowRequest{}); err == nil {
			renewed.Resource, renewed.Session = asked.Resource, asked.Session
			if session != nil {
				session.ends = endOf(asked.TtlMillis)
				renewed.Alive, renewed.Holds = true, []*holds.Hold{session.hold}
			}
		}
		// Else there is no answer about this one.
		response.Sessions = append(response.Sessions, renewed)
	}
	return response, nil
}

func (f *fakeBackend) EndSession(_ context.Context, request *holds.EndSessionRequest) (ended bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.tenants.sessions, [2]string{request.Resource, request.Session})
	return true, nil
}
