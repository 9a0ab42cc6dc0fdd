package tollgate

import (
	"context"
	"math/rand/v2"
	"time"
)

// leastPause is the least time before a refused request is made again.
const leastPause = 20 * time.Millisecond

// waiting is the time of a request that is made again until its longest wait is over.
type waiting struct {
	start   time.Time
	maxWait time.Duration
	// The time for one answer.
	deadline time.Duration
}

// left is what is left of the wait.
func (w *waiting) left() time.Duration { return max(w.maxWait-time.Since(w.start), 0) }

// answer is the time for the next answer, so that the whole takes no longer than the wait and one
// answer.
func (w *waiting) answer() time.Duration {
	if w.maxWait > longest-w.deadline {
		return w.deadline
	}
	return max(min(w.maxWait+w.deadline-time.Since(w.start), w.deadline), 1)
}

// pause is the pause before the request is made again, which can't be granted before retryAfter. It
// returns false if that is too late.
func (w *waiting) pause(retryAfter time.Duration) (time.Duration, bool) {
	left := w.left()
	if retryAfter > left {
		return 0, false
	}
	// Up to a tenth longer, so that those who wait for the same do not all ask at once.
	part := 1 + rand.Float64()/10
	return min(seconds(max(retryAfter, leastPause).Seconds()*part), left), true
}

// pauseOfGuess is the same if retryAfter is a guess: there is a last attempt at the end of the wait.
func (w *waiting) pauseOfGuess(retryAfter time.Duration) (time.Duration, bool) {
	left := w.left()
	part := 0.75 + rand.Float64()/2
	return min(max(seconds(retryAfter.Seconds()*part), leastPause), left), left > 0
}

// sleep waits, or returns the error of the context if that ends before.
func sleep(ctx context.Context, wait time.Duration) error {
	if wait <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
