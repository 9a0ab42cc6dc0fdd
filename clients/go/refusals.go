package tollgate

import (
	"sync"
	"sync/atomic"
	"time"
)

const (
	// How long a refusal is remembered at most, so that a limit that was raised counts at once.
	longestMemory = time.Second
	// The most refusals that are remembered.
	mostRefusals = 10_000
)

// refusals are those of the last second: who asks for as much again before the retry time is refused
// without a call.
type refusals struct {
	// Without any, as in most processes, the lock is not needed.
	count atomic.Int64

	mu    sync.Mutex
	table map[[2]string]remembered
}

type remembered struct {
	// The least number of tokens that was refused, with the wait that would have been accepted.
	request  Request
	reason   Reason
	retryAt  time.Time
	forgetAt time.Time
}

// covers says whether a request of the same bucket would be refused, too.
func (r *remembered) covers(request *Request, now time.Time) bool {
	// The bucket's own limit is the longest wait.
	waitsNoLonger := !r.request.hasMaxWait() ||
		(request.hasMaxWait() && request.maxWait <= r.request.maxWait)
	return now.Before(r.forgetAt) && request.Tokens >= r.request.Tokens && waitsNoLonger &&
		// What is refused to a critical request is refused to all.
		(request.isNotCritical || !r.request.isNotCritical)
}

// get returns the refusal of such a request that is still valid.
func (r *refusals) get(request *Request, now time.Time) (Decision, bool) {
	if r.count.Load() == 0 {
		return Decision{}, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	found, ok := r.table[[2]string{request.Namespace, request.Bucket}]
	if !ok || !found.covers(request, now) {
		return Decision{}, false
	}
	retryAfter := max(found.retryAt.Sub(now), 1)
	return Decision{Reason: found.reason, RetryAfter: retryAfter, DecidedBy: ByMemory}, true
}

// add remembers a refusal if it says when to ask again. Not that of a degraded node: another one may
// have tokens.
func (r *refusals) add(request *Request, refusal *Decision, now time.Time) {
	if refusal.DecidedBy != ByNode || refusal.RetryAfter <= 0 {
		return
	}
	new := remembered{
		request: *request, reason: refusal.Reason,
		retryAt:  now.Add(refusal.RetryAfter),
		forgetAt: now.Add(min(refusal.RetryAfter, longestMemory)),
	}
	if refusal.Reason == ReasonBanned {
		// A ban refuses any number.
		new.request.Tokens = 1
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.table == nil {
		r.table = map[[2]string]remembered{}
	}
	if len(r.table) >= mostRefusals {
		r.makeRoom(now)
	}
	r.table[[2]string{request.Namespace, request.Bucket}] = new
	r.count.Store(int64(len(r.table)))
}

func (r *refusals) makeRoom(now time.Time) {
	for bucket, one := range r.table {
		if !now.Before(one.forgetAt) {
			delete(r.table, bucket)
		}
	}
	// Not to look through so many with each refusal. The nodes remember, too.
	if len(r.table) > mostRefusals/2 {
		clear(r.table)
	}
}
