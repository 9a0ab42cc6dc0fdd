package lease

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// isNear says whether two numbers are the same but for rounding.
func isNear(a, b float64) bool {
	return a == b || math.Abs(a-b) <= 1e-6*max(math.Abs(a), math.Abs(b))
}

// wantTake takes tokens, and expects this wait; 0 if the tokens are there.
func wantTake(t *testing.T, m *meter, tokens float64, h held, now time.Time, want time.Duration) {
	t.Helper()
	wait, ok := m.take(tokens, h, now)
	if ok != (want == 0) || !isNear(wait.Seconds(), want.Seconds()) {
		t.Errorf("take(%v) returned %v, %v instead of %v", tokens, wait, ok, want)
	}
}

func wantDebt(t *testing.T, m *meter, want float64) {
	t.Helper()
	if debt := m.debt(); !isNear(debt, want) {
		t.Errorf("the debt is %v, not %v", debt, want)
	}
}

func TestMeterTakesAtTheRateOfTheMoment(t *testing.T) {
	start := time.Now()
	holding := func(capacity float64) held {
		return held{capacity: capacity, expires: start.Add(1000 * time.Second)}
	}
	steps := []struct {
		name             string
		tokens, capacity float64
		// at is milliseconds after the start.
		at   int
		wait time.Duration
	}{
		{"one is there", 1, 10, 0, 0},
		{"the next one is not", 1, 10, 0, 100 * time.Millisecond},
		{"twice the capacity is half the wait", 1, 20, 0, 50 * time.Millisecond},
		{"the wait is over", 1, 20, 50, 0},
		{"nothing at all", 1, 0, 60_000, forever},
		{"a tenth of a second's capacity at once", 10, 100, 120_000, 0},
		{"and no more", 1, 100, 120_000, 10 * time.Millisecond},
		{"more than that is a debt", 100, 100, 180_000, 0},
		{"which is waited for", 1, 100, 180_000, 910 * time.Millisecond},
		{"no wait is shorter than a millisecond", 1, 1e6, 180_000, shortestWait},
		{"without a bound there are no debts", 1e9, math.Inf(1), 180_001, 0},
		{"nor later", 10, 100, 180_001, 0},
		{"an earlier time is now", 1, 100, 0, 10 * time.Millisecond},
		{"and no time counts twice", 1, 100, 180_002, 9 * time.Millisecond},
	}
	m := newMeter(start)
	for _, step := range steps {
		t.Run(step.name, func(t *testing.T) {
			now := start.Add(time.Duration(step.at) * time.Millisecond)
			wantTake(t, &m, step.tokens, holding(step.capacity), now, step.wait)
		})
	}
}

func TestMeterWaitsForTinyCapacitiesWithoutOverflow(t *testing.T) {
	start := time.Now()
	m := newMeter(start)
	tiny := held{capacity: math.SmallestNonzeroFloat64, expires: start.Add(forever)}
	wantTake(t, &m, 1, tiny, start, 0)
	wantTake(t, &m, 1, tiny, start, forever)
}

func TestMeterHasTheTokensAfterTheWait(t *testing.T) {
	for _, capacity := range []float64{3, 7, 11, 13} {
		start := time.Now()
		m := newMeter(start)
		h := held{capacity: capacity, expires: start.Add(forever)}
		wantTake(t, &m, 1, h, start, 0)
		wait, _ := m.take(1, h, start)
		wantTake(t, &m, 1, h, start.Add(wait), 0)
	}
}

func TestMeterPaysADebtAtTheCapacityOfEachMoment(t *testing.T) {
	start := time.Now()
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	h := held{capacity: 10, expires: at(2000), after: 1}
	m := newMeter(start)
	wantTake(t, &m, 101, h, at(0), 0)
	wantDebt(t, &m, 100)
	// Two seconds of the lease, and one without it.
	wantTake(t, &m, 1, h, at(3000), 80*time.Second)
	wantDebt(t, &m, 79)
	// A larger capacity counts from when it is held.
	m.accrue(h, at(4000))
	larger := held{capacity: 100, expires: at(60_000)}
	wantTake(t, &m, 1, larger, at(4000), 790*time.Millisecond)
	wantTake(t, &m, 1, larger, at(4790), 0)
}

// TestMeterTakesNoMoreThanTheCapacity drives random histories: never more is
// taken than has accrued, the burst and the largest number at once, however the
// capacity changes.
func TestMeterTakesNoMoreThanTheCapacity(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 0))
		now := time.Now()
		ms := func(most int) time.Duration {
			return time.Duration(random.IntN(most)) * time.Millisecond
		}
		h := held{capacity: 10, expires: now.Add(300 * time.Millisecond), after: 2}
		m := newMeter(now)
		var taken, largest, accrued float64
		saved := 1.0
		for range 1 + random.IntN(200) {
			for range ms(500) / time.Millisecond {
				accrued += h.at(now) / 1000
				now = now.Add(time.Millisecond)
				saved = max(saved, most(h.at(now)))
			}
			if random.IntN(5) == 0 {
				m.accrue(h, now)
				h = held{
					capacity: 1000 * random.Float64(),
					expires:  now.Add(ms(700)),
					after:    50 * random.Float64(),
				}
				saved = max(saved, most(h.at(now)))
			}
			tokens := float64(1 + random.IntN(19))
			if _, ok := m.take(tokens, h, now); ok {
				taken += tokens
				largest = max(largest, tokens)
			}
			if taken > accrued+saved+largest+1e-6 {
				t.Fatalf("seed %d: %v of %v are taken", seed, taken, accrued)
			}
		}
	}
}
