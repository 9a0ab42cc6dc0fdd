package scenarios

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/internal/testkit"
)

const resources = `resources:
  - { identifier_glob: 'short*', capacity: 100, safe_capacity: 7,
      algorithm: { kind: FAIR_SHARE, lease_length: 2, refresh_interval: 1, learning_mode_duration: 0 } }
  - { identifier_glob: '*', capacity: 100, safe_capacity: 7,
      algorithm: { kind: FAIR_SHARE, lease_length: 60, refresh_interval: 1, learning_mode_duration: 0 } }
`

// capacity leases a capacity.
func capacity(t *testing.T, client *tollgate.Client, resource string, wants float64, options ...tollgate.LeaseOption) *tollgate.Capacity {
	t.Helper()
	lease, err := client.Capacity(resource, append(options, tollgate.Wants(wants))...)
	if err != nil {
		t.Fatal(err)
	}
	return lease
}

// changed is the next capacity that is held.
func changed(t *testing.T, lease *tollgate.Capacity) float64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Limit)
	defer cancel()
	capacity, err := lease.Changed(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return capacity
}

func TestClientsShareACapacityAndGiveItBack(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, resources)
	one, other := connect(t, node.GRPC), connect(t, node.GRPC)
	first := capacity(t, one, "db", 80)
	mustBe(t, changed(t, first), 80)
	// An invalid number does not spoil the request for the others.
	invalid := capacity(t, one, "invalid", math.NaN())
	if _, err := one.Capacity(""); !errors.Is(err, tollgate.ErrInvalidName) {
		t.Fatal(err)
	}
	second := capacity(t, other, "db", 80)
	testkit.Eventually(t, "half for each", func() bool { return first.Get() == 50 && second.Get() == 50 })
	second.SetWants(10)
	testkit.Eventually(t, "what each wants", func() bool { return first.Get() == 80 && second.Get() == 10 })
	mustBe(t, invalid.Get(), 0)
	if _, err := one.Capacity("db"); !errors.Is(err, tollgate.ErrAlreadyLeased) {
		t.Fatal(err)
	}
	// By closing the handle, and by closing the client.
	second.Close()
	third := capacity(t, other, "db", 20)
	testkit.Eventually(t, "leased anew", func() bool { return third.Get() == 20 })
	other.Close()
	if _, err := other.Capacity("other"); !errors.Is(err, tollgate.ErrClosed) {
		t.Fatal(err)
	}
	first.SetWants(100)
	testkit.Eventually(t, "all for the first", func() bool { return first.Get() == 100 })
}

func TestRatesOfSeveralClientsStayWithinTheCapacity(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, resources)
	ctx, stop := context.WithCancel(t.Context())
	var used atomic.Int64
	var using sync.WaitGroup
	for range 3 {
		rate, err := connect(t, node.GRPC).RateLimiter("api")
		if err != nil {
			t.Fatal(err)
		}
		// More callers than the rate can serve.
		for range 50 {
			using.Go(func() {
				for rate.Wait(ctx, 1) == nil {
					used.Add(1)
				}
			})
		}
	}
	measure := func(period time.Duration) float64 {
		start, before := time.Now(), used.Load()
		time.Sleep(period)
		now, seconds := float64(used.Load()-before), time.Since(start).Seconds()
		// The bursts of three clients come on top.
		if now > 100*seconds+3*10 {
			t.Errorf("%v in %v s", now, seconds)
		}
		return now / seconds
	}
	// The wants grow until the whole capacity is leased.
	testkit.Eventually(t, "the capacity is used", func() bool { return measure(time.Second) > 90 })
	// It stays so; a busy machine uses less (TOLLGATE_ALONE=1: nothing else runs).
	if rate := measure(5 * time.Second); rate < 70 && os.Getenv("TOLLGATE_ALONE") != "" {
		t.Errorf("%v a second", rate)
	}
	stop()
	using.Wait()
}

func TestAGaugeLetsInAsManyAsAreLeased(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, resources)
	gauge, err := connect(t, node.GRPC).Gauge("connections")
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := gauge.TryAcquire(); ok {
		t.Fatal("a place without a lease")
	}
	var inside, most atomic.Int64
	var mu sync.Mutex
	leave := make(chan struct{})
	var users sync.WaitGroup
	for range 150 {
		users.Go(func() {
			place, err := gauge.Acquire(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			most.Store(max(most.Load(), inside.Add(1)))
			mu.Unlock()
			<-leave
			inside.Add(-1)
			place.Release()
		})
	}
	testkit.Eventually(t, "the capacity is used", func() bool { return inside.Load() == 100 })
	mustBe(t, gauge.InUse(), 100)
	close(leave)
	users.Wait()
	mustBe(t, most.Load(), 100)
	// Another client wants all of it: what is left shrinks, and places are refused.
	capacity(t, connect(t, node.GRPC), "connections", 1000)
	testkit.Eventually(t, "a place is refused", func() bool {
		for range 60 {
			place, ok := gauge.TryAcquire()
			if !ok {
				return true
			}
			defer place.Release()
		}
		return false
	})
}

func TestALeaseThatRunsOutLeavesWhatTheModeSays(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, resources)
	proxy := testkit.StartProxy(t, node.GRPC)
	client := connect(t, proxy.Address)
	var leases []*tollgate.Capacity
	for at, mode := range []tollgate.Mode{tollgate.Safe, tollgate.Pessimistic, tollgate.Optimistic} {
		leases = append(leases, capacity(t, client, fmt.Sprintf("short-%d", at), 150, tollgate.WithMode(mode)))
	}
	are := func(capacities ...float64) func() bool {
		return func() bool {
			for at, capacity := range capacities {
				if leases[at].Get() != capacity {
					return false
				}
			}
			return true
		}
	}
	testkit.Eventually(t, "leased", are(100, 100, 100))
	proxy.Set(t, testkit.NoReplies)
	testkit.Eventually(t, "run out", are(7, 0, 150))
	proxy.Set(t, testkit.NoFault)
	testkit.Eventually(t, "leased again", are(100, 100, 100))
}

func TestAClientThatIsClosedDuringARefreshLetsGo(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, resources)
	proxy := testkit.StartProxy(t, node.GRPC)
	client := connect(t, proxy.Address)
	rate, err := client.RateLimiter("db", tollgate.Wants(50))
	if err != nil {
		t.Fatal(err)
	}
	if err := rate.Wait(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	waiting := make(chan error)
	go func() {
		err := rate.Wait(t.Context(), 1_000_000)
		if err == nil {
			err = rate.Wait(t.Context(), 1)
		}
		waiting <- err
	}()
	testkit.Eventually(t, "leased", func() bool { return node.Metric(t, "tollgate_resource_has") == 50 })
	proxy.Delay(t, 300*time.Millisecond)
	// The request of a refresh has passed, and its answer has not.
	decided := func() float64 { return node.Metric(t, "tollgate_lease_decisions_total") }
	before := decided()
	testkit.Eventually(t, "asked again", func() bool { return decided() > before })
	// Both return when the leases are released.
	var closing sync.WaitGroup
	for range 2 {
		closing.Go(client.Close)
	}
	closing.Wait()
	mustBe(t, changed(t, capacity(t, connect(t, node.GRPC), "db", 100)), 100)
	if err := <-waiting; !errors.Is(err, tollgate.ErrClosed) {
		t.Fatal(err)
	}
	if rate.Try(1) {
		t.Fatal("used after the end")
	}
}

func TestAResourceThatIsNotAllowedSpoilsNoOther(t *testing.T) {
	t.Parallel()
	access := filepath.Join(t.TempDir(), "access.yaml")
	callers := "callers: [{ name: a, anyone: true, resources: ['db.*'] }]"
	if err := os.WriteFile(access, []byte(callers), 0o600); err != nil {
		t.Fatal(err)
	}
	node := testkit.StartNode(t, resources, "--access", access)
	client := connect(t, node.GRPC)
	var all []*tollgate.Capacity
	for _, name := range []string{"db.1", "a", "db.2", "db", "db.3", "z", "db.4"} {
		all = append(all, capacity(t, client, name, 5))
	}
	testkit.Eventually(t, "leased", func() bool {
		for at, lease := range all {
			if allowed := at%2 == 0; allowed != (lease.Get() == 5) {
				return false
			}
		}
		return true
	})
	// What is closed is released, with what may not be.
	rest := capacity(t, connect(t, node.GRPC), "db.1", 100)
	testkit.Eventually(t, "the rest", func() bool { return rest.Get() == 95 })
	for _, lease := range all {
		lease.Close()
	}
	testkit.Eventually(t, "released", func() bool { return rest.Get() == 100 })
}

func TestAllLeasesAreRefreshedInOneCall(t *testing.T) {
	t.Parallel()
	doorman := testkit.StartDoorman(t)
	client := connect(t, doorman.Address)
	var leases []*tollgate.Capacity
	for at := range 20 {
		leases = append(leases, capacity(t, client, fmt.Sprintf("r%d", at), 1))
	}
	testkit.Eventually(t, "leased", func() bool {
		for _, lease := range leases {
			if lease.Get() != 1 {
				return false
			}
		}
		return true
	})
	before := len(doorman.Asked())
	testkit.Eventually(t, "refreshed twice", func() bool { return len(doorman.Asked()) >= before+2 })
	for _, names := range doorman.Asked()[before:] {
		mustBe(t, len(names), 20)
	}
	// Those without a handle are released, and refreshed no more.
	for _, lease := range leases {
		lease.Close()
	}
	testkit.Eventually(t, "released", func() bool { return len(doorman.Released()) == 20 })
}

func TestADoormanThatMovesItsMasterIsFollowed(t *testing.T) {
	t.Parallel()
	servers := []*testkit.Doorman{testkit.StartDoorman(t), testkit.StartDoorman(t)}
	setMaster := func(at int) {
		servers[at].BeMaster()
		servers[1-at].NameMaster(servers[at].Address)
	}
	setMaster(1)
	// The client knows the first one only.
	client := connect(t, servers[0].Address)
	db := capacity(t, client, "db", 5)
	mustBecome := func(capacity float64) {
		t.Helper()
		testkit.Eventually(t, "leased by the master", func() bool { return db.Get() == capacity })
	}
	mustBecome(5)
	setMaster(0)
	db.SetWants(6)
	mustBecome(6)
	setMaster(1)
	db.SetWants(7)
	mustBecome(7)
	// None for a while.
	servers[1].NameMaster("")
	db.SetWants(8)
	before := len(servers[1].Asked())
	testkit.Eventually(t, "asked in vain", func() bool { return len(servers[1].Asked()) > before+1 })
	mustBe(t, db.Get(), 7)
	setMaster(1)
	mustBecome(8)
	// Each names the other one.
	servers[1].NameMaster(servers[0].Address)
	before = len(servers[1].Asked())
	db.SetWants(8.5)
	testkit.Eventually(t, "asked in vain", func() bool { return len(servers[1].Asked()) > before+2 })
	mustBe(t, db.Get(), 8)
	// One that does not answer: the client asks the first one again.
	for _, server := range servers {
		server.NameMaster(testkit.DeadAddress)
	}
	db.SetWants(9)
	before = len(servers[0].Asked())
	testkit.Eventually(t, "asked again", func() bool { return len(servers[0].Asked()) > before })
	setMaster(0)
	mustBecome(9)
	// The master moves between the last refresh and the release.
	setMaster(1)
	client.Close()
	mustBe(t, fmt.Sprint(servers[1].Released()), "[db]")
	mustBe(t, len(servers[0].Released()), 0)
}

// What a master may have lent before it failed to answer is the most that is used.
func TestAMasterWhoseAnswerIsLost(t *testing.T) {
	t.Parallel()
	first, master := testkit.StartDoorman(t), testkit.StartDoorman(t)
	node := testkit.StartProxy(t, first.Address)
	first.NameMaster(master.Address)
	db := capacity(t, connect(t, node.Address), "db", 5)
	testkit.Eventually(t, "leased by the master", func() bool { return db.Get() == 5 })
	// Just after a refresh, so that the next request is the one for less.
	refreshes := len(master.Asked())
	testkit.Eventually(t, "refreshed", func() bool { return len(master.Asked()) > refreshes })
	time.Sleep(20 * time.Millisecond)
	node.Set(t, testkit.Refused)
	master.Break()
	db.SetWants(1)
	testkit.Eventually(t, "no more is used than it may have lent", func() bool { return db.Get() == 1 })
}
