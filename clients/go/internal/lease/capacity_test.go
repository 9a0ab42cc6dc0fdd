package lease_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/lease"
)

// wantChanged expects the next change of a capacity.
func wantChanged(t *testing.T, capacity *lease.Capacity, now float64) {
	t.Helper()
	want(t, "changed", must(capacity.Changed(t.Context()))(t), now)
	want(t, "capacity", capacity.Get(), now)
}

func TestChangesOfACapacity(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		capacity := capacityOf(t, leases, "db", wants(5))
		wantChanged(t, capacity, 5)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		wantFails[float64](t, context.DeadlineExceeded)(capacity.Changed(ctx))
		capacity.SetWants(6)
		wantChanged(t, capacity, 6)
		time.AfterFunc(time.Second, capacity.Close)
		wantFails[float64](t, fault.ErrClosed)(capacity.Changed(t.Context()))
		want(t, "capacity", capacity.Get(), 0)
	})
}

func TestSettingsAreCopied(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		settings := wants(5)
		capacity := capacityOf(t, leases, "db", settings)
		*settings.Wants = 7
		wantChanged(t, capacity, 5)
	})
}

// TestModes lets leases run out: what is left, and when, and what a new lease
// changes.
func TestModes(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		safe := 7.0
		n.state.safe, n.state.length = &safe, 2
		modes := []struct {
			mode         lease.Mode
			before, left float64
		}{{lease.Safe, 0, 7}, {lease.Pessimistic, 0, 0}, {lease.Optimistic, 150, 150}}
		for i := range modes {
			n.state.capacities[string(rune('a'+i))] = 100
		}
		n.state.err = fault.ErrUnreachable
		var capacities []*lease.Capacity
		for i, mode := range modes {
			settings := wants(150)
			settings.Mode = mode.mode
			capacity := capacityOf(t, leases, string(rune('a'+i)), settings)
			want(t, "before any answer", capacity.Get(), mode.before)
			capacities = append(capacities, capacity)
		}
		for range 2 {
			n.set(func(s *state) { s.err = nil })
			for _, capacity := range capacities {
				wantChanged(t, capacity, 100)
			}
			n.set(func(s *state) { s.err = fault.ErrUnreachable })
			leased := time.Now()
			for i, capacity := range capacities {
				wantChanged(t, capacity, modes[i].left)
			}
			// A lease expires at a full second.
			wantBetween(t, "ran out", time.Since(leased), time.Second, 2*time.Second)
		}
	})
}

func TestWithoutABoundOfTheSafeCapacity(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, leases *lease.Leases) {
		safe := -1.0
		n.state.safe, n.state.length = &safe, 2
		rate := rateOf(t, leases, "db", wants(1))
		waitN(t, rate, 1)
		n.set(func(s *state) { s.err = errors.New("a fault") })
		time.Sleep(3 * time.Second)
		want(t, "try", rate.Try(1_000_000), true)
		want(t, "wait", waitN(t, rate, 1_000_000), 0)
		// There is no debt when a lease is held again.
		n.set(func(s *state) { s.err = nil })
		time.Sleep(1100 * ms)
		want(t, "capacity", rate.Capacity(), 1)
		want(t, "wait", waitN(t, rate, 1), 0)
	})
}
