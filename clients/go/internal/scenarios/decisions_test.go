package scenarios

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/internal/testkit"
)

// limits have a bucket for each case; the namespace has no other.
const limits = `namespaces:
  a:
    buckets:
      slow: { size: 2, fill_rate: 1/h, wait_timeout_millis: 0, max_tokens_per_request: 2 }
      quick: { size: 1, fill_rate: 4, wait_timeout_millis: 60000 }
      waits: { size: 1, fill_rate: 1/m, wait_timeout_millis: 3600000, max_debt_millis: 3600000 }
      never_waits: { size: 1, fill_rate: 4, wait_timeout_millis: 0 }
      books: { size: 1000, fill_rate: 1/d, max_tokens_per_request: 1000, soft_limit_percent: 99 }
      banned: { size: 100, fill_rate: 100, ban: { threshold: 1, window: 1h, for: 1h } }
      reserved: { size: 2, fill_rate: 1/h, wait_timeout_millis: 0, reserve: 50% }
      shadow: { size: 1, fill_rate: 1/h, wait_timeout_millis: 0, enforce: false }
`

func TestEachAnswerOfANode(t *testing.T) {
	t.Parallel()
	client := connect(t, testkit.StartNode(t, limits).GRPC)
	grant := granted(t, client, "a", "slow")
	mustBe(t, grant.Tokens, 1)
	mustBe(t, grant.Wait, 0)
	mustBe(t, grant.DecidedBy, tollgate.ByNode)
	granted(t, client, "a", "slow")
	refusal := refused(t, client, "a", "slow")
	mustBe(t, refusal.Reason, tollgate.ReasonLimit)
	mustBe(t, refusal.DecidedBy, tollgate.ByNode)
	if refusal.RetryAfter <= time.Hour/2 || refusal.RetryAfter > time.Hour {
		t.Fatal(refusal.RetryAfter)
	}
	// A wait, as the bucket allows it, and not as this request allows it.
	granted(t, client, "a", "waits")
	granted(t, client, "a", "waits")
	if wait := granted(t, client, "a", "waits").Wait; wait <= 0 || wait > time.Minute {
		t.Fatal(wait)
	}
	mustBe(t, refused(t, client, "a", "waits", tollgate.MaxWait(time.Millisecond)).Reason, tollgate.ReasonLimit)
	granted(t, client, "a", "banned")
	refusal = refused(t, client, "a", "banned")
	mustBe(t, refusal.Reason, tollgate.ReasonBanned)
	if refusal.RetryAfter <= time.Hour {
		t.Fatal(refusal.RetryAfter)
	}
	granted(t, client, "a", "reserved", tollgate.NotCritical())
	refused(t, client, "a", "reserved", tollgate.NotCritical())
	granted(t, client, "a", "reserved")
	mustBe(t, granted(t, client, "a", "shadow").Shadow, false)
	mustBe(t, granted(t, client, "a", "shadow").Shadow, true)
	mustBe(t, refused(t, client, "a", "books", tollgate.Tokens(2000)).Reason, tollgate.ReasonTooManyTokens)
	refusal = refused(t, client, "a", "unknown")
	mustBe(t, refusal.Reason, tollgate.ReasonNoBucket)
	mustBe(t, refusal.RetryAfter, 0)
}

func TestAMistakeOfTheCallerIsAnErrorWhateverTheFallback(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, limits)
	client := connect(t, node.GRPC, tollgate.WithFallback(tollgate.FallbackAllow))
	for _, options := range [][]tollgate.RequestOption{{}, {tollgate.Tokens(-1)}} {
		bucket := "slow"
		if len(options) == 0 {
			bucket = "b\n"
		}
		_, err := client.Allow(context.Background(), "a", bucket, options...)
		if !errors.Is(err, tollgate.ErrInvalid) {
			t.Fatal(err)
		}
	}
	// No bucket is a mistake of the limits.
	grant := granted(t, client, "a", "unknown", tollgate.Tokens(7))
	mustBe(t, grant.Tokens, 7)
	mustBe(t, grant.DecidedBy, tollgate.ByFallback)
}

func TestARefusalIsRememberedUntilItsRetryTimeAndForASecondAtMost(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, limits)
	client := connect(t, node.GRPC)
	two := tollgate.Tokens(2)
	start := time.Now()
	granted(t, client, "a", "slow")
	mustBe(t, refused(t, client, "a", "slow", two).DecidedBy, tollgate.ByNode)
	remembered := 0
	for {
		refusal := refused(t, client, "a", "slow", two)
		if refusal.DecidedBy == tollgate.ByNode {
			break
		}
		mustBe(t, refusal.DecidedBy, tollgate.ByMemory)
		if refusal.RetryAfter <= time.Hour/2 {
			t.Fatal(refusal.RetryAfter)
		}
		remembered++
		time.Sleep(time.Millisecond)
	}
	mustTake(t, start, time.Second, forever)
	if remembered == 0 {
		t.Fatal("not remembered")
	}
	mustBe(t, node.Decisions(t, `namespace="a"`, `bucket="slow"`), 3)
	// Fewer tokens may be there.
	mustBe(t, granted(t, client, "a", "slow").DecidedBy, tollgate.ByNode)
}

func TestAcquireWaitsAsLongAsTheNodeSays(t *testing.T) {
	t.Parallel()
	client := connect(t, testkit.StartNode(t, limits).GRPC)
	start := time.Now()
	for range 5 {
		if _, err := client.Acquire(context.Background(), "a", "quick"); err != nil {
			t.Fatal(err)
		}
	}
	// One token is there, one is lent, and three come at four a second.
	mustTake(t, start, 740*time.Millisecond, forever)
}

func TestAcquireAsksAgainWhereTheBucketHasNobodyWait(t *testing.T) {
	t.Parallel()
	client := connect(t, testkit.StartNode(t, limits).GRPC)
	start := time.Now()
	var waiting sync.WaitGroup
	for range 5 {
		waiting.Go(func() {
			decision, err := client.Acquire(context.Background(), "a", "never_waits", tollgate.MaxWait(time.Minute))
			if err != nil || decision.Tokens != 1 {
				t.Errorf("%+v, %v", decision, err)
			}
		})
	}
	waiting.Wait()
	mustTake(t, start, 740*time.Millisecond, forever)
	// It does not wait for what comes too late, and says when that would be.
	granted(t, client, "a", "slow")
	start = time.Now()
	_, err := client.Acquire(context.Background(), "a", "slow", tollgate.Tokens(2), tollgate.MaxWait(time.Minute))
	var late *tollgate.RefusedError
	if !errors.As(err, &late) || late.Decision.RetryAfter <= time.Minute {
		t.Fatal(err)
	}
	mustTake(t, start, 0, 30*time.Second)
}

// Where the bucket would have callers wait for longer than this one wants, asking again is no use.
func TestAcquireGivesUpAtOnceWhatComesTooLate(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, limits)
	client := connect(t, node.GRPC)
	granted(t, client, "a", "waits")
	granted(t, client, "a", "waits")
	start := time.Now()
	_, err := client.Acquire(context.Background(), "a", "waits", tollgate.MaxWait(30*time.Second))
	var late *tollgate.RefusedError
	// The node says how long until a request with this wait is granted.
	if !errors.As(err, &late) || late.Decision.RetryAfter >= 40*time.Second {
		t.Fatal(err)
	}
	mustTake(t, start, 0, 15*time.Second)
	mustBe(t, node.Decisions(t, `namespace="a"`, `bucket="waits"`), 3)
}

// A context that ends too early for the wait costs no tokens, as the node is told.
func TestAcquireWaitsNoLongerThanItsContext(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, limits)
	client := connect(t, node.GRPC, tollgate.WithDeadline(5*time.Second))
	granted(t, client, "a", "waits")
	granted(t, client, "a", "waits")
	for _, options := range [][]tollgate.RequestOption{{}, {tollgate.MaxWait(time.Hour)}} {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		start := time.Now()
		_, err := client.Acquire(ctx, "a", "waits", options...)
		var late *tollgate.RefusedError
		if !errors.As(err, &late) {
			t.Fatal(err)
		}
		mustTake(t, start, 0, 15*time.Second)
	}
	mustBe(t, node.Decisions(t, `outcome="granted"`), 2)
}

func TestManyClientsGetExactlyWhatIsInTheBooks(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, limits)
	var mu sync.Mutex
	var all int64
	var asking sync.WaitGroup
	for range 50 {
		client := connect(t, node.GRPC)
		asking.Go(func() {
			var got int64
			for range 30 {
				decision, err := client.Allow(context.Background(), "a", "books")
				if err != nil {
					t.Error(err)
				}
				got += decision.Tokens
			}
			mu.Lock()
			defer mu.Unlock()
			all += got
		})
	}
	asking.Wait()
	mustBe(t, all, 1000)
}

func TestTheApplicationIsToldOfRefusalsAndSoftLimits(t *testing.T) {
	t.Parallel()
	var told []string
	client := connect(t, testkit.StartNode(t, limits).GRPC,
		tollgate.OnSoftLimited(func(request tollgate.Request, decision tollgate.Decision) {
			told = append(told, fmt.Sprintf("soft %s %d", request.Bucket, decision.Tokens))
		}),
		tollgate.OnRefused(func(request tollgate.Request, decision tollgate.Decision) {
			told = append(told, fmt.Sprintf("refused %s %s", request.Bucket, decision.DecidedBy))
		}))
	for _, tokens := range []int64{1, 998, 1, 1, 1} {
		ask(t, client, "a", "books", tollgate.Tokens(tokens))
	}
	expected := []string{"soft books 998", "soft books 1", "refused books node", "refused books remembered"}
	if !slices.Equal(told, expected) {
		t.Fatal(told)
	}
}
