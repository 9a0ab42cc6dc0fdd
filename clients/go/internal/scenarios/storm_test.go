package scenarios

import (
	"context"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/internal/testkit"
)

// Whatever becomes of the network, no call fails that has a fallback, and none waits longer than it
// said. How much longer is judged where nothing else runs (TOLLGATE_ALONE=1).
func TestFaultAfterFaultFailsNoCallAndDelaysNone(t *testing.T) {
	_, proxy := proxied(t)
	client := connect(t, proxy.Address, tollgate.WithFallback(tollgate.FallbackAllow))
	granted(t, client, "a", "b")
	const deadline = 100 * time.Millisecond
	ctx, stop := context.WithCancel(t.Context())
	var mu sync.Mutex
	var late []time.Duration
	decided := map[tollgate.DecidedBy]int{}
	var callers sync.WaitGroup
	for range 10 {
		callers.Go(func() {
			for ctx.Err() == nil {
				start := time.Now()
				decision, err := client.Acquire(context.Background(), "a", "b", tollgate.Deadline(deadline))
				took := time.Since(start)
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				// Those that were answered at once would hide the others.
				if took > deadline/2 {
					late = append(late, took-deadline-decision.Wait)
				}
				decided[decision.DecidedBy]++
				mu.Unlock()
				time.Sleep(2 * time.Millisecond)
			}
		})
	}
	for range 2 {
		for fault := testkit.NoReplies; fault <= testkit.ResetOnAccept; fault++ {
			proxy.Set(t, fault)
			time.Sleep(300 * time.Millisecond)
			proxy.Delay(t, 80*time.Millisecond)
			time.Sleep(300 * time.Millisecond)
			proxy.Set(t, testkit.NoFault)
			askUntilDecidedBy(t, client, tollgate.ByNode)
			time.Sleep(100 * time.Millisecond)
		}
	}
	stop()
	callers.Wait()
	slices.Sort(late)
	p99 := late[len(late)*99/100]
	t.Logf("decided by %v; of the %d that waited, p99 %v and at most %v after the deadline", decided, len(late), p99, late[len(late)-1])
	if decided[tollgate.ByNode] == 0 || decided[tollgate.ByFallback] == 0 {
		t.Error("not both have decided")
	}
	if os.Getenv("TOLLGATE_ALONE") != "" && p99 > 20*time.Millisecond {
		t.Error("one in a hundred waits for too long")
	}
}
