package tollgate

import (
	"strconv"
	"testing"
	"time"
)

func refusalOf(reason Reason, retryMS int) *Decision {
	return &Decision{Reason: reason, RetryAfter: time.Duration(retryMS) * time.Millisecond, DecidedBy: ByNode}
}

func TestARefusalCoversWhatItSaysNothingBetterAbout(t *testing.T) {
	var refusals refusals
	start := time.Now()
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	request := func(options ...RequestOption) *Request {
		request := newRequest("a", "b", append([]RequestOption{Tokens(5), MaxWait(100 * time.Millisecond)}, options...))
		return &request
	}
	found := func(request *Request, ms int) bool {
		_, ok := refusals.get(request, at(ms))
		return ok
	}
	if found(request(), 0) {
		t.Fatal("nothing was refused")
	}
	refusals.add(request(), refusalOf(ReasonLimit, 400), at(0))
	decision, ok := refusals.get(request(), at(100))
	if !ok || decision != (Decision{Reason: ReasonLimit, RetryAfter: 300 * time.Millisecond, DecidedBy: ByMemory}) {
		t.Fatal(decision, ok)
	}
	// The bucket's own limit may be longer.
	own := newRequest("a", "b", []RequestOption{Tokens(5)})
	otherBucket, otherNamespace := *request(), *request()
	otherBucket.Bucket, otherNamespace.Namespace = "c", "b"
	for name, one := range map[string]struct {
		request *Request
		ms      int
		found   bool
	}{
		"more tokens":       {request(Tokens(6)), 0, true},
		"fewer tokens":      {request(Tokens(4)), 0, false},
		"a shorter wait":    {request(MaxWait(0)), 0, true},
		"a longer wait":     {request(MaxWait(101 * time.Millisecond)), 0, false},
		"the bucket's wait": {&own, 0, false},
		"not critical":      {request(NotCritical()), 0, true},
		"another bucket":    {&otherBucket, 0, false},
		"another namespace": {&otherNamespace, 0, false},
		"just before":       {request(), 399, true},
		"when it is over":   {request(), 400, false},
	} {
		if found(one.request, one.ms) != one.found {
			t.Error(name)
		}
	}
	// The reserve may be what refused it.
	refusals.add(request(NotCritical()), refusalOf(ReasonLimit, 400), at(1000))
	if !found(request(NotCritical()), 1000) || found(request(), 1000) {
		t.Error("what is refused to a request that is not critical")
	}
	// The bucket's own limit is the longest wait, and a ban refuses any number.
	refusals.add(&own, refusalOf(ReasonBanned, 5000), at(2000))
	if !found(request(Tokens(1), MaxWait(time.Minute)), 2000) {
		t.Error("a ban")
	}
	if !found(request(), 2999) || found(request(), 3000) {
		t.Error("for a second at most")
	}
	degraded := refusalOf(ReasonLimit, 500)
	degraded.DecidedBy = ByDegradedNode
	for _, one := range []*Decision{degraded, refusalOf(ReasonLimit, 0)} {
		refusals.add(request(), one, at(4000))
		if found(request(), 4000) {
			t.Errorf("remembered: %+v", one)
		}
	}
}

func TestTheNumberOfRefusalsIsBounded(t *testing.T) {
	var refusals refusals
	start := time.Now()
	add := func(name, ms int) {
		request := newRequest("a", strconv.Itoa(name), nil)
		refusals.add(&request, refusalOf(ReasonLimit, 1000), start.Add(time.Duration(ms)*time.Millisecond))
	}
	for name := range mostRefusals {
		ms := 0
		if name >= mostRefusals-100 {
			ms = 500
		}
		add(name, ms)
	}
	if refusals.count.Load() != mostRefusals {
		t.Fatal(refusals.count.Load())
	}
	add(mostRefusals, 1000)
	if refusals.count.Load() != 101 {
		t.Fatal("expired ones go first")
	}
	for name := range 2 * mostRefusals {
		add(name, 1000)
	}
	if refusals.count.Load() > mostRefusals {
		t.Fatal(refusals.count.Load())
	}
}
