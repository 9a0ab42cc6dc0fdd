package scenarios

import (
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/internal/testkit"
)

// ofEachKind are buckets of all kinds, with 500 tokens a second.
const ofEachKind = `namespaces:
  a:
    buckets:
      books: { size: 1000, fill_rate: 1/d, max_tokens_per_request: 30 }
      quick: { size: 50, fill_rate: 500, wait_timeout_millis: 0 }
      lends: { size: 50, fill_rate: 500, wait_timeout_millis: 1000, max_debt_millis: 1000 }
      strict: { size: 50, fill_rate: 500, wait_timeout_millis: 0, max_debt_millis: 0 }
      window: { algorithm: fixed_window, limit: 500, window: 1s }
      queue: { algorithm: leaky_bucket, rate: 500, queue: 100 }
      shadow: { size: 1, fill_rate: 1/h, wait_timeout_millis: 0, enforce: false }
`

func TestASmartBucketUsesWhatANodeGrants(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, ofEachKind)
	// Four clients use all that is in the books, and nothing more.
	var clients []*tollgate.Client
	for range 4 {
		clients = append(clients, connect(t, node.GRPC))
	}
	var used atomic.Int64
	var users sync.WaitGroup
	for user := range 40 {
		bucket := clients[user%4].SmartBucket("a", "books")
		users.Go(func() {
			for bucket.Acquire(t.Context(), 1, 3*time.Second) == nil {
				used.Add(1)
			}
		})
	}
	users.Wait()
	granted := node.Metric(t, "tollgate_tokens_granted_total", `namespace="a"`, `bucket="books"`)
	if used.Load() > 1000 || float64(used.Load()) > granted {
		t.Errorf("%d of %v", used.Load(), granted)
	}
	// Each of forty buckets may have taken some ahead that nobody used in time.
	if used.Load() < 500 {
		t.Errorf("only %d of %v", used.Load(), granted)
	}
	// At 500 a second, after what was there at first, and what is lent for a moment.
	for name, least := range map[string]time.Duration{
		"quick": 3400 * time.Millisecond, "lends": 3400 * time.Millisecond, "strict": 3400 * time.Millisecond,
		"window": 2 * time.Second, "queue": 3400 * time.Millisecond,
	} {
		bucket := clients[0].SmartBucket("a", name)
		users.Go(func() {
			acquireSmart(t, bucket)
			start := time.Now()
			for range 2000 {
				acquireSmart(t, bucket)
			}
			took := time.Since(start)
			t.Logf("%s: %v", name, took)
			if took < least {
				t.Errorf("%s: %v", name, took)
			}
		})
	}
	users.Wait()
	// What is not enforced is not waited for.
	shadow := clients[0].SmartBucket("a", "shadow")
	for range 2000 {
		acquireSmart(t, shadow)
	}
	if asked := node.Decisions(t, `bucket="shadow"`); asked > 1500 {
		t.Errorf("%v calls for 2000 uses", asked)
	}
}

// acquireSmart uses a token.
func acquireSmart(t *testing.T, bucket *tollgate.SmartBucket) {
	t.Helper()
	if err := bucket.Acquire(t.Context(), 1, testkit.Limit); err != nil {
		t.Error(err)
	}
}

// It is judged where nothing else runs (TOLLGATE_ALONE=1), as it takes 20 s of the clock.
func TestDemandBeyondTheRateOfANodeUsesAllOfIt(t *testing.T) {
	if os.Getenv("TOLLGATE_ALONE") == "" {
		t.Skip("takes 20 s: scripts/full.sh --only libraries")
	}
	client := connect(t, testkit.StartNode(t, ofEachKind).GRPC)
	var buckets sync.WaitGroup
	for _, name := range []string{"quick", "lends", "strict", "window", "queue"} {
		buckets.Go(func() { useAll(t, client.SmartBucket("a", name), name) })
	}
	buckets.Wait()
}

// useAll judges how much of a rate of 500 a second is used by fifty users.
func useAll(t *testing.T, bucket *tollgate.SmartBucket, name string) {
	var used atomic.Int64
	var users sync.WaitGroup
	for range 50 {
		users.Go(func() {
			for bucket.Acquire(t.Context(), 1, patient) == nil {
				used.Add(1)
			}
		})
	}
	// What the bucket held at first is used by then.
	time.Sleep(5 * time.Second)
	start, before := time.Now(), used.Load()
	time.Sleep(15 * time.Second)
	part := float64(used.Load()-before) / (500 * time.Since(start).Seconds())
	t.Logf("%s: %.3f", name, part)
	most := 1.02
	if name == "window" {
		// A whole window may lie at either end.
		most = 1.08
	}
	if part < 0.98 || part > most {
		t.Errorf("%s: %v", name, part)
	}
	bucket.Close()
	users.Wait()
}
