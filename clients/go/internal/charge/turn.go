package charge

import (
	"math"
	"time"
)

const (
	// leastPause and longestPause are the bounds of the pause before a charge
	// that was refused is tried again. It doubles.
	leastPause   = 500 * time.Millisecond
	longestPause = 10 * time.Second

	// longestOpen is the time after which a bucket is not charged of which
	// nothing could be taken: what it is charged is of the past, and would
	// refuse the present.
	longestOpen = time.Minute

	// mostTime is how long the bucket is taken to give no more to one request
	// than it has.
	mostTime = time.Minute

	// turnTime is how long calls for one bucket follow one another.
	turnTime = 500 * time.Millisecond
)

// Kind is the kind of an outcome.
type Kind int

// The kinds.
const (
	// Lost means that nobody knows whether the tokens were taken. They are not
	// charged again.
	Lost Kind = iota
	// Taken means that tokens were taken.
	Taken
	// Later means that there may be some after a pause.
	Later
	// Part means that so many may be had now.
	Part
	// TooMany means that so many may be too many for one request.
	TooMany
	// Never means that there never will be any.
	Never
)

// Outcome is what came of a charge.
type Outcome struct {
	Kind Kind
	// Tokens is how many were taken, or may be had.
	Tokens int64
	// Pause is the time after which there may be some.
	Pause time.Duration
	// Why says why there never will be any.
	Why string
}

// LongPause is the pause where nobody says how long it should be.
const LongPause = longestPause

// charge is what a bucket is charged.
type charge struct {
	tokens int64
	// most is the most that the bucket gives to one request, until mostUntil.
	most      int64
	mostUntil time.Time
	// due is when the bucket is asked; zero if at once.
	due time.Time
	// pause is the next longest pause.
	pause time.Duration
	// since is when something could be taken last.
	since time.Time
}

func newCharge(tokens int64, now time.Time) charge {
	return charge{tokens: tokens, pause: leastPause, since: now}
}

// add charges more.
func (c *charge) add(tokens int64) {
	if tokens > math.MaxInt64-c.tokens {
		tokens = math.MaxInt64 - c.tokens
	}
	c.tokens += tokens
}

func (c *charge) isTooOld(now time.Time) bool {
	return now.Sub(c.since) > longestOpen
}

// turn is a row of calls for one bucket.
type turn struct {
	charge  charge
	start   time.Time
	left    int64
	most    int64
	until   time.Time
	part    int64
	due     time.Time
	takenAt time.Time
}

// newTurn begins to take a charge.
func newTurn(charge charge, now time.Time) turn {
	t := turn{
		charge: charge, start: now, left: charge.tokens, most: math.MaxInt64, part: math.MaxInt64,
	}
	if now.Before(charge.mostUntil) {
		t.most, t.until = charge.most, charge.mostUntil
	}
	return t
}

// goesOn says whether there is another call.
func (t *turn) goesOn(now time.Time) bool {
	return t.left > 0 && t.due.IsZero() && now.Sub(t.start) < turnTime
}

// next are the tokens to ask for.
func (t *turn) next() int64 {
	return min(t.left, t.most, t.part)
}

// take takes what came of a call for so many tokens.
func (t *turn) take(outcome Outcome, tokens int64, now time.Time) {
	switch outcome.Kind {
	case Taken:
		t.left = max(t.left-outcome.Tokens, 0)
		t.takenAt, t.part = now, math.MaxInt64
	case Lost:
		t.left -= tokens
	case Later:
		t.due = now.Add(min(outcome.Pause, t.charge.pause))
	case Part:
		t.part = outcome.Tokens
	case TooMany:
		t.most, t.until = tokens/2, t.start.Add(mostTime)
	case Never:
		t.left = 0
	}
}

// end is what is left of a charge that is so now: more may have been charged
// meanwhile.
func (t *turn) end(open charge) charge {
	open.tokens -= t.charge.tokens - t.left
	open.most, open.mostUntil, open.due = t.most, t.until, t.due
	open.pause = min(2*t.charge.pause, longestPause)
	if !t.takenAt.IsZero() {
		open.since, open.pause = t.takenAt, leastPause
	}
	return open
}
