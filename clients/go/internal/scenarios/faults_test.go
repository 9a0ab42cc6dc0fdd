package scenarios

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/common/expfmt"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/internal/testkit"
	"github.com/tollgate/tollgate/clients/go/tollgateprom"
)

// proxied is a node behind a proxy.
func proxied(t *testing.T) (*testkit.Node, *testkit.Proxy) {
	t.Helper()
	node := testkit.StartNode(t, open)
	return node, testkit.StartProxy(t, node.GRPC)
}

func TestANodeThatHangsIsNotCalledUntilItAnswers(t *testing.T) {
	t.Parallel()
	for _, fault := range []testkit.Fault{testkit.NoReplies, testkit.HalfOpen} {
		_, proxy := proxied(t)
		client := connect(t, proxy.Address, tollgate.WithFallback(tollgate.FallbackAllow))
		askUntilDecidedBy(t, client, tollgate.ByNode)
		proxy.Set(t, fault)
		// Some wait for the deadline. Then the circuit is open, and nobody waits.
		const deadline = 100 * time.Millisecond
		start := time.Now()
		for inTime := 0; inTime < 50; {
			before := time.Now()
			mustBe(t, ask(t, client, "a", "b", tollgate.Deadline(deadline)).DecidedBy, tollgate.ByFallback)
			inTime++
			if time.Since(before) >= deadline {
				inTime = 0
			}
			mustTake(t, start, 0, patient)
		}
		proxy.Set(t, testkit.NoFault)
		askUntilDecidedBy(t, client, tollgate.ByNode)
	}
}

func TestAnIdleClientFindsThatItsNodeHangs(t *testing.T) {
	t.Parallel()
	_, proxy := proxied(t)
	metrics := tollgateprom.New()
	client := connect(t, proxy.Address, tollgate.WithMetrics(metrics))
	granted(t, client, "a", "b")
	mustBe(t, shown(t, metrics, "tollgate_client_nodes_called"), 1)
	proxy.Set(t, testkit.NoReplies)
	// No call fails, but the check.
	testkit.Eventually(t, "the circuit is open", func() bool {
		return shown(t, metrics, "tollgate_client_nodes_called") == 0
	})
	start := time.Now()
	_, err := client.Allow(context.Background(), "a", "b")
	if !errors.Is(err, tollgate.ErrUnreachable) {
		t.Fatal(err)
	}
	mustTake(t, start, 0, 5*time.Second)
}

func TestASlowNodeDelaysNoCallBeyondItsDeadline(t *testing.T) {
	t.Parallel()
	_, proxy := proxied(t)
	client := connect(t, proxy.Address, tollgate.WithFallback(tollgate.FallbackDeny))
	granted(t, client, "a", "b")
	// A round trip takes 80 ms.
	proxy.Delay(t, 40*time.Millisecond)
	mustBe(t, ask(t, client, "a", "b").DecidedBy, tollgate.ByNode)
	const deadline = 20 * time.Millisecond
	for range 50 {
		start := time.Now()
		decision := ask(t, client, "a", "b", tollgate.Deadline(deadline))
		// An answer counts that is there when the deadline is noticed too late.
		if time.Since(start) < 80*time.Millisecond {
			mustBe(t, decision.DecidedBy, tollgate.ByFallback)
		}
		// Not because its circuit is open: with so little time, no answer says nothing.
		mustTake(t, start, deadline, forever)
	}
	mustBe(t, ask(t, client, "a", "b").DecidedBy, tollgate.ByNode)
}

func TestConnectionsThatBreakAreMadeAgain(t *testing.T) {
	t.Parallel()
	_, proxy := proxied(t)
	client := connect(t, proxy.Address, tollgate.WithFallback(tollgate.FallbackAllow))
	for _, fault := range []testkit.Fault{testkit.CutReplies, testkit.Refused, testkit.ResetOnAccept} {
		askUntilDecidedBy(t, client, tollgate.ByNode)
		proxy.Set(t, fault)
		askUntilDecidedBy(t, client, tollgate.ByFallback)
		proxy.Set(t, testkit.NoFault)
	}
	askUntilDecidedBy(t, client, tollgate.ByNode)
}

// A caller that gives up before the deadline has not found a node that fails.
func TestCancelledCallsOpenNoCircuit(t *testing.T) {
	t.Parallel()
	node, proxy := proxied(t)
	client := connect(t, proxy.Address)
	granted(t, client, "a", "b")
	proxy.Set(t, testkit.NoReplies)
	// Failures at the same time would count as one, and three would open the circuit.
	for range 5 {
		ctx, cancel := context.WithCancel(context.Background())
		var calls sync.WaitGroup
		for range 20 {
			calls.Go(func() {
				if _, err := client.Allow(ctx, "a", "b"); err != context.Canceled {
					t.Error(err)
				}
			})
		}
		time.Sleep(60 * time.Millisecond)
		cancel()
		calls.Wait()
	}
	proxy.Set(t, testkit.NoFault)
	mustBe(t, ask(t, client, "a", "b").DecidedBy, tollgate.ByNode)
	if node.Decisions(t) < 2 {
		t.Fatal("not decided")
	}
}

func TestAClientThatIsClosedClosesItsConnections(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, open)
	connections := func() float64 { return node.Metric(t, "tollgate_connections", `transport="grpc"`) }
	var clients []*tollgate.Client
	for range 5 {
		client := connect(t, node.GRPC)
		granted(t, client, "a", "b")
		clients = append(clients, client)
	}
	mustBe(t, connections(), 5)
	for _, client := range clients {
		client.Close()
		client.Close()
		if _, err := client.Allow(context.Background(), "a", "b"); !errors.Is(err, tollgate.ErrClosed) {
			t.Fatal(err)
		}
	}
	testkit.Eventually(t, "the connections are closed", func() bool { return connections() == 0 })
}

func TestALostStoreIsDecidedOnByPolicy(t *testing.T) {
	t.Parallel()
	const limits = `namespaces:
  local: { on_store_failure: local, default_bucket: {} }
  deny: { on_store_failure: deny, default_bucket: {} }
`
	redis := testkit.StartRedis(t)
	node := testkit.StartNode(t, limits, "--store", redis.URL())
	client := connect(t, node.GRPC)
	cautious := connect(t, node.GRPC, tollgate.WithFallback(tollgate.FallbackRate(0, 1)))
	byNode := func(decision tollgate.Decision) bool { return decision.DecidedBy == tollgate.ByNode }
	askUntil(t, client, "deny", "b", "decided by a node", byNode)
	askUntil(t, cautious, "deny", "b", "decided by a node", byNode)
	redis.Kill()
	askUntil(t, client, "local", "b", "decided by a degraded node", func(decision tollgate.Decision) bool {
		return decision.DecidedBy == tollgate.ByDegradedNode && decision.Granted
	})
	askUntil(t, client, "deny", "b", "refused by policy", func(decision tollgate.Decision) bool {
		return decision.Reason == tollgate.ReasonUnavailable && decision.DecidedBy == tollgate.ByDegradedNode
	})
	// With a fallback, that is where it decides.
	askUntil(t, cautious, "deny", "b", "the fallback's only token", func(decision tollgate.Decision) bool {
		return decision.DecidedBy == tollgate.ByFallback
	})
	refused(t, cautious, "deny", "b")
	redis.Start(t)
	askUntil(t, client, "deny", "b", "decided by a node", byNode)
}

func TestAnOverloadedNodeIsLeftAlone(t *testing.T) {
	t.Parallel()
	redis := testkit.StartRedis(t)
	node := testkit.StartNode(t, open, "--store", redis.URL(), "--store-timeout", "20s", "--threads", "1",
		"--max-in-flight", "1")
	client := connect(t, node.GRPC, tollgate.WithFallback(tollgate.FallbackDeny))
	askUntilDecidedBy(t, client, tollgate.ByNode)
	redis.Signal(syscall.SIGSTOP)
	shed := func() float64 { return node.Metric(t, "tollgate_shed_requests_total") }
	// One has the only slot until the store answers, and the other one is refused.
	answers := make(chan tollgate.DecidedBy, 2)
	for range 2 {
		go func() {
			decision, err := client.Allow(context.Background(), "a", "b")
			if err != nil {
				t.Error(err)
			}
			answers <- decision.DecidedBy
		}()
	}
	mustBe(t, <-answers, tollgate.ByFallback)
	before := shed()
	start, asked := time.Now(), 0
	// Each time it says to wait for 100 ms at least.
	most := func() int { return int(time.Since(start)/(100*time.Millisecond)) + 1 }
	isOver := func() bool {
		took := time.Since(start)
		return took >= 300*time.Millisecond && asked > 2*most() || took >= 10*time.Second
	}
	for ; !isOver(); asked++ {
		mustBe(t, ask(t, client, "a", "b").DecidedBy, tollgate.ByFallback)
	}
	if more := int(shed() - before); more > most() || asked <= 2*most() {
		t.Fatalf("%d of %d reach the node", more, asked)
	}
	redis.Signal(syscall.SIGCONT)
	mustBe(t, <-answers, tollgate.ByNode)
	askUntilDecidedBy(t, client, tollgate.ByNode)
}

// shown is the sum of a metric's samples with these labels.
func shown(t *testing.T, metrics prometheus.Collector, name string, labels ...string) float64 {
	t.Helper()
	text, err := testutil.CollectAndFormat(metrics, expfmt.TypeTextPlain, name)
	if err != nil {
		t.Fatal(err)
	}
	return testkit.Sum(string(text), name, labels...)
}

func TestMetricsOfCalls(t *testing.T) {
	t.Parallel()
	_, proxy := proxied(t)
	metrics := tollgateprom.New()
	failed := func(reason string) float64 {
		return shown(t, metrics, "tollgate_client_failed_calls_total", `reason="`+reason+`"`)
	}
	client := connect(t, proxy.Address, tollgate.WithMetrics(metrics), tollgate.WithFallback(tollgate.FallbackDeny))
	granted(t, client, "a", "b")
	if _, err := client.Acquire(context.Background(), "a", "b"); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Allow(context.Background(), "a", ""); !errors.Is(err, tollgate.ErrInvalid) {
		t.Fatal(err)
	}
	proxy.Set(t, testkit.NoReplies)
	refused(t, client, "a", "b", tollgate.Deadline(20*time.Millisecond))
	proxy.Set(t, testkit.CutReplies)
	askUntil(t, client, "a", "b", "a call has failed", func(tollgate.Decision) bool {
		// What is cut first is the answer to this call, or the one before.
		return failed("error")+failed("unreachable") > 0
	})
	requests := func(labels ...string) float64 {
		return shown(t, metrics, "tollgate_client_requests_total", labels...)
	}
	mustBe(t, requests(`namespace="a"`, `outcome="granted"`, `decided_by="node"`), 2)
	mustBe(t, requests(`namespace=""`, `outcome="invalid"`, `decided_by="node"`), 1)
	if requests(`namespace="a"`, `outcome="refused"`, `decided_by="fallback"`) < 2 {
		t.Fatal("the fallback is not counted")
	}
	mustBe(t, failed("timeout"), 1)
	for _, name := range []string{"tollgate_client_request_seconds", "tollgate_client_wait_seconds"} {
		text, err := testutil.CollectAndFormat(metrics, expfmt.TypeTextPlain, name)
		if err != nil || testkit.Sum(string(text), name+"_count") == 0 {
			t.Fatalf("%s, %v", text, err)
		}
	}
}
