package hold

import (
	"container/heap"
	"time"
)

const (
	// partOfTTL: renewals are such a part of the ttl apart, and at its end the
	// application has so long to stop, before others get the copies.
	partOfTTL = 3

	// longestUnrecorded is the longest time between two renewals of a hold that
	// no node has recorded.
	longestUnrecorded = 5 * time.Second

	// answerPartOfTTL is the part of the ttl for an answer, so that there is time
	// for several attempts; or that of the client's other requests, if that is
	// longer, and at most twice as much of the ttl.
	answerPartOfTTL = 12

	// leastAnswer and mostAnswer are the bounds of that.
	leastAnswer = 100 * time.Millisecond
	mostAnswer  = 2 * time.Second

	// pausePartOfTTL is the part of the ttl that is the pause after an attempt
	// without an answer.
	pausePartOfTTL = 24

	// longestPause is the longest such pause.
	longestPause = 5 * time.Second

	// firstEndPause and longestEndPause bound the pauses before a session that
	// was not ended is ended again.
	firstEndPause   = time.Second
	longestEndPause = 30 * time.Second
)

// phase is where a session that is kept stands.
type phase int

const (
	// held: the copies are held.
	held phase = iota
	// lost: the copies are lost, but the application has not let go yet.
	lost
	// ending: the session is to be ended.
	ending
)

// kept is a session that is kept.
type kept struct {
	session *session
	phase   phase

	// isRecorded says of a hold whether a node has recorded it.
	isRecorded bool
	// until is the time until which the last answer about a hold counts; zero if
	// the fallback has granted it.
	until time.Time
	// endPause is the pause before a session is ended again.
	endPause time.Duration

	// mayLiveUntil is the time until which a node may keep the session; zero if
	// no node can know it.
	mayLiveUntil time.Time
	// due is when something is to be done; zero for never.
	due time.Time
	// place is the place in the schedule, from 1; 0 without one.
	place int
	// isCalled says whether a call is under way, or waits for others.
	isCalled bool
	// isAlone says whether a call for it and others was refused, so that it has
	// calls of its own.
	isAlone bool
	// told are those who wait for the end.
	told []chan<- struct{}
}

// holdOf returns a hold that was granted with a request that was sent then, or
// by the fallback.
func holdOf(session *session, grantedAt, mayLiveUntil, now time.Time) *kept {
	status := session.status()
	k := &kept{
		session:      session,
		phase:        held,
		isRecorded:   isRecorded(status.by, status.shadow),
		mayLiveUntil: mayLiveUntil,
	}
	begin := now
	if !grantedAt.IsZero() {
		k.until, begin = grantedAt.Add(session.ttl), grantedAt
	}
	k.due = begin.Add(k.interval())
	return k
}

// endingOf returns a session without a hold, which a node may keep until then.
func endingOf(session *session, mayLiveUntil, now time.Time) *kept {
	return &kept{
		session:      session,
		phase:        ending,
		endPause:     firstEndPause,
		mayLiveUntil: mayLiveUntil,
		due:          now,
	}
}

// isRecorded says whether a node has recorded a hold. In shadow, it may not
// have.
func isRecorded(by By, shadow bool) bool { return by == ByNode && !shadow }

// interval is the time between two renewals.
func (k *kept) interval() time.Duration {
	part := k.session.ttl / partOfTTL
	if k.phase == held && !k.isRecorded {
		return min(part/2, longestUnrecorded)
	}
	return part
}

// pause is the pause after an attempt without an answer.
func (k *kept) pause() time.Duration {
	return min(k.session.ttl/pausePartOfTTL, longestPause)
}

// patience is the time for an answer, where the client's other requests have so
// long.
func (k *kept) patience(deadline time.Duration) time.Duration {
	part := k.session.ttl / answerPartOfTTL
	wait := min(max(deadline, part), 2*part)
	return min(max(wait, leastAnswer), mostAnswer)
}

// end returns when the copies are lost without another answer; zero for never.
func (k *kept) end() time.Time {
	if k.phase != held || k.until.IsZero() {
		return time.Time{}
	}
	return k.until.Add(-k.session.ttl / partOfTTL)
}

// isOver says whether the copies are lost now without another answer.
func (k *kept) isOver(now time.Time) bool {
	end := k.end()
	return !end.IsZero() && !end.After(now)
}

// mayLive says whether a node may keep the session.
func (k *kept) mayLive(now time.Time) bool { return k.mayLiveUntil.After(now) }

// called says that a call begins that may be carried out until then, and keeps
// the session alive for its ttl.
func (k *kept) called(deadline time.Time) {
	k.mayLiveUntil = later(k.mayLiveUntil, deadline.Add(k.session.ttl))
}

// goesOn says that a node lets a hold go on, with a call that was sent then.
func (k *kept) goesOn(sent time.Time, by By, shadow bool) {
	k.session.goesOn(by)
	k.isRecorded = isRecorded(by, shadow)
	k.until = sent.Add(k.session.ttl)
}

// goesOnWithoutNodes says that the fallback lets a hold go on.
func (k *kept) goesOnWithoutNodes() {
	k.session.goesOn(ByFallback)
	k.isRecorded, k.until = false, time.Time{}
}

// schedule has the sessions with something to do, as a heap by its time.
type schedule []*kept

// plan sets when something is to be done about a session; zero for never. In any
// case it is to be done at the end of a hold's time.
func (s *schedule) plan(k *kept, at time.Time) {
	if end := k.end(); at.IsZero() || !end.IsZero() && end.Before(at) {
		at = end
	}
	k.due = at
	switch {
	case at.IsZero():
		s.remove(k)
	case k.place > 0:
		heap.Fix(s, k.place-1)
	default:
		heap.Push(s, k)
	}
}

// remove takes a session out.
func (s *schedule) remove(k *kept) {
	if k.place > 0 {
		heap.Remove(s, k.place-1)
	}
}

// first returns the session with the earliest time; nil without any.
func (s *schedule) first() *kept {
	if len(*s) == 0 {
		return nil
	}
	return (*s)[0]
}

// Len is for package heap, as are the methods below.
func (s *schedule) Len() int { return len(*s) }

// Less compares times.
func (s *schedule) Less(i, j int) bool { return (*s)[i].due.Before((*s)[j].due) }

// Swap swaps two places.
func (s *schedule) Swap(i, j int) {
	all := *s
	all[i], all[j] = all[j], all[i]
	all[i].place, all[j].place = i+1, j+1
}

// Push adds a session as the last one.
func (s *schedule) Push(one any) {
	k := one.(*kept)
	*s = append(*s, k)
	k.place = len(*s)
}

// Pop takes the last one out.
func (s *schedule) Pop() any {
	all := *s
	last := len(all) - 1
	k := all[last]
	all[last], *s = nil, all[:last]
	k.place = 0
	return k
}
