package tollgate

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/hold"
	"github.com/tollgate/tollgate/clients/go/internal/pb/throttle"
)

func TestHitsAreGrantedOnlyIfTheAnswerSaysSo(t *testing.T) {
	response := func(status int32, granted, retryAfterMillis int64, degraded bool) *throttle.ThrottleResponse {
		return &throttle.ThrottleResponse{
			Status: throttle.ThrottleResponse_Status(status), Granted: granted,
			RetryAfterMillis: retryAfterMillis, Degraded: degraded,
		}
	}
	for _, one := range []struct {
		response *throttle.ThrottleResponse
		expected TenantDecision
	}{
		{response(0, 3, 0, false), TenantDecision{Granted: true, Copies: 3, DecidedBy: ByNode}},
		{response(0, 3, 0, true), TenantDecision{Granted: true, Copies: 3, DecidedBy: ByDegradedNode}},
		{response(1, 0, 20, false), TenantDecision{Reason: ReasonLimit, RetryAfter: 20 * time.Millisecond, DecidedBy: ByNode}},
		{response(1, 0, 0, false), TenantDecision{Reason: ReasonLimit, DecidedBy: ByNode}},
		{response(1, 0, 20, true), TenantDecision{Reason: ReasonLimit, RetryAfter: 20 * time.Millisecond, DecidedBy: ByDegradedNode}},
		{response(1, 0, 0, true), TenantDecision{Reason: ReasonUnavailable, DecidedBy: ByDegradedNode}},
	} {
		if decision, err := fromThrottle(one.response); err != nil || decision != one.expected {
			t.Errorf("%+v, %v", decision, err)
		}
	}
	for _, one := range [][2]int64{{0, 0}, {0, -1}, {2, 1}, {-1, 1}} {
		decision, err := fromThrottle(response(int32(one[0]), one[1], 0, false))
		if !errors.Is(err, ErrFailed) || decision.Granted {
			t.Errorf("%+v, %v", decision, err)
		}
	}
}

func TestRefusalsOfCopies(t *testing.T) {
	for by, reason := range map[hold.By]Reason{hold.ByNode: ReasonLimit, hold.ByDegradedNode: ReasonUnavailable} {
		decision := fromAnswer(hold.Answer{RetryAfter: time.Second, By: by})
		if decision != (TenantDecision{Reason: reason, RetryAfter: time.Second, DecidedBy: DecidedBy(by)}) {
			t.Errorf("%+v", decision)
		}
	}
}

// mistaken fails on use.
type mistaken struct{ fakeBackend }

func TestTenantRequestsWithMistakesAreNotSent(t *testing.T) {
	client := newClient(&mistaken{}, newSettings([]Option{WithFallback(FallbackAllow)}))
	defer client.Close()
	for name, one := range map[string]struct {
		resource, domain string
		options          []TenantOption
	}{
		"the resource is not UTF-8": {"\xff", "acme", nil},
		"the domain is not UTF-8":   {"sandbox", "\xff", nil},
		"a long name":               {strings.Repeat("a", longestName+1), "acme", nil},
		"more at least than asked":  {"sandbox", "acme", []TenantOption{MinCopies(2)}},
		"a negative number":         {"sandbox", "acme", []TenantOption{Copies(-1)}},
		"a negative least number":   {"sandbox", "acme", []TenantOption{MinCopies(-1)}},
		"a short ttl":               {"sandbox", "acme", []TenantOption{TTL(999 * time.Millisecond)}},
		"a long ttl":                {"sandbox", "acme", []TenantOption{TTL(86_401 * time.Second)}},
	} {
		if _, err := client.Hits(t.Context(), one.resource, one.domain, one.options...); !errors.Is(err, ErrInvalid) {
			t.Error(name, err)
		}
		if _, err := client.Hold(t.Context(), one.resource, one.domain, one.options...); !errors.Is(err, ErrInvalid) {
			t.Error(name, err)
		}
	}
}

func TestTenantOptions(t *testing.T) {
	var none RequestOption
	r, err := newTenantRequest("sandbox", "acme", []TenantOption{
		nil, none, Copies(7), MinCopies(0), MaxWait(time.Minute), Deadline(time.Second), TTL(time.Hour), NotCritical(),
	})
	expected := TenantRequest{"sandbox", "acme", 7, 1, time.Minute, time.Second, time.Hour}
	if err != nil || r != expected {
		t.Fatalf("%+v, %v", r, err)
	}
	r, err = newTenantRequest("sandbox", "acme", []TenantOption{Tokens(3), MaxWait(-time.Second)})
	if err != nil || r != (TenantRequest{"sandbox", "acme", 3, 3, 0, 0, defaultTTL}) {
		t.Fatalf("%+v, %v", r, err)
	}
	r, err = newTenantRequest("sandbox", "acme", []TenantOption{Copies(0)})
	if err != nil || r.Copies != 1 || r.MinCopies != 1 {
		t.Fatalf("%+v, %v", r, err)
	}
}

// tenants is a test in a bubble, with a fake that grants, and a client of it.
func tenants(t *testing.T, test func(t *testing.T, fake *Fake, client *Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		fake := NewFake(FakeGrant())
		client := fake.Client()
		defer client.Close()
		test(t, fake, client)
	})
}

func hits(t *testing.T, client *Client, options ...TenantOption) TenantDecision {
	t.Helper()
	decision, err := client.Hits(t.Context(), "sandbox", "acme", options...)
	if err != nil || !decision.Granted {
		t.Fatal(err)
	}
	return decision
}

func holdFor(t *testing.T, client *Client, domain string, options ...TenantOption) *Hold {
	t.Helper()
	held, err := client.Hold(t.Context(), "sandbox", domain, options...)
	if err != nil || !held.IsHeld() {
		t.Fatal(err)
	}
	return held
}

// refusedBy is the refusal in an error.
func refusedBy[T any](_ T, err error) (reason Reason, retryAfter time.Duration) {
	var refused *RefusedError
	if !errors.As(err, &refused) {
		panic(err)
	}
	return refused.Decision.Reason, refused.Decision.RetryAfter
}

func equal[T comparable](t *testing.T, found, expected T) {
	t.Helper()
	if found != expected {
		t.Fatalf("%v instead of %v", found, expected)
	}
}

// timeToLoss is how long it takes until the copies are lost.
func timeToLoss(t *testing.T, held *Hold) time.Duration {
	t.Helper()
	start := time.Now()
	select {
	case <-held.Lost():
	case <-time.After(600 * time.Second):
		t.Fatal("not lost")
	}
	equal(t, held.IsHeld(), false)
	return time.Since(start)
}

func TestAFakeAnswersAboutHits(t *testing.T) {
	tenants(t, func(t *testing.T, fake *Fake, client *Client) {
		equal(t, hits(t, client, Copies(3)), TenantDecision{Granted: true, Copies: 3, DecidedBy: ByNode})
		fake.AnswerTenant("sandbox", "acme", FakeRefuse(time.Second))
		reason, after := refusedBy(client.Hits(t.Context(), "sandbox", "acme"))
		equal(t, reason, ReasonLimit)
		equal(t, after, time.Second)
		fake.AnswerTenant("sandbox", "acme", FakeRate(1, 4))
		equal(t, hits(t, client, Copies(10), MinCopies(4)).Copies, 4)
		start := time.Now()
		hits(t, client, MaxWait(10*time.Second))
		if took := time.Since(start); took < time.Second || took > 2*time.Second {
			t.Fatal(took)
		}
		_, after = refusedBy(client.Hits(t.Context(), "sandbox", "acme", Copies(4), MaxWait(2*time.Second)))
		if after <= 2*time.Second {
			t.Fatal(after)
		}
		fake.AnswerTenant("sandbox", "acme", FakeNoBucket())
		_, err := client.Hits(t.Context(), "sandbox", "acme")
		var none *NoDecisionError
		if !errors.Is(err, ErrNotConfigured) || !errors.As(err, &none) {
			t.Fatal(err)
		}
		fake.AnswerTenant("sandbox", "acme", FakeInvalid())
		if _, err := client.Hits(t.Context(), "sandbox", "acme"); !errors.Is(err, ErrInvalid) {
			t.Fatal(err)
		}
	})
}

func TestHitsAndHoldsWaitNoLongerThanTheirContext(t *testing.T) {
	tenants(t, func(t *testing.T, fake *Fake, client *Client) {
		fake.AnswerTenant("sandbox", "acme", FakeRefuse(7*time.Second))
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, after := refusedBy(client.Hits(ctx, "sandbox", "acme", MaxWait(time.Hour)))
		equal(t, after, 7*time.Second)
		if took := time.Since(start); took < 7*time.Second || took > 8*time.Second {
			t.Fatal(took)
		}
		_, _ = refusedBy(client.Hold(ctx, "sandbox", "acme", MaxWait(time.Hour)))
		if took := time.Since(start); took >= 10*time.Second {
			t.Fatal(took)
		}
		cancel()
		if _, err := client.Hits(ctx, "sandbox", "acme"); err != context.Canceled {
			t.Fatal(err)
		}
		if _, err := client.Hold(ctx, "sandbox", "acme"); err != context.Canceled {
			t.Fatal(err)
		}
		// During the wait.
		ctx, cancel = context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		start = time.Now()
		if _, err := client.Hold(ctx, "sandbox", "acme", MaxWait(time.Hour)); err != context.Canceled {
			t.Fatal(err)
		}
		equal(t, time.Since(start), time.Second)
	})
}

func TestAFakeKnowsWhatIsHeld(t *testing.T) {
	tenants(t, func(t *testing.T, fake *Fake, client *Client) {
		fake.Copies("sandbox", 5)
		first := holdFor(t, client, "acme", Copies(3))
		equal(t, fmt.Sprint(first), "Hold(sandbox, acme, copies: 3, held: true)")
		reason, after := refusedBy(client.Hold(t.Context(), "sandbox", "acme", Copies(3)))
		equal(t, reason, ReasonLimit)
		equal(t, after, time.Second)
		reason, after = refusedBy(client.Hold(t.Context(), "sandbox", "acme", Copies(6)))
		equal(t, reason, ReasonLimit)
		equal(t, after, 0)
		second := holdFor(t, client, "acme", Copies(6), MinCopies(1))
		equal(t, second.Copies(), 2)
		equal(t, fake.Held("sandbox"), 5)
		// By several at once, and again.
		var releasing sync.WaitGroup
		for range 3 {
			releasing.Go(first.Release)
		}
		releasing.Wait()
		first.Release()
		equal(t, first.IsHeld(), false)
		<-first.Lost()
		equal(t, fake.Held("sandbox"), 2)
		second.Release()
		equal(t, fake.Held("sandbox"), 0)
	})
}

func TestWhatIsLostIsNoticedAtTheNextRenewal(t *testing.T) {
	tenants(t, func(t *testing.T, fake *Fake, client *Client) {
		held := holdFor(t, client, "acme", TTL(9*time.Second))
		time.Sleep(100 * time.Second)
		equal(t, held.IsHeld(), true)
		equal(t, held.DecidedBy(), ByNode)
		fake.Lose("sandbox")
		if took := timeToLoss(t, held); took > 3*time.Second {
			t.Fatal(took)
		}
		// There is nothing to release.
		held.Release()
		holdFor(t, client, "acme").Release()
	})
}

func TestAHoldThatNobodyRenewsIsLostAThirdOfItsTTLEarly(t *testing.T) {
	tenants(t, func(t *testing.T, fake *Fake, client *Client) {
		held := holdFor(t, client, "acme", TTL(9*time.Second))
		fake.AnswerTenant("sandbox", "acme", FakeNoNode())
		equal(t, timeToLoss(t, held), 6*time.Second)
	})
}

func TestWithAFallbackAHoldGoesOnAndIsRecordedAgain(t *testing.T) {
	tenants(t, func(t *testing.T, fake *Fake, _ *Client) {
		client := fake.Client(WithFallback(FallbackAllow))
		defer client.Close()
		held := holdFor(t, client, "acme", Copies(2), TTL(9*time.Second))
		fake.AnswerTenant("sandbox", "acme", FakeNoNode())
		time.Sleep(100 * time.Second)
		equal(t, held.IsHeld(), true)
		equal(t, held.DecidedBy(), ByFallback)
		// Its session has ended meanwhile.
		fake.Lose("sandbox")
		other := holdFor(t, client, "acme", Copies(7), MinCopies(3))
		equal(t, other.Copies(), 3)
		equal(t, other.DecidedBy(), ByFallback)
		fake.AnswerTenant("sandbox", "acme", FakeGrant())
		time.Sleep(10 * time.Second)
		for _, one := range []*Hold{held, other} {
			equal(t, one.IsHeld(), true)
			equal(t, one.DecidedBy(), ByNode)
		}
		equal(t, fake.Held("sandbox"), 5)
		fake.Lose("sandbox")
		if took := timeToLoss(t, held); took > 3*time.Second {
			t.Fatal(took)
		}
	})
}

func TestWhatTheFallbackGrantedIsLostIfThereIsNoRoomLater(t *testing.T) {
	tenants(t, func(t *testing.T, fake *Fake, others *Client) {
		client := fake.Client(WithResourceFallback("sandbox", FallbackAllow))
		defer client.Close()
		fake.Copies("sandbox", 1)
		fake.AnswerTenant("sandbox", "acme", FakeNoNode())
		held := holdFor(t, client, "acme", TTL(9*time.Second))
		other := holdFor(t, others, "other")
		time.Sleep(100 * time.Second)
		equal(t, held.IsHeld() && other.IsHeld(), true)
		fake.AnswerTenant("sandbox", "acme", FakeGrant())
		if took := timeToLoss(t, held); took > 3*time.Second {
			t.Fatal(took)
		}
		equal(t, other.IsHeld(), true)
		equal(t, fake.Held("sandbox"), 1)
	})
}

func TestAFallbackCanRefuseOrBeOfAnotherResource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var refused []string
		client := NewFake(FakeNoNode()).Client(WithFallback(FallbackDeny),
			WithResourceFallback("search", FallbackRate(0, 3)), WithResourceFallback("none", nil),
			OnTenantRefused(func(request TenantRequest, decision TenantDecision) {
				refused = append(refused, request.Resource+" "+request.Domain+" "+decision.Reason.String())
			}))
		defer client.Close()
		reason, after := refusedBy(client.Hold(t.Context(), "sandbox", "acme"))
		equal(t, reason, ReasonUnavailable)
		equal(t, after, 0)
		search := []TenantOption{Copies(10), MinCopies(2)}
		decision, err := client.Hits(t.Context(), "search", "acme", search...)
		if err != nil || decision != (TenantDecision{Granted: true, Copies: 2, DecidedBy: ByFallback}) {
			t.Fatalf("%+v, %v", decision, err)
		}
		reason, after = refusedBy(client.Hits(t.Context(), "search", "acme", search...))
		equal(t, reason, ReasonLimit)
		equal(t, after, 0)
		if _, err := client.Hits(t.Context(), "none", "acme"); !errors.Is(err, ErrUnreachable) {
			t.Fatal(err)
		}
		expected := []string{"sandbox acme the quota service can't decide", "search acme the limit is reached"}
		if !slices.Equal(refused, expected) {
			t.Fatal(refused)
		}
		// Without the function, too.
		client = NewFake(FakeRefuse(0)).Client(OnTenantRefused(nil))
		defer client.Close()
		refusedBy(client.Hits(t.Context(), "search", "acme"))
	})
}

func TestAClientThatIsClosedLetsGo(t *testing.T) {
	tenants(t, func(t *testing.T, fake *Fake, client *Client) {
		var all []*Hold
		for range 1000 {
			all = append(all, holdFor(t, client, "acme"))
		}
		client.Close()
		equal(t, fake.Held("sandbox"), 0)
		for _, held := range all {
			equal(t, held.IsHeld(), false)
			<-held.Lost()
			held.Release()
		}
		_, err := client.Hold(t.Context(), "sandbox", "acme")
		var none *NoDecisionError
		if !errors.Is(err, ErrClosed) || !errors.As(err, &none) {
			t.Fatal(err)
		}
		if _, err := client.Hits(t.Context(), "sandbox", "acme"); !errors.Is(err, ErrClosed) {
			t.Fatal(err)
		}
		client.Close()
	})
}

func TestWhoWaitsForCopiesIsToldThatTheClientIsClosed(t *testing.T) {
	tenants(t, func(t *testing.T, fake *Fake, client *Client) {
		fake.Copies("sandbox", 1)
		holdFor(t, client, "acme")
		waiting := make(chan error)
		go func() {
			_, err := client.Hold(t.Context(), "sandbox", "acme", MaxWait(time.Hour))
			waiting <- err
		}()
		time.Sleep(10 * time.Second)
		go client.Close()
		if err := <-waiting; !errors.Is(err, ErrClosed) {
			t.Fatal(err)
		}
	})
}

func TestTheTTLIsBounded(t *testing.T) {
	tenants(t, func(t *testing.T, _ *Fake, client *Client) {
		for _, ttl := range []time.Duration{time.Second, 86_400 * time.Second} {
			holdFor(t, client, "acme", TTL(ttl)).Release()
		}
	})
}

// tenantMetrics are what the metrics of hits and holds say.
type tenantMetrics struct {
	NoMetrics
	mu       sync.Mutex
	answered map[string]int
	held     int64
	lost     int
}

func (m *tenantMetrics) TenantAnswered(kind, outcome, decidedBy string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.answered[kind+" "+outcome+" "+decidedBy]++
}

func (m *tenantMetrics) AddHeldCopies(more int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.held += more
}

func (m *tenantMetrics) HoldLost() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lost++
}

func (m *tenantMetrics) now() (held int64, lost int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.held, m.lost
}

func TestMetricsOfHitsAndHolds(t *testing.T) {
	tenants(t, func(t *testing.T, fake *Fake, _ *Client) {
		metrics := &tenantMetrics{answered: map[string]int{}}
		client := fake.Client(WithMetrics(metrics))
		defer client.Close()
		must := func(held int64, lost int) {
			t.Helper()
			nowHeld, nowLost := metrics.now()
			equal(t, nowHeld, held)
			equal(t, nowLost, lost)
		}
		hits(t, client)
		fake.Copies("sandbox", 5)
		one, other := holdFor(t, client, "acme", Copies(2)), holdFor(t, client, "acme", Copies(3))
		must(5, 0)
		refusedBy(client.Hold(t.Context(), "sandbox", "acme"))
		one.Release()
		one.Release()
		must(3, 0)
		fake.Lose("sandbox")
		timeToLoss(t, other)
		must(0, 1)
		other.Release()
		holdFor(t, client, "acme")
		fake.AnswerTenant("sandbox", "acme", FakeNoNode())
		if _, err := client.Hits(t.Context(), "sandbox", "acme"); !errors.Is(err, ErrUnreachable) {
			t.Fatal(err)
		}
		client.Close()
		must(0, 1)
		expected := map[string]int{
			"hits granted node": 1, "hold granted node": 3, "hold refused node": 1, "hits no_decision nobody": 1,
		}
		equal(t, fmt.Sprint(metrics.answered), fmt.Sprint(expected))
	})
}

// After any history, the nodes know exactly the copies that the application holds.
func TestNothingLeaksOverRandomHistories(t *testing.T) {
	for seed := range uint64(100) {
		synctest.Test(t, func(t *testing.T) { randomHistory(t, seed) })
	}
}

func randomHistory(t *testing.T, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 0))
	fake := NewFake(FakeGrant())
	var options []Option
	if seed%2 == 1 {
		options = append(options, WithFallback(FallbackAllow))
	}
	metrics := &tenantMetrics{answered: map[string]int{}}
	client := fake.Client(append(options, WithMetrics(metrics))...)
	defer client.Close()
	mayLose := seed%4 < 2
	fake.Copies("sandbox", 10)
	domains := []string{"acme", "other"}
	var all []*Hold
	sum := func(counts func(*Hold) bool) (copies int64) {
		for _, held := range all {
			if counts(held) {
				copies += held.Copies()
			}
		}
		return copies
	}
	var releasing sync.WaitGroup
	for range 200 {
		domain := domains[random.IntN(2)]
		switch what := random.IntN(10); {
		case what < 4:
			held, err := client.Hold(t.Context(), "sandbox", domain, Copies(1+random.Int64N(4)), MinCopies(1),
				TTL(time.Duration(1+random.IntN(29))*time.Second))
			if err == nil {
				all = append(all, held)
			}
		case (what == 4 || what == 5) && len(all) > 0:
			at := random.IntN(len(all))
			held := all[at]
			all = slices.Delete(all, at, at+1)
			if what == 4 {
				held.Release()
			} else {
				releasing.Go(held.Release)
			}
		case what == 6:
			fake.AnswerTenant("sandbox", domain, FakeNoNode())
		case what == 7:
			fake.AnswerTenant("sandbox", domain, FakeGrant())
		case what == 8 && mayLose && random.IntN(4) == 0:
			fake.Lose("sandbox")
		default:
			time.Sleep(time.Duration(random.IntN(8000)) * time.Millisecond)
		}
		recorded := sum(func(held *Hold) bool { return held.IsHeld() && held.DecidedBy() == ByNode })
		// Nobody uses copies whose session is over.
		if !mayLose && recorded > fake.Held("sandbox") {
			t.Fatalf("seed %d: %d of %d", seed, recorded, fake.Held("sandbox"))
		}
	}
	for _, domain := range domains {
		fake.AnswerTenant("sandbox", domain, FakeGrant())
	}
	time.Sleep(time.Minute)
	all = slices.DeleteFunc(all, func(held *Hold) bool { return !held.IsHeld() })
	time.Sleep(time.Minute)
	held := sum(func(*Hold) bool { return true })
	byNode := sum(func(held *Hold) bool { return held.IsHeld() && held.DecidedBy() == ByNode })
	counted, _ := metrics.now()
	if fake.Held("sandbox") != held || byNode != held || counted != held {
		t.Fatalf("seed %d: %d, %d by nodes, and %d, %d known", seed, held, byNode, counted, fake.Held("sandbox"))
	}
	for _, held := range all {
		releasing.Go(held.Release)
	}
	releasing.Wait()
	counted, _ = metrics.now()
	if fake.Held("sandbox") != 0 || counted != 0 {
		t.Fatalf("seed %d: something is left", seed)
	}
}
