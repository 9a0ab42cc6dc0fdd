package smart

import (
	"context"
	"errors"
	"math"
	"testing"
	"testing/synctest"
	"time"
)

func TestALevelIsKnownIfItsNumbersMakeSense(t *testing.T) {
	for _, one := range []struct {
		available, rate float64
		isKnown         bool
	}{
		{0, 1, true}, {-5, 1e-300, true}, {1, 0, false}, {1, -1, false}, {1, math.NaN(), false},
		{1, math.Inf(1), false}, {math.NaN(), 1, false}, {math.Inf(-1), 1, false}, {math.Inf(1), 1, false},
	} {
		if level := NewLevel(one.available, one.rate, 10); level.IsKnown() != one.isKnown {
			t.Errorf("%+v", one)
		}
	}
}

func TestNumbersOfTokensAreBounded(t *testing.T) {
	for tokens, expected := range map[float64]int64{
		-1: 0, math.Inf(-1): 0, 0.9: 0, 7.9: 7, 1e300: mostTokens, math.Inf(1): mostTokens,
	} {
		if found := whole(tokens); found != expected {
			t.Errorf("%v: %d", tokens, found)
		}
	}
	if found := whole(math.NaN()); found != 0 {
		t.Error(found)
	}
	var s stock
	s.init(func() {}, func() {})
	s.add(math.MaxInt64)
	s.add(math.MaxInt64)
	if found := s.look(); found.there != mostTokens || found.used != 0 {
		t.Errorf("%+v", found)
	}
}

func TestHowMuchIsWanted(t *testing.T) {
	for _, one := range []struct{ target, there, waiting, wanted int64 }{
		{0, 0, 0, 0}, {0, 0, 5, 5}, {0, 3, 5, 2}, {0, 5, 5, 0},
		{100, 50, 0, 0}, {100, 49, 0, 51}, {101, 50, 0, 51}, {100, 60, 61, 101},
	} {
		if found := wanted(one.target, one.there, one.waiting); found != one.wanted {
			t.Errorf("%+v: %d", one, found)
		}
	}
}

// asker answers what the test says, and remembers what it was asked for.
type asker struct {
	answers  []Answer
	tokens   []int64
	maxWaits []time.Duration
}

func (a *asker) Ask(_ context.Context, tokens int64, maxWait time.Duration) Answer {
	a.tokens, a.maxWaits = append(a.tokens, tokens), append(a.maxWaits, maxWait)
	answer := a.answers[0]
	if len(a.answers) > 1 {
		a.answers = a.answers[1:]
	}
	if answer.Kind == Granted && answer.Tokens == 0 {
		answer.Tokens = tokens
	}
	answer.Err = func(time.Duration) error { return errNone }
	return answer
}

var errNone = errors.New("no tokens")

type noMetrics struct{}

func (noMetrics) SmartTokens(int64, int64) {}

// asked is what a smart bucket asks for after these answers, the last of which
// is for good, while a caller waits for 1000 tokens.
func asked(t *testing.T, answers ...Answer) (a *asker) {
	synctest.Test(t, func(t *testing.T) {
		a = &asker{answers: answers}
		buckets := New(noMetrics{})
		defer buckets.Close()
		bucket := buckets.Bucket(a, time.Second)
		_ = bucket.Acquire(t.Context(), 1000, 3*time.Second)
	})
	return a
}

func wantAsked(t *testing.T, a *asker, expected ...int64) {
	t.Helper()
	for i, tokens := range expected {
		if i >= len(a.tokens) || a.tokens[i] != tokens {
			t.Fatalf("asked for %v, not %v", a.tokens, expected)
		}
	}
}

func TestTooManyAreAskedForInHalves(t *testing.T) {
	a := asked(t, Answer{Kind: TooMany}, Answer{Kind: TooMany}, Answer{Kind: Granted})
	wantAsked(t, a, 1000, 500, 250, 250, 250, 250)
}

func TestWhatIsLeftOfAWindowIsAskedForAtOnce(t *testing.T) {
	left := Level{Available: 7, Rate: 100, Size: 100}
	a := asked(t, Answer{Kind: Later, RetryAfter: time.Second, Level: left}, Answer{Kind: Granted, Level: left})
	wantAsked(t, a, 1000, 7)
}

func TestOfABucketThatLendsWhatComesSoonIsAskedForToo(t *testing.T) {
	debt := Level{Available: -10, Rate: 100, Size: 100}
	// A tenth of a second's tokens are lent, for a tenth of a second.
	a := asked(t, Answer{Kind: Granted, Tokens: 1, Wait: soon, Level: debt})
	// After the wait, nothing is there, and ten come soon.
	wantAsked(t, a, 1000, 10, 10, 10)
	if a.maxWaits[1] != soon {
		t.Error(a.maxWaits)
	}
}

func TestWhereOthersKeepABucketInDebtItsOwnWaitCounts(t *testing.T) {
	debt := Level{Available: -100, Rate: 100, Size: 100}
	a := asked(t, Answer{Kind: Later, RetryAfter: time.Second, Debt: time.Second, Level: debt}, Answer{Kind: Granted})
	wantAsked(t, a, 1000, 10)
	if a.maxWaits[0] != soon || a.maxWaits[1] != -1 {
		t.Error(a.maxWaits)
	}
}

func TestTheNextTokenIsNotAskedForByItself(t *testing.T) {
	for _, one := range []struct {
		size, available float64
		times           int
	}{
		// Before the bucket is full, of which a part may be kept in reserve.
		{5, 0, 200}, {50, 40, 500}, {50, 0, 50}, {math.Inf(1), 0, 50},
	} {
		synctest.Test(t, func(t *testing.T) {
			level := Level{Available: one.available, Rate: 500, Size: one.size}
			a := &asker{answers: []Answer{{Kind: Later, RetryAfter: 2 * time.Millisecond, Level: level}}}
			buckets := New(noMetrics{})
			defer buckets.Close()
			_ = buckets.Bucket(a, time.Second).Acquire(t.Context(), 1, 999*time.Millisecond)
			synctest.Wait()
			if len(a.tokens) != one.times {
				t.Errorf("%+v: asked %d times in a second", one, len(a.tokens))
			}
		})
	}
}

func TestPausesDoubleWithoutTokens(t *testing.T) {
	// No part of it comes soon, however slow the bucket is.
	for _, rate := range []float64{1000, 1, 1.0 / 3600} {
		testPauses(t, Level{Rate: rate, Size: 1000})
	}
}

func testPauses(t *testing.T, level Level) {
	synctest.Test(t, func(t *testing.T) {
		a := &asker{answers: []Answer{{Kind: Later, RetryAfter: time.Hour, Level: level}}}
		buckets := New(noMetrics{})
		defer buckets.Close()
		bucket := buckets.Bucket(a, time.Second)
		if err := bucket.Acquire(t.Context(), 1, 31*time.Second); err != ErrLate {
			t.Error(err)
		}
		synctest.Wait()
		// At 0, 0.5, 1.5, 3.5, 7.5, 15.5 and 25.5 seconds.
		if len(a.tokens) != 7 {
			t.Errorf("asked %d times", len(a.tokens))
		}
	})
}

func TestWhatFailsIsAskedForTwiceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &asker{answers: []Answer{{Kind: Failed}}}
		buckets := New(noMetrics{})
		defer buckets.Close()
		bucket := buckets.Bucket(a, time.Second)
		start := time.Now()
		for time.Since(start) < 10*time.Second {
			if err := bucket.Acquire(t.Context(), 1, time.Minute); err != errNone {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if len(a.tokens) > 22 {
			t.Errorf("asked %d times", len(a.tokens))
		}
	})
}
