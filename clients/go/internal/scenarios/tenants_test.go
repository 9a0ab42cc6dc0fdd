package scenarios

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/internal/testkit"
	"github.com/tollgate/tollgate/clients/go/tollgateprom"
)

const tenantLimits = `throttles:
  - { resource: 'search', tiers: [ { limit: 5, window: 1h, active: 1h, cooldown: 0s } ] }
  - { resource: 'often', hard_limit: 4, tiers: [ { limit: 1000000, window: 1h, active: 1h, cooldown: 0s } ] }
  - { resource: 'shadow', enforce: false, tiers: [ { limit: 1, window: 1h, active: 1h, cooldown: 0s } ] }
holds:
  - { resource: 'sandbox', domain_limit: 5, global_limit: 8 }
  - { resource: 'shadowed', domain_limit: 1, enforce: false }
`

// ttl is one that ends within a test.
const ttl = 3 * time.Second

// hits asks for hits of acme that are granted.
func hits(t *testing.T, client *tollgate.Client, resource string, options ...tollgate.TenantOption) tollgate.TenantDecision {
	t.Helper()
	decision, err := client.Hits(t.Context(), resource, "acme", options...)
	if err != nil || !decision.Granted {
		t.Fatalf("%+v, %v", decision, err)
	}
	return decision
}

// holdOf asks for copies for a domain that are granted.
func holdOf(t *testing.T, client *tollgate.Client, resource, domain string, options ...tollgate.TenantOption) *tollgate.Hold {
	t.Helper()
	held, err := client.Hold(t.Context(), resource, domain, options...)
	if err != nil {
		t.Fatal(err)
	}
	return held
}

// refusedOf is the refusal in an error.
func refusedOf(t *testing.T, err error) tollgate.Decision {
	t.Helper()
	var refused *tollgate.RefusedError
	if !errors.As(err, &refused) {
		t.Fatal(err)
	}
	return refused.Decision
}

func hitsRefused(t *testing.T, client *tollgate.Client, resource, domain string, options ...tollgate.TenantOption) tollgate.Decision {
	t.Helper()
	_, err := client.Hits(t.Context(), resource, domain, options...)
	return refusedOf(t, err)
}

func holdRefused(t *testing.T, client *tollgate.Client, options ...tollgate.TenantOption) tollgate.Decision {
	t.Helper()
	_, err := client.Hold(t.Context(), "sandbox", "acme", options...)
	return refusedOf(t, err)
}

// known is what a node knows of a resource.
type known struct {
	Held     int64
	Sessions []struct {
		Session string
		Holds   []struct{ Hold string }
	}
}

func knownOf(t *testing.T, node *testkit.Node, resource string) (known known) {
	t.Helper()
	response, err := http.Get("http://" + node.HTTP + "/v1/held/" + resource)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(&known); err != nil {
		t.Fatal(err)
	}
	return known
}

// waitUntilHeld waits until a node knows that so many copies are held.
func waitUntilHeld(t *testing.T, node *testkit.Node, resource string, copies int64) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprintf("%d copies of %s are held", copies, resource), func() bool {
		return knownOf(t, node, resource).Held == copies
	})
}

// endSessions ends each session on a resource, as an operator does.
func endSessions(t *testing.T, node *testkit.Node, resource string) {
	t.Helper()
	for _, one := range knownOf(t, node, resource).Sessions {
		path := "http://" + node.HTTP + "/v1/held/" + resource + "/" + one.Session
		request, err := http.NewRequest(http.MethodDelete, path, nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		mustBe(t, response.StatusCode, http.StatusOK)
	}
}

// mustLose waits until a hold is lost.
func mustLose(t *testing.T, held *tollgate.Hold) {
	t.Helper()
	select {
	case <-held.Lost():
	case <-time.After(testkit.Limit):
		t.Fatal("not lost")
	}
	mustBe(t, held.IsHeld(), false)
}

func TestEachAnswerAboutHits(t *testing.T) {
	t.Parallel()
	client := connect(t, testkit.StartNode(t, tenantLimits).GRPC)
	three := tollgate.Copies(3)
	mustBe(t, hits(t, client, "search", three), tollgate.TenantDecision{
		Granted: true, Copies: 3, Tier: 1, Burst: true, DecidedBy: tollgate.ByNode,
	})
	// All or nothing, unless fewer are accepted.
	refusal := hitsRefused(t, client, "search", "acme", three)
	mustBe(t, refusal.Reason, tollgate.ReasonLimit)
	mustBe(t, refusal.DecidedBy, tollgate.ByNode)
	if refusal.RetryAfter <= time.Hour/2 || refusal.RetryAfter > time.Hour {
		t.Fatal(refusal.RetryAfter)
	}
	fewer := hits(t, client, "search", three, tollgate.MinCopies(1))
	mustBe(t, fewer.Copies, 2)
	mustBe(t, fewer.Burst, false)
	mustBe(t, hitsRefused(t, client, "search", "other", tollgate.Copies(6)).RetryAfter, 0)
	mustBe(t, hits(t, client, "shadow").Shadow, false)
	mustBe(t, hits(t, client, "shadow").Shadow, true)
	if _, err := client.Hits(t.Context(), "search", ""); !errors.Is(err, tollgate.ErrInvalid) {
		t.Fatal(err)
	}
	if _, err := client.Hits(t.Context(), "search", "acme", tollgate.MinCopies(2)); !errors.Is(err, tollgate.ErrInvalid) {
		t.Fatal(err)
	}
}

func TestHitsAreWaitedFor(t *testing.T) {
	t.Parallel()
	client := connect(t, testkit.StartNode(t, tenantLimits).GRPC)
	start := time.Now()
	for range 3 {
		hits(t, client, "often", tollgate.Copies(4), tollgate.MaxWait(patient))
	}
	// Four in any second.
	mustTake(t, start, 2*time.Second, forever)
	start = time.Now()
	refusal := hitsRefused(t, client, "often", "acme", tollgate.Copies(4), tollgate.MaxWait(time.Millisecond))
	// Who would wait in vain does not wait; unless so long passed that there was room.
	if refusal.RetryAfter <= time.Millisecond {
		t.Fatal(refusal.RetryAfter)
	}
	mustTake(t, start, 0, patient)
}

func TestRefusedHitsAreRemembered(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, tenantLimits)
	client := connect(t, node.GRPC)
	hits(t, client, "search", tollgate.Copies(4))
	start := time.Now()
	mustBe(t, hitsRefused(t, client, "search", "acme", tollgate.Copies(2)).DecidedBy, tollgate.ByNode)
	remembered := 0
	for {
		refusal := hitsRefused(t, client, "search", "acme", tollgate.Copies(9), tollgate.MinCopies(2))
		if refusal.DecidedBy == tollgate.ByNode {
			break
		}
		mustBe(t, refusal.DecidedBy, tollgate.ByMemory)
		remembered++
		time.Sleep(time.Millisecond)
	}
	mustTake(t, start, time.Second, forever)
	if remembered == 0 {
		t.Fatal("not remembered")
	}
	mustBe(t, node.Metric(t, "tollgate_throttle_decisions_total"), 3)
	// Fewer may be there, and others are other domains.
	hits(t, client, "search", tollgate.Copies(2), tollgate.MinCopies(1))
	if _, err := client.Hits(t.Context(), "search", "other", tollgate.Copies(2)); err != nil {
		t.Fatal(err)
	}
}

func TestAResourceThatIsNotConfiguredOrOfTheOtherKind(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, tenantLimits)
	client := connect(t, node.GRPC)
	both := func(client *tollgate.Client, forHits, forHold string) (errs [2]error) {
		_, errs[0] = client.Hits(t.Context(), forHits, "acme")
		_, errs[1] = client.Hold(t.Context(), forHold, "acme")
		return errs
	}
	for _, err := range both(client, "nowhere", "nowhere") {
		var none *tollgate.NoDecisionError
		if !errors.Is(err, tollgate.ErrNotConfigured) || !errors.As(err, &none) {
			t.Fatal(err)
		}
	}
	for _, err := range both(client, "sandbox", "search") {
		if !errors.Is(err, tollgate.ErrInvalid) {
			t.Fatal(err)
		}
	}
	// The node is well, so its circuit stays closed, and a fallback decides only where it can.
	for range 10 {
		if _, err := client.Hits(t.Context(), "nowhere", "acme"); !errors.Is(err, tollgate.ErrNotConfigured) {
			t.Fatal(err)
		}
	}
	hits(t, client, "search")
	careless := connect(t, node.GRPC, tollgate.WithFallback(tollgate.FallbackAllow))
	mustBe(t, hits(t, careless, "nowhere", tollgate.Copies(7), tollgate.MinCopies(2)), tollgate.TenantDecision{
		Granted: true, Copies: 2, DecidedBy: tollgate.ByFallback,
	})
	for _, err := range both(careless, "sandbox", "search") {
		if !errors.Is(err, tollgate.ErrInvalid) {
			t.Fatal(err)
		}
	}
}

func TestWithoutANodeTheFallbackGrantsTheFewest(t *testing.T) {
	t.Parallel()
	client := connect(t, testkit.DeadAddress)
	var none *tollgate.NoDecisionError
	if _, err := client.Hits(t.Context(), "search", "acme"); !errors.As(err, &none) {
		t.Fatal(err)
	}
	client = connect(t, testkit.DeadAddress, tollgate.WithFallback(tollgate.FallbackAllow))
	mustBe(t, hits(t, client, "search", tollgate.Copies(5), tollgate.MinCopies(2)), tollgate.TenantDecision{
		Granted: true, Copies: 2, DecidedBy: tollgate.ByFallback,
	})
	held := holdOf(t, client, "sandbox", "acme", tollgate.Copies(5), tollgate.MinCopies(3))
	mustBe(t, held.Copies(), 3)
	mustBe(t, held.DecidedBy(), tollgate.ByFallback)
	// No node can know it: nobody is asked.
	start := time.Now()
	held.Release()
	mustTake(t, start, 0, 4*time.Second)
}

func TestAHoldEndsWithItsRelease(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, tenantLimits)
	metrics := tollgateprom.New()
	client := connect(t, node.GRPC, tollgate.WithClientID("worker-7"), tollgate.WithMetrics(metrics))
	first := holdOf(t, client, "sandbox", "acme", tollgate.Copies(3))
	mustBe(t, first.Copies(), 3)
	mustBe(t, first.DecidedBy(), tollgate.ByNode)
	mustBe(t, first.Resource()+" "+first.Domain(), "sandbox acme")
	mustBe(t, knownOf(t, node, "sandbox").Sessions[0].Holds[0].Hold, "worker-7")
	mustBe(t, holdRefused(t, client, tollgate.Copies(3)).Reason, tollgate.ReasonLimit)
	never := holdRefused(t, client, tollgate.Copies(6))
	mustBe(t, never.Reason, tollgate.ReasonLimit)
	mustBe(t, never.RetryAfter, 0)
	second := holdOf(t, client, "sandbox", "acme", tollgate.Copies(3), tollgate.MinCopies(1))
	mustBe(t, second.Copies(), 2)
	mustBe(t, shown(t, metrics, "tollgate_client_held_copies"), 5)
	first.Release()
	mustBe(t, knownOf(t, node, "sandbox").Held, 2)
	second.Release()
	second.Release()
	mustBe(t, knownOf(t, node, "sandbox").Held, 0)
	mustBe(t, len(knownOf(t, node, "sandbox").Sessions), 0)
	mustBe(t, shown(t, metrics, "tollgate_client_held_copies"), 0)
	requests := func(outcome string) float64 {
		return shown(t, metrics, "tollgate_client_tenant_requests_total", `kind="hold"`, `outcome="`+outcome+`"`)
	}
	mustBe(t, requests("granted"), 2)
	mustBe(t, requests("refused"), 2)
}

func TestNeverMoreCopiesAreHeldThanThereAre(t *testing.T) {
	t.Parallel()
	redis := testkit.StartRedis(t)
	var nodes []*testkit.Node
	var addresses []string
	for range 2 {
		node := testkit.StartNode(t, tenantLimits, "--store", redis.URL(), "--store-timeout", "10s")
		waitForStore(t, node)
		nodes, addresses = append(nodes, node), append(addresses, node.GRPC)
	}
	var inUse atomic.Int64
	var users sync.WaitGroup
	for user := range 8 {
		client := connectAll(t, addresses)
		domain := fmt.Sprintf("domain-%d", user%4)
		users.Go(func() {
			for turn := range int64(5) {
				held, err := client.Hold(t.Context(), "sandbox", domain, tollgate.Copies(1+turn),
					tollgate.MaxWait(testkit.Limit))
				if err != nil {
					t.Error(err)
					return
				}
				if used := inUse.Add(held.Copies()); used > 8 {
					t.Errorf("%d copies of 8 are used", used)
				}
				time.Sleep(5 * time.Millisecond)
				if !held.IsHeld() {
					t.Error("lost")
				}
				inUse.Add(-held.Copies())
				held.Release()
			}
		})
	}
	users.Wait()
	mustBe(t, knownOf(t, nodes[0], "sandbox").Held, 0)
}

// waitForStore waits until a node decides by its store.
func waitForStore(t *testing.T, node *testkit.Node) {
	t.Helper()
	client := connect(t, node.GRPC)
	testkit.Eventually(t, "the store answers", func() bool {
		held, err := client.Hold(t.Context(), "sandbox", "nobody")
		if err != nil {
			return false
		}
		by := held.DecidedBy()
		held.Release()
		return by == tollgate.ByNode
	})
	waitUntilHeld(t, node, "sandbox", 0)
}

func TestAHoldIsWaitedFor(t *testing.T) {
	t.Parallel()
	client := connect(t, testkit.StartNode(t, tenantLimits).GRPC)
	first := holdOf(t, client, "sandbox", "acme", tollgate.Copies(5))
	start := time.Now()
	mustBe(t, holdRefused(t, client, tollgate.MaxWait(300*time.Millisecond)).Reason, tollgate.ReasonLimit)
	// There is a last attempt at the end.
	mustTake(t, start, 300*time.Millisecond, forever)
	waiting := make(chan int64)
	go func() {
		held, err := client.Hold(t.Context(), "sandbox", "acme", tollgate.Copies(5), tollgate.MaxWait(testkit.Limit))
		if err != nil {
			t.Error(err)
			waiting <- 0
			return
		}
		waiting <- held.Copies()
	}()
	select {
	case <-waiting:
		t.Fatal("granted too early")
	case <-time.After(100 * time.Millisecond):
	}
	first.Release()
	mustBe(t, <-waiting, 5)
}

func TestAHoldIsKeptAlive(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, tenantLimits)
	client := connect(t, node.GRPC)
	// A hold is lost if its renewal is held up for a third of its time.
	const ttl = 9 * time.Second
	ordinary := holdOf(t, client, "sandbox", "acme", tollgate.TTL(ttl))
	// Which is recorded although there is no room.
	shadowed := holdOf(t, client, "shadowed", "acme", tollgate.Copies(2), tollgate.TTL(ttl))
	mustBe(t, shadowed.Shadow(), true)
	time.Sleep(4 * ttl / 3)
	mustBe(t, ordinary.IsHeld() && shadowed.IsHeld(), true)
	mustBe(t, knownOf(t, node, "sandbox").Held, 1)
	mustBe(t, knownOf(t, node, "shadowed").Held, 2)
}

func TestAHoldThatWasEndedIsLost(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, tenantLimits)
	metrics := tollgateprom.New()
	client := connect(t, node.GRPC, tollgate.WithMetrics(metrics))
	held := holdOf(t, client, "sandbox", "acme", tollgate.TTL(ttl))
	endSessions(t, node, "sandbox")
	mustLose(t, held)
	testkit.Eventually(t, "the loss is counted", func() bool {
		return shown(t, metrics, "tollgate_client_lost_holds_total") == 1
	})
	held.Release()
	holdOf(t, client, "sandbox", "acme", tollgate.TTL(ttl)).Release()
}

func TestAHoldThatNobodyRenewsIsLostInTime(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, tenantLimits)
	cautious := connect(t, node.GRPC)
	careless := connect(t, node.GRPC, tollgate.WithFallback(tollgate.FallbackAllow))
	lost := holdOf(t, cautious, "sandbox", "acme", tollgate.TTL(ttl))
	kept := holdOf(t, careless, "sandbox", "acme", tollgate.Copies(2), tollgate.TTL(ttl))
	node.Kill()
	mustLose(t, lost)
	testkit.Eventually(t, "the fallback lets the hold go on", func() bool {
		mustBe(t, kept.IsHeld(), true)
		return kept.DecidedBy() == tollgate.ByFallback
	})
	node = testkit.StartNodeAt(t, portOf(t, node.GRPC), tenantLimits)
	waitUntilHeld(t, node, "sandbox", 2)
	testkit.Eventually(t, "a node has decided", func() bool { return kept.DecidedBy() == tollgate.ByNode })
	mustBe(t, kept.IsHeld() && !lost.IsHeld(), true)
}

func portOf(t *testing.T, address string) (port int) {
	t.Helper()
	_, text, _ := strings.Cut(address, ":")
	if _, err := fmt.Sscan(text, &port); err != nil {
		t.Fatal(err)
	}
	return port
}

func TestALostStoreEndsHoldsOrLeavesThemByPolicy(t *testing.T) {
	t.Parallel()
	const ttl = 6 * time.Second
	redis := testkit.StartRedis(t)
	node := testkit.StartNode(t, tenantLimits, "--store", redis.URL())
	waitForStore(t, node)
	client := connect(t, node.GRPC)
	wait := tollgate.MaxWait(testkit.Limit)
	before := holdOf(t, client, "sandbox", "acme", tollgate.Copies(2), tollgate.TTL(ttl), wait)
	redis.Kill()
	// By the policy `local`, which is the default, nobody loses what is held.
	testkit.Eventually(t, "decided without the store", func() bool {
		return before.DecidedBy() == tollgate.ByDegradedNode
	})
	during := holdOf(t, client, "sandbox", "acme", tollgate.Copies(5), tollgate.MinCopies(3), tollgate.TTL(ttl), wait)
	mustBe(t, during.Copies(), 3)
	mustBe(t, during.DecidedBy(), tollgate.ByDegradedNode)
	all := []*tollgate.Hold{before, during}
	for range 4 {
		held := holdOf(t, client, "sandbox", "other", tollgate.Copies(2), tollgate.TTL(ttl))
		mustBe(t, held.DecidedBy(), tollgate.ByDegradedNode)
		all = append(all, held)
	}
	time.Sleep(7 * time.Second)
	mustBe(t, before.IsHeld() && during.IsHeld(), true)
	// The end of a session fails, and opens no circuit.
	ending := holdOf(t, client, "sandbox", "third", tollgate.TTL(ttl))
	go ending.Release()
	// The store has lost its memory: what there is room for is recorded, and the rest is lost.
	redis.Start(t)
	testkit.Eventually(t, "each hold is recorded or lost", func() bool {
		for _, held := range all {
			if held.IsHeld() && held.DecidedBy() != tollgate.ByNode {
				return false
			}
		}
		return true
	})
	var copies, lost int64
	for _, held := range all {
		if held.IsHeld() {
			copies += held.Copies()
		} else {
			lost++
		}
	}
	if copies == 0 || lost == 0 {
		t.Fatalf("%d copies are held, and %d holds are lost", copies, lost)
	}
	waitUntilHeld(t, node, "sandbox", copies)
}

func TestAReserveWhoseAnswerIsLostLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, tenantLimits)
	proxy := testkit.StartProxy(t, node.GRPC)
	client := connect(t, proxy.Address)
	long := tollgate.TTL(time.Hour)
	holdOf(t, client, "sandbox", "acme", long).Release()
	granted := func() float64 { return node.Metric(t, "tollgate_hold_decisions_total", `outcome="granted"`) }
	proxy.Set(t, testkit.NoReplies)
	_, err := client.Hold(t.Context(), "sandbox", "acme", long, tollgate.Deadline(3*time.Second))
	if !errors.Is(err, tollgate.ErrTimeout) {
		t.Fatal(err)
	}
	proxy.Set(t, testkit.NoFault)
	testkit.Eventually(t, "the request was granted", func() bool { return granted() == 2 })
	waitUntilHeld(t, node, "sandbox", 0)
	// Another one, as a node without an answer may not be called by the first one any more.
	client = connect(t, proxy.Address)
	holdOf(t, client, "sandbox", "acme", long).Release()
	proxy.Set(t, testkit.NoReplies)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		_, err := client.Hold(ctx, "sandbox", "acme", long, tollgate.Copies(2))
		ended <- err
	}()
	testkit.Eventually(t, "the request was granted", func() bool { return granted() == 4 })
	mustBe(t, knownOf(t, node, "sandbox").Held, 2)
	cancel()
	if err := <-ended; err != context.Canceled {
		t.Fatal(err)
	}
	proxy.Set(t, testkit.NoFault)
	waitUntilHeld(t, node, "sandbox", 0)
}

func TestAClientThatIsClosedReleasesItsHolds(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, tenantLimits)
	client := connect(t, node.GRPC)
	held := holdOf(t, client, "sandbox", "acme", tollgate.Copies(5))
	waiting := make(chan error)
	go func() {
		_, err := client.Hold(t.Context(), "sandbox", "acme", tollgate.MaxWait(forever))
		waiting <- err
	}()
	testkit.Eventually(t, "another one waits", func() bool {
		return node.Metric(t, "tollgate_hold_decisions_total") >= 2
	})
	client.Close()
	mustBe(t, held.IsHeld(), false)
	mustBe(t, knownOf(t, node, "sandbox").Held, 0)
	if err := <-waiting; !errors.Is(err, tollgate.ErrClosed) {
		t.Fatal(err)
	}
	if _, err := client.Hold(t.Context(), "sandbox", "acme"); !errors.Is(err, tollgate.ErrClosed) {
		t.Fatal(err)
	}
	held.Release()
}

func TestManyHoldsAreRenewedInFewCalls(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, "holds: [ { resource: '*', domain_limit: 1000 } ]")
	client := connect(t, node.GRPC)
	const ttl = 6 * time.Second
	all := make([]*tollgate.Hold, 300)
	var asking sync.WaitGroup
	for number := range all {
		asking.Go(func() {
			held, err := client.Hold(t.Context(), fmt.Sprintf("resource-%d", number%10), "acme", tollgate.TTL(ttl))
			if err != nil {
				t.Error(err)
			}
			all[number] = held
		})
	}
	asking.Wait()
	if t.Failed() {
		return
	}
	calls := func() float64 { return node.Metric(t, "tollgate_rpc_duration_seconds_count", `transport="grpc"`) }
	start, before := time.Now(), calls()
	time.Sleep(2 * ttl)
	made, renewals := calls()-before, time.Since(start).Seconds()/2
	for _, held := range all {
		mustBe(t, held.IsHeld(), true)
	}
	// In groups of a hundred, and some begin later than the others.
	if made < 3 || made > 8*(renewals+1) {
		t.Fatalf("%v calls", made)
	}
}
