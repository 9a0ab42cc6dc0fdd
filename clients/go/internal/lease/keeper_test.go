package lease_test

import (
	"errors"
	"fmt"
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

// capacities leases several, of which each wants so much.
func capacities(
	t *testing.T, leases *lease.Leases, capacity float64, names ...string,
) (all []*lease.Capacity) {
	t.Helper()
	for _, name := range names {
		all = append(all, capacityOf(t, leases, name, wants(capacity)))
	}
	return all
}

// numbered are names that begin so.
func numbered(prefix string, number int) (names []string) {
	for i := range number {
		names = append(names, fmt.Sprintf("%s%03d", prefix, i))
	}
	return names
}

func closeAll(all []*lease.Capacity) {
	for _, one := range all {
		one.Close()
	}
}

func wantNames(t *testing.T, what string, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

func TestAllLeasesAreRefreshedInOneCall(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		names := numbered("r", 20)
		all := capacities(t, leases, 1, names...)
		synctest.Wait()
		time.Sleep(3500 * ms)
		asked := n.asked()
		asked = asked[len(asked)-3:]
		for i, one := range asked {
			wantNames(t, "asked", one.names, names...)
			if i > 0 {
				// At the interval that the nodes say, less a tenth.
				interval := one.at.Sub(asked[i-1].at)
				wantBetween(t, "interval", interval, 900*ms, time.Second)
			}
		}
		// Those without a handle are released, and refreshed no more.
		closeAll(all)
		synctest.Wait()
		wantNames(t, "released", n.released(), names...)
		calls := len(n.asked())
		time.Sleep(time.Minute)
		want(t, "calls", len(n.asked()), calls)
	})
}

func TestHurryAsksOnceMoreAndSpoilsNoRefresh(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.interval = 10
		db := capacityOf(t, leases, "db", wants(1))
		capacityOf(t, leases, "other", wants(1))
		wantChanged(t, db, 1)
		time.Sleep(5 * time.Second)
		calls := len(n.asked())
		db.SetWants(3)
		wantChanged(t, db, 3)
		start := time.Now()
		db.SetWants(4)
		wantChanged(t, db, 4)
		// After a tenth of a second.
		want(t, "pause", time.Since(start), 100*ms)
		time.Sleep(2 * time.Second)
		asked := n.asked()[calls:]
		want(t, "calls", len(asked), 2)
		for _, one := range asked {
			wantNames(t, "asked", one.names, "db")
		}
		// The refresh of all comes at its time.
		time.Sleep(3 * time.Second)
		all := n.asked()[calls+2:]
		want(t, "calls", len(all), 1)
		wantNames(t, "asked", all[0].names, "db", "other")
	})
}

func TestRequestSaysWhatIsHeld(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.length = 2
		capacityOf(t, leases, "db", wants(5))
		time.Sleep(1100 * ms)
		n.set(func(s *state) { s.err = fault.ErrUnreachable })
		time.Sleep(5 * time.Second)
		asked := n.asked()
		want(t, "held at first", asked[0].has[0] == nil, true)
		want(t, "held then", asked[1].has[0].GetCapacity(), 5)
		want(t, "held when it has run out", asked[len(asked)-1].has[0] == nil, true)
		want(t, "wants", asked[0].wants[0], 5)
	})
}

func TestResourceIsLeasedOnce(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rateOf(t, leases, "db", measured)
		wantFails[*lease.Capacity](t, lease.ErrAlreadyLeased)(leases.Capacity("db", measured))
		wantFails[*lease.RateLimiter](t, lease.ErrAlreadyLeased)(leases.RateLimiter("db", measured))
		for _, name := range []string{"", strings.Repeat("a", 1025), "\xff"} {
			wantFails[*lease.Gauge](t, lease.ErrInvalidName)(leases.Gauge(name, measured))
		}
		gaugeOf(t, leases, strings.Repeat("a", 1024), measured)
	})
}

func TestLeaseWhoseHandleWasClosedCanBeLeasedAgainAtOnce(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		for i := range 50 {
			capacity := capacityOf(t, leases, "db", wants(float64(i+1)))
			// It would be another value first if anything of the last handle
			// were left.
			wantChanged(t, capacity, float64(i+1))
			capacity.Close()
			// So that the keeper has ended, or not.
			if i%2 == 0 {
				synctest.Wait()
			}
		}
		synctest.Wait()
		wantBetween(t, "released", len(n.released()), 25, 50)
	})
}

func TestHandleThatWasClosedDoesNotTouchTheNextOne(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		first := gaugeOf(t, leases, "db", wants(1))
		place := acquire(t, first)
		first.Close()
		place.Release()
		second := capacityOf(t, leases, "db", wants(5))
		first.Close()
		place.Release()
		first.SetWants(7)
		wantChanged(t, second, 5)
		time.Sleep(5 * time.Second)
		want(t, "capacity", second.Get(), 5)
	})
}

func TestSafeCapacityOutlivesADegradedAnswer(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		safe := 3.0
		n.state.safe, n.state.length = &safe, 2
		db := capacityOf(t, leases, "db", wants(5))
		wantChanged(t, db, 5)
		// A node without the store does not know the resource's safe capacity.
		n.set(func(s *state) { s.safe, s.isDegraded = nil, true })
		time.Sleep(3 * time.Second)
		n.set(func(s *state) { s.err = fault.ErrUnreachable })
		wantChanged(t, db, 3)
		// One that knows of none.
		n.set(func(s *state) { s.err, s.isDegraded = nil, false })
		wantChanged(t, db, 5)
		n.set(func(s *state) { s.err = fault.ErrUnreachable })
		wantChanged(t, db, 0)
	})
}

func TestDemandDuringARequestIsAskedForAtOnce(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.interval, n.state.delay = 60, 200*ms
		other := capacityOf(t, leases, "other", wants(1))
		rate := rateOf(t, leases, "rate", measured)
		gauge := gaugeOf(t, leases, "gauge", measured)
		// Asked without any demand.
		for len(slices.Concat(names(n.asked())...)) < 3 {
			time.Sleep(ms)
		}
		before := len(n.asked())
		start := time.Now()
		var callers sync.WaitGroup
		callers.Go(func() { waitN(t, rate, 1) })
		callers.Go(func() { acquire(t, gauge).Release() })
		callers.Wait()
		wantBetween(t, "wait", time.Since(start), 0, time.Second)
		want(t, "other", other.Get(), 1)
		// Only what was in a hurry was asked for again.
		for _, again := range names(n.asked()[before:]) {
			want(t, "others are asked for", slices.Contains(again, "other"), false)
		}
	})
}

func names(requests []request) (names [][]string) {
	for _, one := range requests {
		names = append(names, one.names)
	}
	return names
}

func TestResourceThatIsRefusedSpoilsNoOther(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.forbidden = "not"
		allowed := capacities(t, leases, 5, "a", "b", "z")
		forbidden := capacities(t, leases, 5, "not-1", "not-2")
		for _, one := range allowed {
			wantChanged(t, one, 5)
		}
		// Even if they are in a hurry. Those that came last are asked for after a
		// tenth of a second.
		time.Sleep(200 * ms)
		calls := len(n.asked())
		forbidden[0].SetWants(6)
		time.Sleep(25 * time.Second)
		for _, one := range n.asked()[calls:] {
			wantNames(t, "asked for without", one.names, "a", "b", "z")
		}
		forbidden[0].SetWants(5)
		want(t, "failures", n.failures(), 0)
		// They are asked for again after 30 seconds.
		n.set(func(s *state) { s.forbidden = "" })
		start := time.Now()
		for _, one := range forbidden {
			wantChanged(t, one, 5)
		}
		wantBetween(t, "asked again", time.Since(start), 0, 7*time.Second)
		// What is refused is not released with the others.
		n.set(func(s *state) { s.forbidden = "z" })
		time.Sleep(2 * time.Second)
		leases.Close()
		wantNames(t, "released", n.released(), "a", "b", "not-1", "not-2")
		want(t, "releases", len(n.state.releases), 1)
	})
}

func TestRefusalsCostABoundedNumberOfCalls(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.forbidden, n.state.delay = "not", ms
		// The others are added during a request, so that they are asked for
		// together.
		capacityOf(t, leases, "not-the-first", wants(1))
		synctest.Wait()
		capacities(t, leases, 1, numbered("not-", 200)...)
		allowed := capacityOf(t, leases, "allowed", wants(1))
		wantChanged(t, allowed, 1)
		// A hundred calls a refresh, and those that were split off before, until
		// each is known.
		time.Sleep(10 * time.Second)
		asked := names(n.asked())
		want(t, "asked together", len(asked[1]), 201)
		wantBetween(t, "calls", len(asked), 300, 450)
		// Those that are refused are not asked for again with the others.
		wantNames(t, "asked for at last", asked[len(asked)-1], "allowed")
		// Half a minute later, all of them are asked for again.
		time.Sleep(30 * time.Second)
		wantBetween(t, "calls again", len(n.asked())-len(asked), 100, 150)
	})
}

func TestManyThatAreRefusedTakeNoLeaseFromTheOthers(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.length = 20
		var allowed []*lease.Capacity
		for at := range 60 {
			allowed = append(allowed, capacityOf(t, leases, fmt.Sprintf("%d-ok", at), wants(1)))
			capacityOf(t, leases, fmt.Sprintf("%d-not", at), wants(1))
		}
		for _, one := range allowed {
			wantChanged(t, one, 1)
		}
		// The right to half of them is lost.
		n.set(func(s *state) { s.forbidden = "not" })
		for range 100 {
			time.Sleep(time.Second)
			for at, one := range allowed {
				if one.Get() != 1 {
					t.Fatalf("%d has lost its lease", at)
				}
			}
		}
		leases.Close()
		want(t, "released", len(n.released()), len(allowed))
	})
}

func TestWhatIsUrgentIsAskedForTogether(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		all := capacities(t, leases, 1, numbered("r", 50)...)
		for at := range 1000 {
			all[at%len(all)].SetWants(float64(at))
			time.Sleep(10 * ms)
		}
		// One every 100 ms.
		wantBetween(t, "calls", len(n.asked()), 90, 110)
		calls := len(n.asked())
		for range 1000 {
			all[0].SetWants(5)
			time.Sleep(10 * ms)
		}
		wantBetween(t, "calls without a change", len(n.asked())-calls, 9, 13)
	})
}

func TestReleaseThatIsRefusedForOneResourceReleasesTheOthers(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.interval = 60
		for _, one := range capacities(t, leases, 1, "a", "b", "not-c", "d", "e") {
			wantChanged(t, one, 1)
		}
		// The right is lost between the last refresh and the release.
		n.set(func(s *state) { s.forbidden = "not" })
		leases.Close()
		wantNames(t, "released", n.released(), "a", "b", "d", "e")
	})
}

func TestRefreshesThatFailAreTriedAgainEverySecond(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.interval = 60
		capacity := capacityOf(t, leases, "db", wants(100))
		wantChanged(t, capacity, 100)
		n.set(func(s *state) { s.err = fault.ErrUnreachable })
		// In a hurry or not.
		for range 50 {
			capacity.SetWants(10)
			time.Sleep(210 * ms)
		}
		asked := n.asked()[1:]
		wantBetween(t, "calls", len(asked), 10, 12)
		for i, one := range asked[1:] {
			wantBetween(t, "pause", one.at.Sub(asked[i].at), 900*ms, time.Second)
		}
		want(t, "failures", n.failures(), len(asked))
		want(t, "while no node got the request", capacity.Get(), 100)
		// A node may have leased the rest to others.
		n.set(func(s *state) { s.err = errors.New("no answer") })
		wantChanged(t, capacity, 10)
	})
}

func TestNodesThatBecomeUnreachableAreNotAskedForEachHalf(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.forbidden, n.state.delay = "not", ms
		capacityOf(t, leases, "a", wants(1))
		synctest.Wait()
		n.set(func(s *state) { s.err = fault.ErrUnreachable })
		capacities(t, leases, 1, "b", "c", "not-d", "not-e")
		time.Sleep(500 * ms)
		asked := names(n.asked())
		want(t, "calls", len(asked), 3)
		wantNames(t, "asked", asked[1], "b", "c", "not-d", "not-e")
		wantNames(t, "asked", asked[2], "b", "c")
		want(t, "failures", n.failures(), 1)
	})
}

func TestAnswerThatTakesTooLong(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.delay = time.Hour
		capacityOf(t, leases, "db", wants(1))
		time.Sleep(3100 * ms)
		want(t, "failures", n.failures(), 1)
		want(t, "calls", len(n.asked()), 2)
		// A refresh and a release are waited for, of which each gets two
		// seconds.
		start := time.Now()
		leases.Close()
		wantBetween(t, "close", time.Since(start), 3700*ms, 4*time.Second)
	})
}

func TestOddAnswers(t *testing.T) {
	name, other := proto.String("db"), proto.String("other")
	five := &doorman.Lease{
		ExpiryTime:      proto.Int64(math.MaxInt64),
		RefreshInterval: proto.Int64(5),
		Capacity:        proto.Float64(5),
	}
	late := &doorman.Lease{
		ExpiryTime:      proto.Int64(math.MaxInt64),
		RefreshInterval: proto.Int64(math.MaxInt64),
		Capacity:        proto.Float64(5),
	}
	soon := proto.Clone(five).(*doorman.Lease)
	soon.RefreshInterval = proto.Int64(math.MinInt64)
	for _, test := range []struct {
		name   string
		answer []*doorman.ResourceResponse
		// capacity is what is leased then, and interval the time until the next
		// request, less a tenth at most.
		capacity float64
		interval time.Duration
	}{
		{"none", nil, 0, time.Second},
		{"nil", []*doorman.ResourceResponse{nil}, 0, time.Second},
		{"another", []*doorman.ResourceResponse{{ResourceId: other, Gets: five}}, 0, time.Second},
		{"no lease", []*doorman.ResourceResponse{{ResourceId: name}}, 0, time.Second},
		{"one", []*doorman.ResourceResponse{{ResourceId: name, Gets: five}}, 5, 5 * time.Second},
		{"twice", []*doorman.ResourceResponse{
			{ResourceId: name, Gets: five}, {ResourceId: name, Gets: five},
		}, 0, time.Second},
		{"three times", []*doorman.ResourceResponse{
			{ResourceId: name, Gets: five}, {ResourceId: name, Gets: five}, {ResourceId: name, Gets: five},
		}, 0, time.Second},
		{"one more", []*doorman.ResourceResponse{
			{ResourceId: name, Gets: five}, {ResourceId: other, Gets: soon}, {ResourceId: other},
		}, 5, 5 * time.Second},
		{"late", []*doorman.ResourceResponse{{ResourceId: name, Gets: late}}, 5, time.Hour},
		{"soon", []*doorman.ResourceResponse{{ResourceId: name, Gets: soon}}, 5, time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
				n.state.change = func(answer *doorman.GetCapacityResponse) {
					answer.Response = test.answer
				}
				capacity := capacityOf(t, leases, "db", wants(5))
				time.Sleep(test.interval + ms)
				want(t, "capacity", capacity.Get(), test.capacity)
				asked := n.asked()
				want(t, "calls", len(asked), 2)
				interval := asked[1].at.Sub(asked[0].at)
				wantBetween(t, "interval", interval, test.interval*9/10, test.interval)
			})
		})
	}
}

func TestClientThatIsClosedDuringARefreshLetsGo(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rate := rateOf(t, leases, "db", wants(50))
		waitN(t, rate, 1_000_000)
		var waiting sync.WaitGroup
		for range 3 {
			waiting.Go(func() { want(t, "wait", rate.Wait(t.Context(), 1), fault.ErrClosed) })
		}
		n.set(func(s *state) { s.delay = 300 * ms })
		// The request of a refresh has come, and its answer has not.
		for calls := len(n.asked()); len(n.asked()) == calls; {
			time.Sleep(ms)
		}
		start := time.Now()
		for range 3 {
			// All return when the leases are released.
			waiting.Go(func() {
				leases.Close()
				wantNames(t, "released", n.released(), "db")
				wantBetween(t, "close", time.Since(start), 590*ms, 600*ms)
			})
		}
		waiting.Wait()
		want(t, "capacity", rate.Capacity(), 0)
		calls := len(n.asked())
		time.Sleep(time.Minute)
		want(t, "calls", len(n.asked()), calls)
	})
}

func TestCloseTakesFiveSecondsAtMost(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		// Every call is refused, but late, and the next ones are made for each
		// half.
		n.state.forbidden, n.state.delay = "not", 1900*ms
		capacities(t, leases, 1, numbered("not-", 100)...)
		// All are asked for now, with the first one or after it.
		time.Sleep(2 * time.Second)
		start := time.Now()
		leases.Close()
		wantBetween(t, "close", time.Since(start), 2*time.Second, 5*time.Second)
		// No goroutine is left, and no call made any more.
		synctest.Wait()
		calls := len(n.asked())
		time.Sleep(time.Minute)
		want(t, "calls", len(n.asked()), calls)
	})
}

func TestNothingIsUsedAfterTheClientWasClosed(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rate := rateOf(t, leases, "rate", wants(100))
		gauge := gaugeOf(t, leases, "gauge", wants(100))
		capacity := capacityOf(t, leases, "capacity", wants(100))
		waitN(t, rate, 1)
		place := acquire(t, gauge)
		wantChanged(t, capacity, 100)
		start := time.Now()
		leases.Close()
		want(t, "close", time.Since(start), 0)
		wantNames(t, "released", n.released(), "capacity", "gauge", "rate")
		want(t, "try", rate.Try(1), false)
		_, ok := gauge.TryAcquire()
		want(t, "a place is free", ok, false)
		want(t, "rate", rate.Capacity(), 0)
		want(t, "gauge", gauge.Capacity(), 0)
		want(t, "capacity", capacity.Get(), 0)
		want(t, "wait", rate.Wait(t.Context(), 1), fault.ErrClosed)
		wantFails[*lease.Place](t, fault.ErrClosed)(gauge.Acquire(t.Context()))
		wantFails[float64](t, fault.ErrClosed)(capacity.Changed(t.Context()))
		wantFails[*lease.Gauge](t, fault.ErrClosed)(leases.Gauge("other", measured))
		place.Release()
		rate.Close()
		gauge.Close()
		capacity.Close()
		// A second time changes nothing.
		leases.Close()
		want(t, "releases", len(n.state.releases), 1)
	})
}

func TestCloseWithoutLeases(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		start := time.Now()
		leases.Close()
		leases.Close()
		want(t, "close", time.Since(start), 0)
	})
}

func TestMetricsSayWhatIsWantedAndLeased(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.capacities["db"] = 3
		capacity := capacityOf(t, leases, "db", wants(5))
		time.Sleep(1100 * ms)
		want(t, "metrics", n.metricsOf("db"), [2]float64{5, 3})
		capacity.Close()
		synctest.Wait()
		want(t, "metrics", n.metricsOf("db"), [2]float64{0, 0})
	})
}
