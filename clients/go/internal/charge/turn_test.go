package charge

import (
	"math"
	"testing"
	"time"
)

func TestATurnTakesACharge(t *testing.T) {
	type step struct {
		outcome Outcome
		// asked is what is asked for before the outcome.
		asked int64
	}
	for name, one := range map[string]struct {
		steps []step
		left  int64
		pause time.Duration
		most  int64
	}{
		"all at once":         {[]step{{Outcome{Kind: Taken, Tokens: 100}, 100}}, 0, leastPause, math.MaxInt64},
		"more than asked for": {[]step{{Outcome{Kind: Taken, Tokens: 101}, 100}}, 0, leastPause, math.MaxInt64},
		"lost":                {[]step{{Outcome{Kind: Lost}, 100}}, 0, 2 * leastPause, math.MaxInt64},
		"never":               {[]step{{Outcome{Kind: Never}, 100}}, 0, 2 * leastPause, math.MaxInt64},
		"later":               {[]step{{Outcome{Kind: Later, Pause: time.Hour}, 100}}, 100, 2 * leastPause, math.MaxInt64},
		"in halves": {[]step{
			{Outcome{Kind: TooMany}, 100}, {Outcome{Kind: TooMany}, 50}, {Outcome{Kind: Taken, Tokens: 25}, 25},
			{Outcome{Kind: Later, Pause: time.Hour}, 25},
		}, 75, leastPause, 25},
		"what is there": {[]step{
			{Outcome{Kind: Part, Tokens: 7}, 100}, {Outcome{Kind: Taken, Tokens: 7}, 7},
			{Outcome{Kind: Later, Pause: time.Hour}, 93},
		}, 93, leastPause, math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			now := time.Now()
			charge := newCharge(100, now)
			turn := newTurn(charge, now)
			for _, step := range one.steps {
				if !turn.goesOn(now) || turn.next() != step.asked {
					t.Fatalf("%+v asks for %d", turn, turn.next())
				}
				turn.take(step.outcome, step.asked, now)
			}
			if turn.goesOn(now) {
				t.Fatalf("%+v goes on", turn)
			}
			// Meanwhile, more was charged.
			charge.add(11)
			open := turn.end(charge)
			if open.tokens != one.left+11 || open.pause != one.pause {
				t.Errorf("%+v", open)
			}
			if next := newTurn(open, now); next.most != one.most || next.until != open.mostUntil {
				t.Errorf("%+v", next)
			}
		})
	}
}

func TestATurnEndsInTime(t *testing.T) {
	now := time.Now()
	turn := newTurn(newCharge(100, now), now)
	turn.take(Outcome{Kind: Taken, Tokens: 1}, 1, now)
	if !turn.goesOn(now.Add(turnTime-1)) || turn.goesOn(now.Add(turnTime)) {
		t.Error("it goes on for too long")
	}
}

func TestPausesAreBounded(t *testing.T) {
	now := time.Now()
	charge := newCharge(1, now)
	var waited time.Duration
	for range 8 {
		turn := newTurn(charge, now)
		turn.take(Outcome{Kind: Later, Pause: time.Hour}, 1, now)
		charge = turn.end(charge)
		waited += charge.due.Sub(now)
	}
	// 0.5, 1, 2, 4, 8, 10, 10 and 10 seconds.
	if waited != 45500*time.Millisecond {
		t.Error(waited)
	}
}

func TestChargesDoNotOverflow(t *testing.T) {
	charge := newCharge(5, time.Now())
	charge.add(math.MaxInt64)
	charge.add(math.MaxInt64)
	if charge.tokens != math.MaxInt64 {
		t.Error(charge.tokens)
	}
}
