package hold_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/hold"
	"github.com/tollgate/tollgate/clients/go/internal/pb/holds"
)

const s = time.Second

var (
	timeout   = fault.ErrTimeout
	forbidden = &fault.Error{Kind: fault.ErrForbidden, Message: "not allowed"}
)

func TestNoAnswerLeavesNothingBehind(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, h *hold.Holds) {
		n.set(func(s *state) { s.noReplies = true })
		_, err := reserve(t.Context(), h, "a", 3, time.Hour)
		want(t, "error", err, timeout)
		want(t, "granted", n.held(), 3)
		n.set(func(s *state) { s.noReplies = false })
		time.Sleep(2 * s)
		want(t, "held", n.held(), 0)
		// Also if the caller gives up.
		n.set(func(s *state) { s.noReplies = true })
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err = reserve(ctx, h, "a", 3, time.Hour)
		want(t, "error", err, timeout)
		n.set(func(s *state) { s.noReplies = false })
		time.Sleep(4 * s)
		want(t, "held", n.held(), 0)
	})
}

func TestWhatNoNodeCanKnowIsNotEnded(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, h *hold.Holds) {
		for _, err := range []error{fault.ErrUnreachable, forbidden} {
			n.set(func(s *state) { s.err = err })
			_, found := reserve(t.Context(), h, "a", 3, s)
			want(t, "error", found, err)
		}
		n.set(func(s *state) { s.err = nil })
		time.Sleep(time.Minute)
		want(t, "ends", n.now().ends, 0)
	})
}

func TestRenewalsAreMadeTogether(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, h *hold.Holds) {
		var all []*hold.Hold
		for at := range 250 {
			all = append(all, holdOf(t, h, fmt.Sprint(at), 1, 9*s))
			time.Sleep(time.Millisecond)
		}
		time.Sleep(28 * s)
		renewals := n.now().renewals
		if len(renewals) < 27 || len(renewals) > 30 {
			t.Errorf("%d calls", len(renewals))
		}
		for _, one := range all {
			want(t, "held", one.IsHeld(), true)
		}
		want(t, "known", n.held(), 250)
	})
}

func TestOneThatIsRefusedSpoilsNoOther(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, h *hold.Holds) {
		var all []*hold.Hold
		for _, resource := range []string{"a", "b", "c"} {
			all = append(all, holdOf(t, h, resource, 1, 9*s))
		}
		n.set(func(s *state) { s.forbidden = "b" })
		time.Sleep(60 * s)
		want(t, "the first", all[0].IsHeld(), true)
		want(t, "the one that may not be renewed", all[1].IsHeld(), false)
		want(t, "the last", all[2].IsHeld(), true)
		want(t, "lost", n.now().lost, 1)
		all[1].Release()
	})
}

func TestADegradedNodeEndsNoHold(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, h *hold.Holds) {
		before := holdOf(t, h, "a", 1, 9*s)
		n.set(func(s *state) { s.isDegraded = true })
		during := holdOf(t, h, "a", 2, 9*s)
		want(t, "decided by", during.DecidedBy(), hold.ByDegradedNode)
		time.Sleep(100 * s)
		want(t, "before", before.DecidedBy(), hold.ByDegradedNode)
		want(t, "both are held", before.IsHeld() && during.IsHeld(), true)
		// The sessions have ended meanwhile.
		want(t, "known", n.held(), 0)
		n.set(func(s *state) { s.isDegraded = false })
		time.Sleep(3 * s)
		want(t, "known again", n.held(), 3)
		want(t, "before", before.DecidedBy(), hold.ByNode)
		want(t, "during", during.DecidedBy(), hold.ByNode)
	})
}

func TestAnswersThatAreNoAnswers(t *testing.T) {
	for _, change := range []func(answer *holds.KeepAliveResponse){
		func(answer *holds.KeepAliveResponse) { answer.Sessions = nil },
		func(answer *holds.KeepAliveResponse) { answer.Sessions[0].Session = "other" },
		func(answer *holds.KeepAliveResponse) { answer.Sessions[0] = nil },
	} {
		scenario(t, func(t *testing.T, n *nodes, h *hold.Holds) {
			n.set(func(s *state) { s.change = change })
			held, start := holdOf(t, h, "a", 1, 9*s), time.Now()
			<-held.Lost()
			want(t, "time", time.Since(start), 6*s)
		})
	}
	// Another hold than that of the client.
	scenario(t, func(t *testing.T, n *nodes, h *hold.Holds) {
		n.set(func(s *state) {
			s.change = func(answer *holds.KeepAliveResponse) { answer.Sessions[0].Holds = nil }
		})
		held, start := holdOf(t, h, "a", 1, 9*s), time.Now()
		<-held.Lost()
		want(t, "time", time.Since(start), 3*s)
	})
}

func TestAnAnswerThatIsLateCountsFromItsRequest(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, h *hold.Holds) {
		held, start := holdOf(t, h, "a", 1, 12*s), time.Now()
		// An answer takes less than the patience of a second.
		n.set(func(s *state) { s.delay = 900 * time.Millisecond })
		time.Sleep(4*s + 950*time.Millisecond)
		n.set(func(s *state) { s.noReplies = true })
		<-held.Lost()
		want(t, "time", time.Since(start), 12*s)
	})
}

func TestAReleaseDuringARenewal(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, h *hold.Holds) {
		held := holdOf(t, h, "a", 1, 12*s)
		n.set(func(s *state) { s.delay = 900 * time.Millisecond })
		time.Sleep(4*s + 100*time.Millisecond)
		want(t, "renewals", len(n.now().renewals), 1)
		start := time.Now()
		held.Release()
		// The rest of the renewal, and the end.
		want(t, "time", time.Since(start), 1700*time.Millisecond)
		want(t, "known", n.held(), 0)
		want(t, "ends", n.now().ends, 1)
	})
}

func TestAReleaseWaitsForFiveSecondsAtMostAndGoesOn(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, h *hold.Holds) {
		held := holdOf(t, h, "a", 1, time.Hour)
		n.set(func(s *state) { s.err = fault.ErrUnreachable })
		start := time.Now()
		held.Release()
		want(t, "time", time.Since(start), 5*s)
		want(t, "held", held.IsHeld(), false)
		time.Sleep(10 * time.Minute)
		n.set(func(s *state) { s.err = nil })
		// The longest pause is half a minute, and a quarter more.
		time.Sleep(40 * s)
		want(t, "known", n.held(), 0)
	})
}

func TestClosingWaitsForFiveSecondsAtMost(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, h *hold.Holds) {
		held := holdOf(t, h, "a", 1, time.Hour)
		n.set(func(s *state) { s.noReplies = true })
		start := time.Now()
		var closing sync.WaitGroup
		for range 2 {
			closing.Go(h.Close)
		}
		<-held.Lost()
		want(t, "time until the end", time.Since(start), 0)
		held.Release()
		closing.Wait()
		want(t, "time", time.Since(start), 5*s)
		h.Close()
		held.Release()
		want(t, "time", time.Since(start), 5*s)
		want(t, "held", n.now().heldCopies, 0)
	})
}

func TestClosingDuringARequestReleasesWhatItGets(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, h *hold.Holds) {
		n.set(func(s *state) { s.delay = 500 * time.Millisecond })
		ended := make(chan error)
		go func() {
			_, err := reserve(t.Context(), h, "a", 3, time.Hour)
			ended <- err
		}()
		time.Sleep(100 * time.Millisecond)
		want(t, "granted", n.held(), 3)
		start := time.Now()
		go h.Close()
		if err := <-ended; !errors.Is(err, fault.ErrClosed) {
			t.Error(err)
		}
		h.Close()
		want(t, "time", time.Since(start), 900*time.Millisecond)
		want(t, "known", n.held(), 0)
		want(t, "held", n.now().heldCopies, 0)
		_, err := h.Attempt("a", "acme", s)
		want(t, "error", err, fault.ErrClosed)
	})
}

func TestClosingDuringARequestWithoutAnAnswer(t *testing.T) {
	scenario(t, func(t *testing.T, n *nodes, h *hold.Holds) {
		n.set(func(s *state) { s.noReplies = true })
		attempt, err := h.Attempt("a", "acme", time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error)
		go func() {
			_, err := attempt.Reserve(t.Context(), 1, 1, time.Hour)
			attempt.End()
			ended <- err
		}()
		synctest.Wait()
		start := time.Now()
		h.Close()
		want(t, "error", <-ended, fault.ErrClosed)
		want(t, "time", time.Since(start), 5*s)
	})
}

// An application that has lost its copies need not release them: nothing is kept
// for longer than the nodes may keep the session. Without Close, too, nothing is
// left of the goroutines, else the bubble would not end.
func TestALostHoldIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, h := start(false)
		held := holdOf(t, h, "a", 1, 9*s)
		n.set(func(s *state) { clear(s.sessions) })
		<-held.Lost()
		want(t, "lost", n.now().lost, 1)
		want(t, "held", n.now().heldCopies, 0)
		time.Sleep(20 * s)
		synctest.Wait()
		start := time.Now()
		held.Release()
		want(t, "time", time.Since(start), 0)
		want(t, "ends", n.now().ends, 0)
	})
}

func TestWithAFallbackAHoldOutlivesTheNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, h := start(true)
		defer h.Close()
		held := holdOf(t, h, "a", 1, 9*s)
		n.set(func(s *state) { s.noReplies = true })
		time.Sleep(1000 * s)
		want(t, "held", held.IsHeld(), true)
		want(t, "decided by", held.DecidedBy(), hold.ByFallback)
		n.set(func(s *state) { s.noReplies = false })
		time.Sleep(5 * s)
		want(t, "decided by", held.DecidedBy(), hold.ByNode)
		want(t, "lost", n.now().lost, 0)
	})
}

// TestStress uses few resources from many goroutines at once, in real time, for
// the race detector.
func TestStress(t *testing.T) {
	before := runtime.NumGoroutine()
	n, h := start(false)
	n.state.delay = time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	var callers sync.WaitGroup
	for seed := range uint64(16) {
		callers.Go(func() {
			random := rand.New(rand.NewPCG(seed, 0))
			for ctx.Err() == nil {
				short, cancel := context.WithTimeout(ctx, time.Duration(random.IntN(3000))*time.Microsecond)
				held, err := reserve(short, h, fmt.Sprint(random.IntN(3)), 1, s)
				cancel()
				if err != nil {
					continue
				}
				for range random.IntN(3) {
					callers.Go(held.Release)
				}
				if random.IntN(2) == 0 {
					held.Release()
				}
				held.IsHeld()
				held.DecidedBy()
			}
		})
	}
	time.Sleep(400 * time.Millisecond)
	h.Close()
	h.Close()
	callers.Wait()
	want(t, "held", n.now().heldCopies, 0)
	want(t, "known", n.held(), 0)
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before; {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines more than before", runtime.NumGoroutine()-before)
		}
		time.Sleep(time.Millisecond)
	}
}

func TestCloseEndsWhatCouldNotBeEndedBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, h := start(false)
		held := holdOf(t, h, "a", 3, time.Hour)
		n.set(func(s *state) { s.err = fault.ErrUnreachable })
		held.Release()
		time.Sleep(2 * time.Minute)
		n.set(func(s *state) { s.err = nil })
		began := time.Now()
		h.Close()
		if took := time.Since(began); took > time.Second || n.held() != 0 {
			t.Errorf("took %v, and %d copies are held", took, n.held())
		}
	})
}

func TestRenewalsThatAreRefusedAreFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, h := start(true)
		for range 3 {
			holdOf(t, h, "a", 1, 10*time.Second)
		}
		time.Sleep(2 * time.Second)
		n.set(func(s *state) { s.err = forbidden })
		time.Sleep(20 * time.Second)
		before := len(n.now().renewals)
		time.Sleep(20 * time.Second)
		// Each about six times in its ttl, as ever.
		if calls := len(n.now().renewals) - before; calls > 3*15 {
			t.Errorf("%d calls in twenty seconds for three holds", calls)
		}
		n.set(func(s *state) { s.err = nil })
		h.Close()
	})
}
