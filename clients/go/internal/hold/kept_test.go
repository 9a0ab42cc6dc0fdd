package hold

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/pb/holds"
)

const ms = time.Millisecond

// want compares a value.
func want[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: got %v, want %v", what, got, want)
	}
}

// keptFor returns a hold with this ttl.
func keptFor(ttl time.Duration) *kept {
	return &kept{session: &session{ttl: ttl}, phase: held, isRecorded: true}
}

func TestTimes(t *testing.T) {
	for _, one := range []struct{ ttl, interval, unrecorded, pause time.Duration }{
		{3 * time.Second, time.Second, 500 * ms, 125 * ms},
		{24 * time.Second, 8 * time.Second, 4 * time.Second, time.Second},
		{24 * time.Hour, 8 * time.Hour, 5 * time.Second, 5 * time.Second},
	} {
		k := keptFor(one.ttl)
		want(t, "interval", k.interval(), one.interval)
		want(t, "pause", k.pause(), one.pause)
		k.isRecorded = false
		want(t, "interval of one that is not recorded", k.interval(), one.unrecorded)
		k.phase = ending
		want(t, "interval of one that ends", k.interval(), one.interval)
	}
}

func TestPatience(t *testing.T) {
	for _, one := range []struct{ ttl, deadline, patience time.Duration }{
		// A twelfth of the ttl at least, two at most.
		{6 * time.Second, 100 * ms, 500 * ms},
		{6 * time.Second, 700 * ms, 700 * ms},
		{6 * time.Second, 5 * time.Second, time.Second},
		// And within bounds.
		{time.Second, 50 * ms, 100 * ms},
		{time.Hour, 200 * ms, 2 * time.Second},
	} {
		want(t, "patience", keptFor(one.ttl).patience(one.deadline), one.patience)
	}
}

func TestEndOfAHoldsTime(t *testing.T) {
	now := time.Now()
	k := keptFor(9 * time.Second)
	want(t, "without an answer of a node", k.end(), time.Time{})
	want(t, "is over", k.isOver(now), false)
	k.goesOn(now, ByNode, false)
	want(t, "end", k.end(), now.Add(6*time.Second))
	want(t, "is over before", k.isOver(now.Add(6*time.Second-1)), false)
	want(t, "is over then", k.isOver(now.Add(6*time.Second)), true)
	k.goesOnWithoutNodes()
	want(t, "with the fallback", k.isOver(now.Add(time.Hour)), false)
	want(t, "decided by", k.session.status().by, ByFallback)
	k.goesOn(now, ByNode, true)
	want(t, "recorded in shadow", k.isRecorded, false)
	k.phase = lost
	want(t, "of one that is lost", k.end(), time.Time{})
	k.called(now)
	k.called(now.Add(-time.Second))
	want(t, "may live", k.mayLive(now.Add(9*time.Second-1)), true)
	want(t, "may live after its ttl", k.mayLive(now.Add(9*time.Second)), false)
}

func TestScheduleIsInTheOrderOfTime(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	now := time.Now()
	var s schedule
	all := make([]*kept, 30)
	for at := range all {
		all[at] = &kept{session: &session{}, phase: ending}
	}
	for range 10_000 {
		k := all[random.IntN(len(all))]
		switch random.IntN(4) {
		case 0:
			s.plan(k, time.Time{})
		case 1:
			s.remove(k)
			k.due = time.Time{}
		default:
			s.plan(k, now.Add(time.Duration(random.IntN(100))))
		}
		planned, first := 0, s.first()
		for _, k := range all {
			if k.due.IsZero() {
				continue
			}
			planned++
			if k.due.Before(first.due) {
				t.Fatal("not the first one")
			}
		}
		if planned != s.Len() || (planned == 0) != (first == nil) {
			t.Fatalf("%d of %d are in the schedule", s.Len(), planned)
		}
	}
	// A hold's time ends whatever is planned.
	k := keptFor(9 * time.Second)
	k.until = now.Add(9 * time.Second)
	s.plan(k, now.Add(time.Hour))
	want(t, "due", k.due, now.Add(6*time.Second))
	s.plan(k, time.Time{})
	want(t, "due in any case", k.due, now.Add(6*time.Second))
}

func TestCopiesAreGrantedOnlyIfTheAnswerSaysSo(t *testing.T) {
	response := func(status int32, granted, retryAfterMillis int64, degraded bool) *holds.ReserveResponse {
		return &holds.ReserveResponse{
			Status: holds.ReserveResponse_Status(status), Granted: granted,
			RetryAfterMillis: retryAfterMillis, Degraded: degraded,
		}
	}
	for _, one := range []struct {
		response *holds.ReserveResponse
		want     Answer
	}{
		{response(0, 3, 0, false), Answer{Copies: 3, By: ByNode}},
		{response(0, 3, 0, true), Answer{Copies: 3, By: ByDegradedNode}},
		{response(1, 0, 20, false), Answer{RetryAfter: 20 * ms, By: ByNode}},
		{response(1, 3, 0, false), Answer{By: ByNode}},
		{response(1, 0, 1000, true), Answer{RetryAfter: time.Second, By: ByDegradedNode}},
	} {
		answer, err := answerOf(one.response)
		if err != nil {
			t.Fatal(err)
		}
		want(t, "answer", answer, one.want)
	}
	for _, one := range [][2]int64{{0, 0}, {0, -1}, {2, 1}, {-1, 1}} {
		answer, err := answerOf(response(int32(one[0]), one[1], 0, false))
		if !errors.Is(err, fault.ErrFailed) || answer.IsGranted() {
			t.Errorf("%+v, %v", answer, err)
		}
	}
}

func TestNameOfAHold(t *testing.T) {
	for client, name := range map[string]string{
		"":                        "client",
		"worker-7":                "worker-7",
		"a\xffb":                  "a\uFFFDb",
		strings.Repeat("a", 200):  strings.Repeat("a", 128),
		strings.Repeat("é", 100):  strings.Repeat("é", 64),
		strings.Repeat("€", 100):  strings.Repeat("€", 42),
		strings.Repeat("\xff", 9): "\uFFFD",
	} {
		want(t, "name", nameOf(client), name)
	}
}

func TestRequestsThatMayHaveArrived(t *testing.T) {
	for _, err := range []error{fault.ErrTimeout, &fault.Error{Kind: fault.ErrFailed}, errors.New("unknown")} {
		want(t, err.Error(), mayHaveArrived(err), true)
	}
	for _, err := range []error{
		&fault.Error{Kind: fault.ErrInvalid}, fault.ErrUnreachable, fault.ErrOverloaded, fault.ErrForbidden,
		fault.ErrNotConfigured, fault.ErrClosed,
	} {
		want(t, err.Error(), mayHaveArrived(err), false)
	}
}
