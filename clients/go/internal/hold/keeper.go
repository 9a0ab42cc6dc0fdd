package hold

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/pb/holds"
	"github.com/tollgate/tollgate/clients/go/internal/throttle"
)

const (
	// together: renewals that are due so soon, or at another attempt, are made in
	// the same call.
	together = 500 * time.Millisecond

	// mostRenewed is the most sessions in one call.
	mostRenewed = 100

	// mostCalls is the most calls for single sessions at a time.
	mostCalls = 32
)

// keeper renews the sessions of a client, and ends them. One of which no node
// knows is lost, if a node had recorded it; else, if a degraded node or the
// fallback has granted it, it is asked for again.
//
// Calls are made by goroutines of their own, which tell the keeper of the
// answers as events.
type keeper struct {
	holds *Holds
	kept  map[*session]*kept
	due   schedule

	// urgent are those that wait for a call of their own, and are in use; idle
	// are those that end.
	urgent, idle []waiting
	// calls are under way, and singleCalls of them for single sessions.
	calls, singleCalls int
	log                throttle.Log
}

// waiting is a session that waits for a call of its own.
type waiting struct {
	session *session
	call    call
}

// call is a call for a single session.
type call int

const (
	callRenew call = iota
	callReserve
	callEnd
)

func newKeeper(h *Holds) *keeper {
	return &keeper{holds: h, kept: make(map[*session]*kept)}
}

// run runs until no session is left.
func (k *keeper) run() {
	for {
		events, isOver := k.holds.take(k.isIdle())
		if isOver {
			return
		}
		now := time.Now()
		for _, event := range events {
			event(k, now)
		}
		if k.holds.context.Err() != nil {
			// Closing has taken too long.
			k.forgetAll()
		}
		k.doWhatIsDue(now)
		k.callWaiting(now)
		if !k.isIdle() {
			k.sleep()
		}
	}
}

// isIdle says whether there is nothing to keep, nor an answer to wait for.
func (k *keeper) isIdle() bool { return len(k.kept) == 0 && k.calls == 0 }

// sleep waits until there is something to do.
func (k *keeper) sleep() {
	var isDue <-chan time.Time
	if next := k.due.first(); next != nil {
		timer := time.NewTimer(time.Until(next.due))
		defer timer.Stop()
		isDue = timer.C
	}
	stopped := k.holds.context.Done()
	if len(k.kept) == 0 {
		// The answers come soon.
		stopped = nil
	}
	select {
	case <-isDue:
	case <-k.holds.bell:
	case <-stopped:
	}
}

// hold begins to keep a hold.
func (k *keeper) hold(session *session, grantedAt, mayLiveUntil, now time.Time) {
	k.keep(holdOf(session, grantedAt, mayLiveUntil, now))
}

// end begins to end a session without a hold.
func (k *keeper) end(session *session, mayLiveUntil, now time.Time) {
	k.keep(endingOf(session, mayLiveUntil, now))
}

func (k *keeper) keep(one *kept) {
	k.kept[one.session] = one
	k.due.plan(one, one.due)
}

// release begins to end the session of a hold, and tells when that is done.
func (k *keeper) release(session *session, done chan<- struct{}, now time.Time) {
	one := k.kept[session]
	if one == nil {
		close(done)
		return
	}
	one.told = append(one.told, done)
	k.beginEnd(one, now)
}

// endAll begins to end all sessions.
func (k *keeper) endAll(now time.Time) {
	for _, one := range k.kept {
		if one.phase == ending && !one.isCalled {
			// It was to be tried later.
			one.endPause = firstEndPause
			k.due.plan(one, now)
		}
		k.beginEnd(one, now)
	}
}

// beginEnd begins to end a session, unless no node can know it.
func (k *keeper) beginEnd(one *kept, now time.Time) {
	if one.phase == ending {
		return
	}
	one.phase, one.endPause = ending, firstEndPause
	one.session.end()
	switch {
	case one.isCalled:
		k.due.plan(one, time.Time{})
	case one.mayLiveUntil.IsZero():
		k.forget(one)
	default:
		k.due.plan(one, now)
	}
}

// forget lets go of a session.
func (k *keeper) forget(one *kept) {
	delete(k.kept, one.session)
	k.due.remove(one)
	one.session.end()
	for _, done := range one.told {
		close(done)
	}
	one.told = nil
}

func (k *keeper) forgetAll() {
	for _, one := range k.kept {
		k.forget(one)
	}
}

// doWhatIsDue begins the calls that are due.
func (k *keeper) doWhatIsDue(now time.Time) {
	// Those that wait as long for an answer go together.
	renewed := make(map[time.Duration][]*kept)
	for one := k.due.first(); one != nil; one = k.due.first() {
		// Those that are renewed go along with others that are due.
		goesAlong := len(renewed) > 0 && one.phase == held && !one.isCalled
		if one.due.After(now) && (!goesAlong || one.due.After(now.Add(min(together, one.pause())))) {
			break
		}
		switch {
		case one.phase == held && one.isOver(now):
			k.timeIsOver(one, now)
		case one.phase == held && one.isAlone:
			k.waitForCall(one, callRenew)
		case one.phase == held:
			patience := one.patience(k.holds.settings.Deadline)
			renewed[patience] = append(renewed[patience], one)
			k.isCalled(one)
		case one.phase == ending && one.mayLive(now):
			k.waitForCall(one, callEnd)
		default:
			// Its session has ended by itself.
			k.forget(one)
		}
	}
	for patience, all := range renewed {
		for group := range slices.Chunk(all, mostRenewed) {
			k.renew(group, patience, now, false)
		}
	}
}

// isCalled says that a call is under way: the next thing to do is at the end of
// the hold's time.
func (k *keeper) isCalled(one *kept) {
	one.isCalled = true
	k.due.plan(one, time.Time{})
}

func (k *keeper) waitForCall(one *kept, call call) {
	k.isCalled(one)
	k.enqueue(one, call)
}

// enqueue has a session wait for a call. Holds that are in use come before those
// that end.
func (k *keeper) enqueue(one *kept, call call) {
	if call == callEnd {
		k.idle = append(k.idle, waiting{one.session, call})
	} else {
		k.urgent = append(k.urgent, waiting{one.session, call})
	}
}

// timeIsOver has the fallback decide, as no node has answered in time.
func (k *keeper) timeIsOver(one *kept, now time.Time) {
	session := one.session
	if !k.holds.settings.Fallback(session.resource, session.status().copies, now) {
		k.lose(one, "no node has renewed it in time")
		return
	}
	k.warn("the fallback lets a hold go on", "resource", session.resource)
	one.goesOnWithoutNodes()
	var next time.Time
	if !one.isCalled {
		next = now.Add(one.pause())
	}
	k.due.plan(one, next)
}

// lose says that a hold is lost. Its session is not ended, as the application
// may still use the copies, until it lets go.
func (k *keeper) lose(one *kept, reason string) {
	one.phase = lost
	if one.session.end() {
		k.holds.settings.Metrics.HoldLost()
		k.warn("a hold is lost", "resource", one.session.resource,
			"domain", one.session.domain, "reason", reason)
	}
	if one.mayLiveUntil.IsZero() {
		k.forget(one)
		return
	}
	// After that, there is nothing to let go.
	k.due.plan(one, one.mayLiveUntil)
}

// warn writes to the log, once a second.
func (k *keeper) warn(message string, fields ...any) {
	if heldBack, ok := k.log.Pass(); ok {
		k.holds.settings.Logger.Warn(message, append(fields, "held_back", heldBack)...)
	}
}

// begin makes a call in a goroutine of its own, and then tells the keeper.
func (k *keeper) begin(deadline time.Time, call func(ctx context.Context) event) {
	h := k.holds
	k.calls++
	go func() {
		ctx, cancel := context.WithDeadline(h.context, deadline)
		defer cancel()
		answered := call(ctx)
		h.post(func(k *keeper, now time.Time) {
			k.calls--
			answered(k, now)
		})
	}()
}

// renew renews holds in one call.
func (k *keeper) renew(group []*kept, patience time.Duration, sent time.Time, isSingle bool) {
	deadline := sent.Add(patience)
	request := &holds.KeepAliveRequest{}
	for _, one := range group {
		one.called(deadline)
		request.Sessions = append(request.Sessions, one.session.renewal())
	}
	k.begin(deadline, func(ctx context.Context) event {
		response, err := k.holds.caller.KeepAlive(ctx, request)
		return func(k *keeper, now time.Time) {
			if isSingle {
				k.singleCalls--
			}
			k.renewed(group, sent, response, err, now)
		}
	})
}

// callWaiting makes the calls for single sessions, not too many at a time.
func (k *keeper) callWaiting(now time.Time) {
	for k.singleCalls < mostCalls {
		next, ok := k.next()
		if !ok {
			return
		}
		one := k.kept[next.session]
		switch {
		case one == nil:
			continue
		case one.phase == lost:
			one.isCalled = false
			continue
		case one.phase == ending:
			// The application may have let go meanwhile.
			next.call = callEnd
		}
		k.singleCalls++
		k.callSingle(one, next.call, now)
	}
}

// next returns the next session that waits for a call.
func (k *keeper) next() (next waiting, ok bool) {
	for _, queue := range []*[]waiting{&k.urgent, &k.idle} {
		if len(*queue) > 0 {
			next, *queue = (*queue)[0], (*queue)[1:]
			return next, true
		}
	}
	return waiting{}, false
}

// callSingle makes a call for a single session.
func (k *keeper) callSingle(one *kept, call call, sent time.Time) {
	session, patience := one.session, one.patience(k.holds.settings.Deadline)
	deadline := sent.Add(patience)
	switch call {
	case callRenew:
		k.renew([]*kept{one}, patience, sent, true)
	case callReserve:
		one.called(deadline)
		copies := session.status().copies
		k.begin(deadline, func(ctx context.Context) event {
			answer, err := session.reserve(ctx, copies, copies)
			return func(k *keeper, now time.Time) {
				k.singleCalls--
				k.reserved(one, sent, answer, err, now)
			}
		})
	case callEnd:
		k.begin(deadline, func(ctx context.Context) event {
			isEnded := session.endOnce(ctx)
			return func(k *keeper, now time.Time) {
				k.singleCalls--
				k.ended(one, isEnded, now)
			}
		})
	}
}

// isKept says whether a session was not forgotten.
func (k *keeper) isKept(one *kept) bool { return k.kept[one.session] == one }

// ended takes the answer to the end of a session.
func (k *keeper) ended(one *kept, isEnded bool, now time.Time) {
	if !k.isKept(one) {
		return
	}
	if isEnded {
		k.forget(one)
		return
	}
	one.isCalled = false
	next := now.Add(time.Duration(float64(one.endPause) * (0.75 + rand.Float64()/2)))
	one.endPause = min(2*one.endPause, longestEndPause)
	k.due.plan(one, next)
}

// renewed takes the answer to the renewal of holds.
func (k *keeper) renewed(
	group []*kept, sent time.Time, response *holds.KeepAliveResponse, err error, now time.Time,
) {
	for at, one := range group {
		switch {
		case !k.isKept(one):
		case isRefused(err) && len(group) > 1:
			// One of them may be the reason.
			one.isAlone = true
			k.enqueue(one, callRenew)
		case isRefused(err) && one.until.IsZero():
			// The fallback has granted it, and goes on to.
			k.stays(one, now)
		case err != nil || at >= len(response.GetSessions()):
			k.notAnswered(one, now)
		default:
			k.renewedOne(one, sent, response.GetSessions()[at], response.GetDegraded(), now)
		}
	}
}

func (k *keeper) renewedOne(
	one *kept, sent time.Time, renewed *holds.RenewedSession, isDegraded bool, now time.Time,
) {
	if !one.session.isOf(renewed) {
		k.notAnswered(one, now)
		return
	}
	one.isAlone = false
	switch {
	case one.phase != held:
		k.notAnswered(one, now)
	case renewed.GetAlive() && one.session.hasHold(renewed):
		k.goesOn(one, sent, ByNode, false)
	case renewed.GetAlive() && isDegraded && one.until.IsZero():
		k.stays(one, now)
	case renewed.GetAlive() && isDegraded:
		// Its store is away, and no hold ends for that.
		k.goesOn(one, sent, ByDegradedNode, false)
	case one.isRecorded:
		one.isCalled = false
		k.lose(one, "its session was ended, or its store has lost it")
	default:
		k.enqueue(one, callReserve)
	}
}

// reserved takes the answer to a request for copies that are held already.
func (k *keeper) reserved(one *kept, sent time.Time, answer Answer, err error, now time.Time) {
	if !k.isKept(one) {
		return
	}
	isHeld := one.phase == held
	switch {
	case err != nil && !isRefused(err):
		k.notAnswered(one, now)
	case err == nil && answer.IsGranted() && isHeld:
		k.goesOn(one, sent, answer.By, answer.Shadow)
	case err == nil && !answer.IsGranted() && isHeld && answer.By == ByNode:
		one.isCalled = false
		k.lose(one, "there is no room for it")
	default:
		k.stays(one, now)
	}
}

// stays says that a node has answered, and nothing changes.
func (k *keeper) stays(one *kept, now time.Time) {
	k.notAnswered(one, now)
	if one.phase == held {
		k.due.plan(one, now.Add(one.interval()))
	}
}

// notAnswered says that nothing is known of a session that was not known before.
func (k *keeper) notAnswered(one *kept, now time.Time) {
	one.isCalled = false
	switch one.phase {
	case held:
		k.due.plan(one, now.Add(one.pause()))
	case ending:
		k.due.plan(one, now)
	case lost:
	}
}

// goesOn says that a node lets a hold go on, with a call that was sent then.
func (k *keeper) goesOn(one *kept, sent time.Time, by By, shadow bool) {
	one.isCalled = false
	one.goesOn(sent, by, shadow)
	k.due.plan(one, sent.Add(one.interval()))
}

// isRefused says whether the request is wrong, or not allowed; it will be the
// next time.
func isRefused(err error) bool {
	return errors.Is(err, fault.ErrInvalid) || errors.Is(err, fault.ErrForbidden) ||
		errors.Is(err, fault.ErrNotConfigured)
}
