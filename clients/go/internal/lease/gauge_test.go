package lease_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/lease"
)

// acquire waits for a place, which it must get.
func acquire(t *testing.T, gauge *lease.Gauge) *lease.Place {
	t.Helper()
	return must(gauge.Acquire(t.Context()))(t)
}

func TestFirstInTheQueueThatGivesUpLeavesThePlaceToTheNext(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.capacities["db"] = 1
		gauge := gaugeOf(t, leases, "db", measured)
		place := acquire(t, gauge)
		var callers sync.WaitGroup
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		callers.Go(func() {
			wantFails[*lease.Place](t, context.DeadlineExceeded)(gauge.Acquire(ctx))
		})
		synctest.Wait()
		second := make(chan *lease.Place, 1)
		go func() { second <- acquire(t, gauge) }()
		callers.Wait()
		synctest.Wait()
		want(t, "second is in", len(second), 0)
		place.Release()
		_, ok := gauge.TryAcquire()
		want(t, "third overtakes", ok, false)
		synctest.Wait()
		want(t, "second is in", len(second), 1)
		next := <-second
		_, ok = gauge.TryAcquire()
		want(t, "third is in", ok, false)
		next.Release()
		place, ok = gauge.TryAcquire()
		want(t, "third is in", ok, true)
		place.Release()
	})
}

func TestPlacesAreGivenInTheOrderOfTheCalls(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		gauge := gaugeOf(t, leases, "db", wants(2))
		first, second := acquire(t, gauge), acquire(t, gauge)
		// One after the other, each with the place of the one before.
		order := make(chan int, 5)
		var callers sync.WaitGroup
		for i := range cap(order) {
			callers.Go(func() {
				place := acquire(t, gauge)
				order <- i
				time.Sleep(ms)
				place.Release()
			})
			synctest.Wait()
		}
		first.Release()
		for i := range cap(order) {
			want(t, "in", <-order, i)
			want(t, "in use", gauge.InUse(), 2)
		}
		callers.Wait()
		second.Release()
		want(t, "in use", gauge.InUse(), 0)
	})
}

func TestGaugeLetsInAsManyAsAreLeased(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		n.state.capacities["db"] = 100
		gauge := gaugeOf(t, leases, "db", measured)
		var callers sync.WaitGroup
		for range 150 {
			callers.Go(func() {
				place := acquire(t, gauge)
				time.Sleep(10 * time.Second)
				place.Release()
			})
		}
		// The others when these leave.
		for _, inUse := range []int{100, 50, 0} {
			time.Sleep(time.Second)
			want(t, "in use", gauge.InUse(), inUse)
			time.Sleep(9 * time.Second)
		}
		callers.Wait()
	})
}

func TestPlacesAreKeptWhenTheCapacityShrinks(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		gauge := gaugeOf(t, leases, "db", wants(3))
		places := []*lease.Place{acquire(t, gauge), acquire(t, gauge), acquire(t, gauge)}
		gauge.SetWants(1.5)
		time.Sleep(time.Second)
		want(t, "capacity", gauge.Capacity(), 1.5)
		want(t, "in use", gauge.InUse(), 3)
		for i, isFree := range []bool{false, false, true} {
			places[i].Release()
			place, ok := gauge.TryAcquire()
			want(t, "a place is free", ok, isFree)
			if ok {
				place.Release()
			}
		}
		// A share below 1 lets nobody in; one that is 1 but for rounding does.
		for _, share := range []float64{0.9, 1 - 1e-12} {
			gauge.SetWants(share)
			time.Sleep(time.Second)
			place, ok := gauge.TryAcquire()
			want(t, "a place is free", ok, share > 0.95)
			if ok {
				place.Release()
			}
		}
	})
}

func TestPlaceIsReleasedOnce(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		gauge := gaugeOf(t, leases, "db", wants(2))
		place, other := acquire(t, gauge), acquire(t, gauge)
		var callers sync.WaitGroup
		for range 10 {
			callers.Go(place.Release)
		}
		callers.Wait()
		want(t, "in use", gauge.InUse(), 1)
		other.Release()
		other.Release()
		want(t, "in use", gauge.InUse(), 0)
	})
}

func TestLeaseOfAGaugeIsReleasedWithItsLastPlace(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		gauge := gaugeOf(t, leases, "db", measured)
		first, last := acquire(t, gauge), acquire(t, gauge)
		waiting := make(chan error)
		// More than are leased, so that it waits for an answer.
		n.set(func(s *state) { s.capacities["db"] = 2 })
		go func() {
			_, err := gauge.Acquire(t.Context())
			waiting <- err
		}()
		synctest.Wait()
		gauge.Close()
		want(t, "error", <-waiting, fault.ErrClosed)
		_, ok := gauge.TryAcquire()
		want(t, "a place is free", ok, false)
		want(t, "capacity", gauge.Capacity(), 0)
		first.Release()
		time.Sleep(2 * time.Second)
		want(t, "released", len(n.released()), 0)
		// It is kept for the last place, as the metrics say.
		want(t, "capacity in the metrics", n.metricsOf("db")[1], 2)
		wantFails[*lease.Gauge](t, lease.ErrAlreadyLeased)(leases.Gauge("db", measured))
		gauge.Close()
		last.Release()
		synctest.Wait()
		want(t, "released", len(n.released()), 1)
		want(t, "metrics", n.metricsOf("db"), [2]float64{0, 0})
		gauge.Close()
		// One without places goes at once.
		gauge = gaugeOf(t, leases, "db", measured)
		gauge.Close()
		capacityOf(t, leases, "db", measured).Close()
	})
}
