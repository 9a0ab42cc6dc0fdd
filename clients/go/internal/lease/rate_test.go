package lease_test

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/lease"
)

const ms = time.Millisecond

// waitN waits for n, which must succeed. It returns how long that took.
func waitN(t *testing.T, rate *lease.RateLimiter, n int) time.Duration {
	t.Helper()
	start := time.Now()
	if err := rate.Wait(t.Context(), n); err != nil {
		t.Error(err)
	}
	return time.Since(start)
}

// roughly drops the millisecond by which rounding may lengthen a wait.
func roughly(wait time.Duration) time.Duration {
	return wait.Truncate(10 * ms)
}

func TestRateIsThatOfTheCapacity(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.capacities["db"] = 5
		rate := rateOf(t, leases, "db", measured)
		start := time.Now()
		for range 100 {
			waitN(t, rate, 1)
		}
		// After a second or two of finding out how much is wanted.
		wantBetween(t, "seconds", time.Since(start).Seconds(), 19, 30)
	})
}

func TestFirstCallDoesNotWaitForTheNextRefresh(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rate := rateOf(t, leases, "db", measured)
		// The first answer was for no demand at all.
		time.Sleep(500 * ms)
		wantBetween(t, "wait", waitN(t, rate, 1), 0, 120*ms)
	})
}

func TestRateGrowsToTheDemandOfOneCallerAfterTheOther(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rate := rateOf(t, leases, "db", measured)
		var used atomic.Int64
		var caller sync.WaitGroup
		caller.Go(func() {
			for rate.Wait(t.Context(), 1) == nil {
				used.Add(1)
				time.Sleep(ms)
			}
		})
		time.Sleep(20 * time.Second)
		before := used.Load()
		time.Sleep(time.Second)
		// A caller without a limit would come a thousand times.
		wantBetween(t, "used in a second", int(used.Load()-before), 400, 1001)
		rate.Close()
		caller.Wait()
	})
}

func TestRateOfManyCallersStaysWithinTheCapacity(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.capacities["api"] = 100
		rate := rateOf(t, leases, "api", measured)
		var used atomic.Int64
		var callers sync.WaitGroup
		// More callers than the rate can serve.
		for range 50 {
			callers.Go(func() {
				for rate.Wait(t.Context(), 1) == nil {
					used.Add(1)
				}
			})
		}
		// The wants grow until the whole capacity is leased.
		time.Sleep(10 * time.Second)
		wantBetween(t, "used at first", int(used.Load()), 500, 1010)
		before := used.Load()
		time.Sleep(10 * time.Second)
		wantBetween(t, "used then", int(used.Load()-before), 990, 1010)
		rate.Close()
		callers.Wait()
	})
}

func TestWhatIsNotDemandedIsGivenBack(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rate := rateOf(t, leases, "db", measured)
		gauge := gaugeOf(t, leases, "places", measured)
		for range 5 {
			defer acquire(t, gauge).Release()
		}
		for range 100 {
			waitN(t, rate, 1)
		}
		wantBetween(t, "rate", rate.Capacity(), 10, 1000)
		wantBetween(t, "gauge", gauge.Capacity(), 5, 100)
		want(t, "in use", gauge.InUse(), 5)
		time.Sleep(15 * time.Second)
		want(t, "rate", rate.Capacity(), 0)
		// As many as are in use, with some headroom.
		want(t, "gauge", gauge.Capacity(), 6)
	})
}

func TestDebtIsPaidAtTheCapacityThatWasHeld(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.capacities["db"] = 10
		rate := rateOf(t, leases, "db", wants(1000))
		waitN(t, rate, 101)
		time.Sleep(5 * time.Second)
		// About half of the debt is left, for which the larger capacity takes
		// 50 ms.
		n.set(func(s *state) { s.capacities["db"] = 1000 })
		for rate.Capacity() < 1000 {
			time.Sleep(ms)
		}
		want(t, "try", rate.Try(1), false)
		wantBetween(t, "wait", waitN(t, rate, 1), 30*ms, 60*ms)
	})
}

func TestDebtIsDemand(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.capacities["db"] = 100
		rate := rateOf(t, leases, "db", measured)
		waitN(t, rate, 3000)
		wantBetween(t, "seconds", waitN(t, rate, 1).Seconds(), 29, 32)
		// More is not asked for in a hurry, as there is none.
		wantBetween(t, "calls", len(n.asked()), 29, 40)
	})
}

func TestWhatIsRefusedAtOnceIsDemand(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rate := rateOf(t, leases, "rate", measured)
		gauge := gaugeOf(t, leases, "gauge", measured)
		// until calls try ten times a second until it succeeds.
		until := func(try func() bool) time.Duration {
			start := time.Now()
			for !try() {
				time.Sleep(100 * ms)
			}
			return time.Since(start)
		}
		wantBetween(t, "rate", until(func() bool {
			all := true
			for range 100 {
				all = rate.Try(1) && all
			}
			return all
		}), 0, 3*time.Second)
		wantBetween(t, "gauge", until(func() bool {
			all := true
			for range 100 {
				place, ok := gauge.TryAcquire()
				if ok {
					defer place.Release()
				}
				all = ok && all
			}
			return all
		}), 0, 3*time.Second)
	})
}

func TestWaitIsInTheOrderOfTheCalls(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rate := rateOf(t, leases, "db", wants(10))
		waitN(t, rate, 1)
		start := time.Now()
		var mu sync.Mutex
		var order []int
		var waits []time.Duration
		var callers sync.WaitGroup
		for i := range 5 {
			callers.Go(func() {
				waitN(t, rate, 1)
				mu.Lock()
				defer mu.Unlock()
				order, waits = append(order, i), append(waits, roughly(time.Since(start)))
			})
			synctest.Wait()
		}
		want(t, "try while others wait", rate.Try(1), false)
		callers.Wait()
		if !slices.Equal(order, []int{0, 1, 2, 3, 4}) ||
			!slices.Equal(waits, []time.Duration{100 * ms, 200 * ms, 300 * ms, 400 * ms, 500 * ms}) {
			t.Errorf("%v after %v", order, waits)
		}
	})
}

func TestWaitThatGivesUpUsesNothing(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rate := rateOf(t, leases, "db", wants(1))
		waitN(t, rate, 1)
		start := time.Now()
		giveUp := func(after time.Duration) {
			ctx, cancel := context.WithTimeout(t.Context(), after)
			defer cancel()
			want(t, "error", rate.Wait(ctx, 1), context.DeadlineExceeded)
			want(t, "when", time.Since(start), after)
		}
		// The first one, and one in the middle of the queue.
		var callers sync.WaitGroup
		callers.Go(func() { giveUp(500 * ms) })
		synctest.Wait()
		callers.Go(func() {
			waitN(t, rate, 1)
			want(t, "second", roughly(time.Since(start)), time.Second)
		})
		synctest.Wait()
		callers.Go(func() { giveUp(700 * ms) })
		synctest.Wait()
		callers.Go(func() {
			waitN(t, rate, 1)
			want(t, "last", roughly(time.Since(start)), 2*time.Second)
		})
		callers.Wait()
		// Nobody waits any more.
		time.Sleep(time.Second)
		want(t, "try", rate.Try(1), true)
	})
}

func TestTryDoesNotOvertakeThoseWhoWait(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rate := rateOf(t, leases, "db", wants(10))
		waitN(t, rate, 1)
		for range 20 {
			var caller sync.WaitGroup
			caller.Go(func() { waitN(t, rate, 1) })
			synctest.Wait()
			// Both come at the same time.
			time.Sleep(100 * ms)
			want(t, "try", rate.Try(1), false)
			caller.Wait()
		}
	})
}

func TestDemandOfAPartOfASecondIsNotMultiplied(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rate := rateOf(t, leases, "db", measured)
		time.Sleep(10 * ms)
		want(t, "try", rate.Try(3), false)
		time.Sleep(100 * ms)
		asked := n.asked()
		want(t, "wants", asked[len(asked)-1].wants[0], 3)
	})
}

func TestContextThatHasEndedUsesNothing(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rate := rateOf(t, leases, "rate", wants(1))
		gauge := gaugeOf(t, leases, "gauge", wants(1))
		time.Sleep(ms)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		want(t, "wait", rate.Wait(ctx, 1), context.Canceled)
		want(t, "wait for nothing", rate.Wait(ctx, 0), context.Canceled)
		wantFails[*lease.Place](t, context.Canceled)(gauge.Acquire(ctx))
		// All is there still.
		want(t, "try", rate.Try(1), true)
		defer acquire(t, gauge).Release()
	})
}

func TestNothingToUseDoesNotWait(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rate := rateOf(t, leases, "db", wants(1))
		waitN(t, rate, 100)
		for _, none := range []int{0, -1} {
			want(t, "wait", waitN(t, rate, none), 0)
			want(t, "try", rate.Try(none), true)
		}
		want(t, "try", rate.Try(1), false)
		rate.Close()
		want(t, "try", rate.Try(0), false)
		want(t, "wait", rate.Wait(t.Context(), 0), fault.ErrClosed)
	})
}

func TestRateLimiterThatIsClosedServesNobody(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		rate := rateOf(t, leases, "db", wants(10))
		waitN(t, rate, 1000)
		var callers sync.WaitGroup
		for range 5 {
			callers.Go(func() { want(t, "wait", rate.Wait(t.Context(), 1), fault.ErrClosed) })
		}
		synctest.Wait()
		rate.Close()
		callers.Wait()
		rate.Close()
		want(t, "try", rate.Try(1), false)
		want(t, "capacity", rate.Capacity(), 0)
		rate.SetWants(5)
		synctest.Wait()
		want(t, "releases", len(n.released()), 1)
	})
}
