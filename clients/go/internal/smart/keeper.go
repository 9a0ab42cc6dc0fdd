package smart

import (
	"context"
	"math"
	"time"
)

const (
	// tick is how often demand is measured, and what is too much thrown away.
	tick = 100 * time.Millisecond

	// step is the least pause after a refusal that says where the bucket stands,
	// unless half of the bucket is there before: else a request for the one
	// token that comes next would follow the other.
	step = 20 * time.Millisecond

	// leastPause and longestPause are the bounds of the pause after requests
	// without tokens. It doubles.
	leastPause   = 500 * time.Millisecond
	longestPause = 10 * time.Second

	// limitTime is how long the bucket is taken to refuse more tokens at once
	// than it has refused.
	limitTime = time.Minute
)

// keeper takes the tokens of a smart bucket.
type keeper struct {
	context context.Context
	asker   Asker
	metrics Metrics
	// ahead is the time whose use is taken ahead.
	ahead time.Duration
	stock *stock

	// demand is all demand, and refused that which was refused.
	demand, refused meter
	// counted are the tokens that the metrics were told of.
	counted figures
	// addedAt is when tokens came last.
	addedAt time.Time
	// level is where the bucket stood at levelAt.
	level   Level
	levelAt time.Time
	// part are the tokens that are there for the next request, if a refusal has
	// said so; else 0.
	part int64
	// lends says that the bucket has tokens used before they have come.
	lends bool
	// isContested says that others keep the bucket in debt, so that its tokens
	// are not to be had soon.
	isContested bool
	// limit is the most that the bucket gives at once, until limitUntil.
	limit      int64
	limitUntil time.Time
	// pause is the longest pause after a request without tokens.
	pause time.Duration
}

func newKeeper(
	ctx context.Context, asker Asker, metrics Metrics, ahead time.Duration, stock *stock,
) keeper {
	k := keeper{
		context: ctx, asker: asker, metrics: metrics, ahead: ahead, stock: stock, pause: leastPause,
	}
	now := time.Now()
	k.demand.count(0, now)
	k.refused.count(0, now)
	k.addedAt = now
	return k
}

// run runs until there are no tokens and no demand, or the bucket is closed.
func (k *keeper) run() {
	for {
		// What was used before the end is told.
		hasEnded := k.context.Err() != nil
		now := k.measure()
		switch wanted := wanted(k.target(), now.there, now.waiting); {
		case hasEnded:
			k.stock.letGo()
			return
		case wanted > 0:
			k.ask(wanted)
		case k.demand.demanded() > 0 || now.there > 0 || now.waiting > 0:
			k.rest()
		case k.stock.letGo():
			return
		}
	}
}

// rest waits for the next tick, or until the keeper is woken.
func (k *keeper) rest() {
	timer := time.NewTimer(tick)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-k.stock.bell:
	case <-k.context.Done():
	}
}

// measure counts the demand, and throws away what is too much for it.
func (k *keeper) measure() figures {
	// Before the look, so that what comes after it wakes the keeper again.
	k.stock.isWoken.Store(false)
	now, found := time.Now(), k.stock.look()
	used, refused := found.used-k.counted.used, found.refused-k.counted.refused
	if used != 0 || refused != 0 {
		k.metrics.SmartTokens(used, refused)
	}
	k.counted = found
	k.demand.count(found.used+found.refused, now)
	k.refused.count(found.refused, now)
	target := k.target()
	k.stock.low.Store(half(target))
	// Not before those could use them who have waited for them.
	if now.Sub(k.addedAt) >= k.ahead && found.there > target {
		k.stock.throwAway(target)
		found = k.stock.look()
	}
	return found
}

// target are the tokens to have.
func (k *keeper) target() int64 {
	// A single use, or a burst, says nothing about the next second; but who was
	// refused may come again.
	expected := k.refused.demanded()
	if k.demand.isSteady() {
		expected = k.demand.demanded()
	}
	return whole(float64(expected) * k.ahead.Seconds())
}

func (k *keeper) ask(wanted int64) {
	most := k.part
	k.part = 0
	if most == 0 {
		most = k.most(time.Now())
	}
	tokens := max(min(wanted, most), 1)
	maxWait := soon
	if k.isContested {
		// Where others wait for longer, too, nothing comes soon.
		maxWait = -1
	}
	switch answer := k.asker.Ask(k.context, tokens, maxWait); answer.Kind {
	case Granted:
		k.granted(&answer)
	case Later:
		k.later(tokens, &answer)
	case TooMany:
		if tokens > 1 {
			k.limit, k.limitUntil = tokens/2, time.Now().Add(limitTime)
			return
		}
		k.failed(answer)
	default:
		k.failed(answer)
	}
}

// most is the most to ask for at once: what is there; and what comes soon, of a
// bucket that lends.
func (k *keeper) most(now time.Time) int64 {
	limit := int64(math.MaxInt64)
	if now.Before(k.limitUntil) {
		limit = k.limit
	}
	if !k.level.IsKnown() {
		return limit
	}
	most := k.level.after(now.Sub(k.levelAt))
	switch {
	case k.isContested:
		most = k.level.inAShortTime()
	case k.lends:
		most += k.level.inAShortTime()
	}
	return min(whole(most), limit)
}

func (k *keeper) granted(answer *Answer) {
	k.level, k.levelAt = answer.Level, time.Now()
	k.lends = k.lends || answer.Level.Available < 0
	k.isContested = k.isContested && answer.Wait > soon
	k.pause = leastPause
	// They are not there before.
	if k.sleep(answer.Wait) {
		k.addedAt = time.Now()
		k.stock.add(answer.Tokens)
	}
}

// later waits for tokens that will come.
func (k *keeper) later(tokens int64, answer *Answer) {
	now := time.Now()
	k.isContested = answer.Debt > soon
	if !k.isContested {
		// It would have lent them.
		k.lends = false
	}
	level := answer.Level
	if there := level.There(); !k.isContested && there >= 1 && there < tokens {
		// A window does not refill before it ends: what is left of it is to be
		// had now.
		k.part, k.level, k.levelAt = there, level, now
		return
	}
	if !level.IsKnown() {
		// Where nobody says how fast tokens come: so many until the retry time.
		level = NewLevel(0, float64(tokens)/answer.RetryAfter.Seconds(), math.Inf(1))
	}
	k.level, k.levelAt = level, now
	// Less is there than it seems: others have come, or the rest is kept in
	// reserve.
	k.level.Available = min(level.Available, float64(tokens/2))
	k.stock.tell(*answer)
	pause := answer.RetryAfter
	if tokens > 1 && float64(tokens) > level.inAShortTime() && answer.Debt < pause-soon {
		// A part of them comes before the others.
		pause = answer.Debt + soon
	}
	if answer.Level.IsKnown() {
		pause = max(pause, min(answer.Level.untilHalfFull(), step))
	}
	k.rebuff(pause)
}

// failed tells those who wait that there are no tokens, and that nobody knows
// when there will be.
func (k *keeper) failed(answer Answer) {
	if k.context.Err() != nil {
		return
	}
	k.stock.tell(answer)
	k.sleep(leastPause)
}

// rebuff pauses after a refusal. Not for too long, as the limit may be raised.
func (k *keeper) rebuff(pause time.Duration) {
	if pause <= k.pause {
		k.sleep(pause)
		return
	}
	k.sleep(k.pause)
	k.pause = min(2*k.pause, longestPause)
}

// sleep waits, and returns false if the bucket is closed meanwhile.
func (k *keeper) sleep(wait time.Duration) bool {
	if wait <= 0 {
		return k.context.Err() == nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-k.context.Done():
		return false
	}
}
