package lease

import (
	"math"
	"time"
)

const (
	// burst is the part of a second's capacity that may be used at once.
	burst = 0.1

	// shortestWait bounds the wakeups of a fast rate: tokens that accrue while
	// the first caller waits are there for the next ones.
	shortestWait = time.Millisecond
)

// meter is a token bucket whose rate is the capacity of each moment.
type meter struct {
	tokens float64
	// at is the time up to which tokens have accrued.
	at time.Time
}

// newMeter holds one token.
func newMeter(now time.Time) meter {
	return meter{tokens: 1, at: now}
}

// accrue adds the tokens earned until now. It must be called before another
// capacity is held.
func (m *meter) accrue(h held, now time.Time) {
	if now.Before(m.at) {
		now = m.at
	}
	expires := h.expires
	switch {
	case expires.Before(m.at):
		expires = m.at
	case expires.After(now) && h.isValid(now):
		expires = now
	case expires.After(now):
		// The machine has slept: nobody knows since when.
		expires = m.at
	}
	earned := earned(h.capacity, expires.Sub(m.at)) + earned(h.after, now.Sub(expires))
	m.tokens = min(m.tokens+earned, most(h.at(now)))
	m.at = now
}

// take takes tokens if it can. Otherwise it returns how long to wait for them
// at the present capacity.
func (m *meter) take(tokens float64, h held, now time.Time) (wait time.Duration, ok bool) {
	m.accrue(h, now)
	capacity := h.at(now)
	if math.IsInf(capacity, 1) {
		return 0, true
	}
	// Tokens beyond the burst become a debt, which later callers wait for.
	missing := min(tokens, most(capacity)) - m.tokens
	if missing <= 0 && capacity > 0 {
		m.tokens -= tokens
		return 0, true
	}
	// Negated, as 0/0 is not a number.
	seconds := max(missing, 0) / capacity
	if !(seconds < forever.Seconds()) {
		return forever, false
	}
	return max(time.Duration(math.Ceil(seconds*float64(time.Second))), shortestWait), false
}

// debt is the number of tokens that were taken before they had accrued.
func (m *meter) debt() float64 {
	return max(-m.tokens, 0)
}

// most is the number of tokens that can be saved up.
func most(capacity float64) float64 {
	return max(capacity*burst, 1)
}

// earned is the number of tokens that accrue in some time. An infinite capacity
// earns nothing in no time.
func earned(capacity float64, time time.Duration) float64 {
	if time == 0 {
		return 0
	}
	return capacity * time.Seconds()
}
