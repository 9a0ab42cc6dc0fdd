package smart

import (
	"math"
	"time"
)

// soon is how long tokens that are asked for may take to come. While demand is
// greater than the bucket's rate, this is how much is asked for at a time.
const soon = 100 * time.Millisecond

// Level is where a bucket stands after an answer.
type Level struct {
	// Available are the tokens that are there; a debt is negative.
	Available float64
	// Rate are the tokens that come in a second; 0 if the level is not known.
	Rate float64
	// Size is the most that are there.
	Size float64
}

// NewLevel returns a level that is known if its numbers are finite and its rate
// is positive.
func NewLevel(available, rate, size float64) Level {
	isFinite := func(number float64) bool { return number-number == 0 }
	if !(rate > 0) || !isFinite(rate) || !isFinite(available) {
		return Level{}
	}
	return Level{Available: available, Rate: rate, Size: size}
}

// IsKnown says whether anything is known.
func (l Level) IsKnown() bool { return l.Rate > 0 }

// There is how many whole tokens are there.
func (l Level) There() int64 { return whole(l.Available) }

// after are the tokens that are there after a time.
func (l Level) after(elapsed time.Duration) float64 {
	return min(l.Available+l.Rate*elapsed.Seconds(), l.Size)
}

// inAShortTime are the tokens that come soon.
func (l Level) inAShortTime() float64 { return l.Rate * soon.Seconds() }

// untilHalfFull is the time until half of the bucket is there, of a known level,
// not counting what it takes to pay a debt. It is an hour at most.
func (l Level) untilHalfFull() time.Duration {
	missing := max(l.Size/2-max(l.Available, 0), 0)
	return time.Duration(min(missing/l.Rate, 3600) * float64(time.Second))
}

// whole rounds a number of tokens down, to 0 at least.
func whole(tokens float64) int64 {
	switch {
	case !(tokens > 0):
		return 0
	case tokens >= mostTokens:
		return mostTokens
	}
	return int64(math.Floor(tokens))
}

// half is the half of a number of tokens, rounded up.
func half(tokens int64) int64 { return tokens/2 + tokens%2 }

// wanted are the tokens to ask for: nothing as long as half of the target is
// there, and all that is waited for.
func wanted(target, there, waiting int64) int64 {
	if there >= half(target) && there >= waiting {
		return 0
	}
	return max(target+waiting-there, 0)
}
