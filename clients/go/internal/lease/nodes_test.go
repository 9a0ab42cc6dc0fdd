package lease_test

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/lease"
	"github.com/tollgate/tollgate/clients/go/internal/pb/doorman"
)

// nodes is a Caller in memory, which the test leads: what it answers, and what
// it was asked. Clients get all that they want unless it says otherwise.
type nodes struct {
	mu    sync.Mutex
	state state
}

type state struct {
	// capacities are the most that is leased, by resource.
	capacities map[string]float64
	safe       *float64
	isDegraded bool
	// length is how long leases are valid, in seconds; for good if it is 0.
	length int64
	// interval is the refresh interval, in seconds.
	interval int64
	// delay is how long an answer takes.
	delay time.Duration
	// forbidden is part of the names that are leased to nobody, and released for
	// nobody.
	forbidden string
	// err is the answer to all requests, unless it is nil.
	err error
	// change changes an answer before it is given.
	change func(answer *doorman.GetCapacityResponse)

	// asked are the requests for leases so far, and releases the names of each
	// release.
	asked    []request
	releases [][]string
	// metrics are what was said last of each resource.
	metrics map[string][2]float64
	// failures is the number of refreshes that have failed.
	failures int
}

type request struct {
	at    time.Time
	names []string
	wants []float64
	has   []*doorman.Lease
}

// set changes or reads the state.
func (n *nodes) set(change func(s *state)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change(&n.state)
}

func (n *nodes) asked() (asked []request) {
	n.set(func(s *state) { asked = slices.Clone(s.asked) })
	return asked
}

func (n *nodes) released() (names []string) {
	n.set(func(s *state) { names = slices.Sorted(slices.Values(slices.Concat(s.releases...))) })
	return names
}

func (n *nodes) failures() (failures int) {
	n.set(func(s *state) { failures = s.failures })
	return failures
}

// metricsOf returns the wants and the capacity that were said last.
func (n *nodes) metricsOf(resource string) (metrics [2]float64) {
	n.set(func(s *state) { metrics = s.metrics[resource] })
	return metrics
}

func (s *state) check(names []string) error {
	isForbidden := func(name string) bool { return strings.Contains(name, s.forbidden) }
	if s.forbidden != "" && slices.ContainsFunc(names, isForbidden) {
		return fault.ErrForbidden
	}
	return s.err
}

func pause(ctx context.Context, delay time.Duration) error {
	if delay == 0 {
		return nil
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (n *nodes) GetCapacity(
	ctx context.Context, r *doorman.GetCapacityRequest,
) (*doorman.GetCapacityResponse, error) {
	var answer *doorman.GetCapacityResponse
	var err error
	var delay time.Duration
	if _, err := proto.Marshal(r); err != nil {
		return nil, err
	}
	n.set(func(s *state) {
		s.asked = append(s.asked, asRequest(r))
		delay = s.delay
		if err = s.check(asRequest(r).names); err == nil {
			answer = s.answer(r)
		}
	})
	if late := pause(ctx, delay); late != nil {
		return nil, late
	}
	return answer, err
}

func asRequest(r *doorman.GetCapacityRequest) request {
	asked := request{at: time.Now()}
	for _, one := range r.GetResource() {
		asked.names = append(asked.names, one.GetResourceId())
		asked.wants = append(asked.wants, one.GetWants())
		asked.has = append(asked.has, one.GetHas())
	}
	return asked
}

func (s *state) answer(r *doorman.GetCapacityRequest) *doorman.GetCapacityResponse {
	answer := &doorman.GetCapacityResponse{}
	expires := int64(math.MaxInt64)
	if s.length > 0 {
		expires = time.Now().Unix() + s.length
	}
	for _, asked := range r.GetResource() {
		capacity := asked.GetWants()
		if most, ok := s.capacities[asked.GetResourceId()]; ok {
			capacity = min(capacity, most)
		}
		answer.Response = append(answer.Response, &doorman.ResourceResponse{
			ResourceId: asked.ResourceId,
			Gets: &doorman.Lease{
				ExpiryTime:      proto.Int64(expires),
				RefreshInterval: proto.Int64(s.interval),
				Capacity:        proto.Float64(capacity),
			},
			SafeCapacity: s.safe,
			Degraded:     proto.Bool(s.isDegraded),
		})
	}
	if s.change != nil {
		s.change(answer)
	}
	return answer
}

func (n *nodes) ReleaseCapacity(
	ctx context.Context, r *doorman.ReleaseCapacityRequest,
) (*doorman.ReleaseCapacityResponse, error) {
	if _, err := proto.Marshal(r); err != nil {
		return nil, err
	}
	var err error
	var delay time.Duration
	n.set(func(s *state) {
		delay = s.delay
		if err = s.check(r.GetResourceId()); err == nil {
			s.releases = append(s.releases, r.GetResourceId())
		}
	})
	if late := pause(ctx, delay); late != nil {
		return nil, late
	}
	return &doorman.ReleaseCapacityResponse{}, err
}

func (n *nodes) Lease(resource string, wants, capacity float64) {
	n.set(func(s *state) { s.metrics[resource] = [2]float64{wants, capacity} })
}

func (n *nodes) RefreshFailed() {
	n.set(func(s *state) { s.failures++ })
}

// start returns nodes, and the leases of a client of theirs.
func start() (*nodes, *lease.Leases) {
	n := &nodes{state: state{
		capacities: make(map[string]float64),
		interval:   1,
		metrics:    make(map[string][2]float64),
	}}
	return n, lease.New(n, "client", n, slog.New(slog.DiscardHandler))
}

// scenario runs a test on fake time. No goroutine may be left once the leases
// are closed.
func scenario(t *testing.T, test func(t *testing.T, n *nodes, leases *lease.Leases)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n, leases := start()
		defer leases.Close()
		test(t, n, leases)
	})
}

// wants are settings that ask for so much.
func wants(capacity float64) lease.Settings {
	return lease.Settings{Wants: &capacity}
}

// measured are settings that ask for what is demanded.
var measured lease.Settings

func rateOf(t *testing.T, l *lease.Leases, name string, s lease.Settings) *lease.RateLimiter {
	t.Helper()
	return must(l.RateLimiter(name, s))(t)
}

func gaugeOf(t *testing.T, l *lease.Leases, name string, s lease.Settings) *lease.Gauge {
	t.Helper()
	return must(l.Gauge(name, s))(t)
}

func capacityOf(t *testing.T, l *lease.Leases, name string, s lease.Settings) *lease.Capacity {
	t.Helper()
	return must(l.Capacity(name, s))(t)
}

// must returns the value of a call that must not fail.
func must[T any](value T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

// want compares a number.
func want[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// wantBetween compares a number with bounds.
func wantBetween[T int | float64 | time.Duration](t *testing.T, what string, got, least, most T) {
	t.Helper()
	if got < least || got > most {
		t.Errorf("%s: %v is not between %v and %v", what, got, least, most)
	}
}

// wantFails expects an error.
func wantFails[T any](t *testing.T, want error) func(T, error) {
	return func(_ T, err error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("got %v, want %v", err, want)
		}
	}
}
