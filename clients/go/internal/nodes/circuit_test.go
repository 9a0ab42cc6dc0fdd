package nodes

import (
	"math"
	"slices"
	"testing"
	"time"
)

var start = time.Unix(1_000_000, 0)

func newUp() *circuit {
	c := &circuit{}
	c.checked(true)
	return c
}

func mustPass(t *testing.T, c *circuit, now time.Time) pass {
	t.Helper()
	pass, ok := c.pass(now)
	if !ok {
		t.Fatalf("no call is allowed: %+v", c)
	}
	return pass
}

func mustNotPass(t *testing.T, c *circuit, now time.Time) {
	t.Helper()
	if _, ok := c.pass(now); ok {
		t.Fatalf("a call is allowed: %+v", c)
	}
}

func mustBe(t *testing.T, c *circuit, state state) {
	t.Helper()
	if c.state != state {
		t.Fatalf("the state is %v, not %v", c.state, state)
	}
}

func TestACircuitOpensAfterFailuresInARowAndTriesOneCallAtATime(t *testing.T) {
	c := &circuit{}
	mustNotPass(t, c, start)
	if c.pause(1) != 0 {
		t.Fatal("the first check waits")
	}
	c.checked(true)
	old := mustPass(t, c, start)
	for range 10 {
		for range 2 {
			if c.report(mustPass(t, c, start), failed, 0, start) {
				t.Fatal("opened by two failures")
			}
		}
		c.report(old, answered, 0, start)
	}
	for range 10 {
		if c.report(old, failed, 0, start) {
			t.Fatal("calls that fail together are one failure")
		}
	}
	opened := []bool{}
	for range 2 {
		opened = append(opened, c.report(mustPass(t, c, start), failed, 0, start))
	}
	if !slices.Equal(opened, []bool{false, true}) {
		t.Fatalf("opened: %v", opened)
	}
	mustBe(t, c, down)
	mustNotPass(t, c, start)
	// Calls of before say nothing any more.
	c.report(old, answered, 0, start)
	mustBe(t, c, down)
	c.checked(true)
	first := mustPass(t, c, start)
	mustNotPass(t, c, start)
	c.report(old, failed, 0, start)
	mustBe(t, c, trial)
	c.report(first, cancelled, 0, start)
	slow := mustPass(t, c, start)
	// It takes too long. Another one may be tried after the next check.
	c.checked(true)
	next := mustPass(t, c, start)
	if c.report(slow, failed, 0, start) || !c.report(next, failed, 0, start) {
		t.Fatal("the first failure of a trial opens the circuit, and no other")
	}
	c.checked(true)
	c.report(mustPass(t, c, start), answered, 0, start)
	mustBe(t, c, up)
	mustPass(t, c, start)
	mustPass(t, c, start)
}

func TestAnUnreachableNodeIsNotCalledAtOnceAgain(t *testing.T) {
	c := newUp()
	if !c.report(mustPass(t, c, start), unreachable, 0, start) {
		t.Fatal("not opened")
	}
	mustBe(t, c, down)
}

func TestPausesDoubleUntilACallIsAnswered(t *testing.T) {
	c := newUp()
	ms := func() int64 { return c.pause(1).Milliseconds() }
	if ms() != 10_000 {
		t.Fatalf("%d ms between checks", ms())
	}
	c.report(mustPass(t, c, start), unreachable, 0, start)
	pauses := []int64{}
	for range 9 {
		pauses = append(pauses, ms())
		c.checked(false)
	}
	expected := []int64{100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000}
	if !slices.Equal(pauses, expected) {
		t.Fatalf("pauses: %v", pauses)
	}
	// A check that passes is no call that was answered.
	c.checked(true)
	c.report(mustPass(t, c, start), failed, 0, start)
	if ms() != 10_000 || c.pause(0).Milliseconds() != 5000 {
		t.Fatalf("%d to %v", ms(), c.pause(0))
	}
	c.checked(true)
	c.report(mustPass(t, c, start), answered, 0, start)
	c.report(mustPass(t, c, start), unreachable, 0, start)
	if ms() != 100 {
		t.Fatalf("%d ms after an answer", ms())
	}
	for range 1000 {
		c.checked(false)
	}
	if ms() != 10_000 {
		t.Fatalf("%d ms after many failures", ms())
	}
}

func TestAnOverloadedNodeIsLeftAloneForAsLongAsItSays(t *testing.T) {
	c := newUp()
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	pass := mustPass(t, c, start)
	c.report(pass, overloaded, 200*time.Millisecond, start)
	mustNotPass(t, c, at(199))
	mustBe(t, c, up)
	mustPass(t, c, at(200))
	c.report(pass, overloaded, math.MaxInt64, start)
	mustNotPass(t, c, at(9_999))
	mustPass(t, c, at(10_000))
}

func TestChecksAreLeftOutWhileCallsAreAnswered(t *testing.T) {
	c := newUp()
	if c.needsNoCheck() {
		t.Fatal("no call was answered yet")
	}
	pass := mustPass(t, c, start)
	c.report(pass, answered, 0, start)
	if !c.needsNoCheck() || c.needsNoCheck() {
		t.Fatal("one check is left out for one answer")
	}
	c.report(pass, answered, 0, start)
	c.checked(false)
	if c.needsNoCheck() {
		t.Fatal("a node that is down is checked")
	}
}
