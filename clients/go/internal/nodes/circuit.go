package nodes

import "time"

const (
	// Failures in a row after which a node is not called any more.
	mostFailures = 3
	// The pause before a failing node is checked, doubled with each failure up to longestPause.
	firstPause = 100 * time.Millisecond
	// The longest pause: a node that is well again is called after so long at most.
	longestPause = 10 * time.Second
	// How often a node that is not called is checked while it is well.
	checkInterval = 10 * time.Second
	// How long the one call of a trial may take before another one is tried.
	trialInterval = time.Second
)

// state says whether a node is called.
type state int

const (
	// The first check is under way.
	connecting state = iota
	// Called.
	up
	// A check has passed after failures: one call at a time until one is answered.
	trial
	// Not called until a check passes.
	down
)

// circuit is the circuit breaker of one node. Time is a parameter.
type circuit struct {
	state state
	// A call of a trial is under way.
	busy bool
	// Failed calls in a row.
	failures int
	// How often the circuit was opened, or the check failed, since the last call that was answered.
	trips int
	// Advanced when the state changes: what an older call reports says nothing about now.
	generation uint64
	// The node is overloaded, and wants to be left alone until then.
	quietUntil time.Time
	// Whether a call was answered since the last check.
	answered bool
}

// pass is the permission for one call, to be reported with its result.
type pass struct {
	generation uint64
	// The failures in a row that were known when the call began.
	failures int
}

// report is the result of a call.
type report int

const (
	// The caller has given up before the deadline, which says nothing about the node.
	cancelled report = iota
	// The node has answered, if only that the request is wrong.
	answered
	// The node is overloaded.
	overloaded
	// No answer in time, or an error.
	failed
	// No connection.
	unreachable
)

func (c *circuit) isCalled() bool { return c.state == up || c.state == trial }

// isQuiet says whether the node is left alone because it is overloaded.
func (c *circuit) isQuiet(now time.Time) bool { return now.Before(c.quietUntil) }

// pass returns the permission to call the node now, if there is one.
func (c *circuit) pass(now time.Time) (pass, bool) {
	if c.isQuiet(now) || !c.isCalled() || (c.state == trial && c.busy) {
		return pass{}, false
	}
	c.busy = c.state == trial
	return pass{c.generation, c.failures}, true
}

// report takes the result of a call. An overloaded node is left alone for a pause. Returns whether
// the circuit was opened.
func (c *circuit) report(pass pass, result report, pause time.Duration, now time.Time) bool {
	if pass.generation != c.generation {
		return false
	}
	isTrial := c.state == trial
	switch result {
	case answered:
		c.failures, c.trips, c.answered = 0, 0, true
		if isTrial {
			c.enter(up)
		}
	case overloaded:
		if until := now.Add(min(pause, longestPause)); until.After(c.quietUntil) {
			c.quietUntil = until
		}
		c.busy = false
	case cancelled:
		c.busy = false
	case failed, unreachable:
		// Those that were under way together fail together: that is one failure.
		c.failures = max(c.failures, pass.failures+1)
		if isTrial || result == unreachable || c.failures >= mostFailures {
			c.trips++
			c.enter(down)
			return true
		}
	}
	return false
}

// checked takes the result of a check.
func (c *circuit) checked(isWell bool) {
	switch {
	case !isWell:
		c.trips++
		c.enter(down)
	case c.state == connecting:
		c.enter(up)
	case c.state == down, c.state == trial:
		// The call of the last trial may take as long as it likes, without a verdict.
		c.enter(trial)
	}
	c.answered = false
}

func (c *circuit) enter(state state) {
	c.state, c.busy, c.failures = state, false, 0
	c.generation++
}

// needsNoCheck says whether a check can be left out, because calls are answered.
func (c *circuit) needsNoCheck() bool {
	answered := c.answered
	if c.state == up {
		c.answered = false
	}
	return c.state == up && answered
}

// pause says how long to wait before the next check; jitter from 0 to 1 spreads the checks of many
// clients over the last half of it.
func (c *circuit) pause(jitter float64) time.Duration {
	var pause time.Duration
	switch c.state {
	case up:
		pause = checkInterval
	case trial:
		pause = trialInterval
	case down:
		doublings := min(max(c.trips-1, 0), 16)
		pause = min(firstPause<<doublings, longestPause)
	}
	return time.Duration(float64(pause) * (0.5 + jitter/2))
}
