package lease_test

import (
	"context"
	"math/rand/v2"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/lease"
)

// TestStress uses few resources from many goroutines at once, in real time, for
// the race detector.
func TestStress(t *testing.T) {
	before := runtime.NumGoroutine()
	n, leases := start()
	n.state.delay = time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	var callers sync.WaitGroup
	for seed := range uint64(8) {
		callers.Go(func() {
			random := rand.New(rand.NewPCG(seed, 0))
			for ctx.Err() == nil {
				name := strconv.Itoa(random.IntN(3))
				stressRate(ctx, leases, "rate-"+name)
				stressGauge(ctx, t, leases, "gauge-"+name)
				stressCapacity(ctx, leases, "capacity-"+name)
			}
		})
	}
	time.Sleep(400 * time.Millisecond)
	leases.Close()
	leases.Close()
	callers.Wait()
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before; {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines more than before", runtime.NumGoroutine()-before)
		}
		time.Sleep(time.Millisecond)
	}
}

// shortly is a context that ends before some calls return.
func shortly(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, time.Duration(rand.IntN(3000))*time.Microsecond)
}

func stressRate(ctx context.Context, leases *lease.Leases, name string) {
	capacity := 1000.0
	rate, err := leases.RateLimiter(name, lease.Settings{Wants: &capacity})
	if err != nil {
		return
	}
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for range 10 {
				ctx, cancel := shortly(ctx)
				_ = rate.Wait(ctx, 1+rand.IntN(3))
				rate.Try(1)
				cancel()
			}
			rate.Close()
		})
	}
	rate.SetWants(2000)
	callers.Wait()
}

func stressGauge(ctx context.Context, t *testing.T, leases *lease.Leases, name string) {
	const most = 3
	capacity := float64(most)
	gauge, err := leases.Gauge(name, lease.Settings{Wants: &capacity})
	if err != nil {
		return
	}
	var inside atomic.Int64
	use := func(place *lease.Place) {
		if inside.Add(1) > most {
			t.Error("too many have a place")
		}
		runtime.Gosched()
		inside.Add(-1)
		place.Release()
	}
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for range 10 {
				ctx, cancel := shortly(ctx)
				if place, err := gauge.Acquire(ctx); err == nil {
					use(place)
					go place.Release()
				}
				if place, ok := gauge.TryAcquire(); ok {
					use(place)
				}
				cancel()
			}
			gauge.Close()
		})
	}
	callers.Wait()
	if gauge.InUse() != 0 {
		t.Error("a place is lost")
	}
}

func stressCapacity(ctx context.Context, leases *lease.Leases, name string) {
	capacity, err := leases.Capacity(name, lease.Settings{})
	if err != nil {
		return
	}
	var callers sync.WaitGroup
	for i := range 3 {
		callers.Go(func() {
			ctx, cancel := shortly(ctx)
			defer cancel()
			capacity.SetWants(float64(i))
			_, _ = capacity.Changed(ctx)
			capacity.Get()
		})
	}
	callers.Wait()
	capacity.Close()
}
