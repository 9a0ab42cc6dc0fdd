package scenarios

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/internal/testkit"
)

// start starts nodes that share a store.
func start(t *testing.T, number int) (nodes []*testkit.Node, addresses []string) {
	t.Helper()
	redis := testkit.StartRedis(t)
	for range number {
		node := testkit.StartNode(t, open, "--store", redis.URL(), "--store-timeout", "20s")
		nodes, addresses = append(nodes, node), append(addresses, node.GRPC)
	}
	return nodes, addresses
}

// askUntilAllAreCalled asks until each node has made a decision.
func askUntilAllAreCalled(t *testing.T, client *tollgate.Client, nodes []*testkit.Node) {
	t.Helper()
	testkit.Eventually(t, "all are called", func() bool {
		ask(t, client, "a", "b")
		for _, node := range nodes {
			if node.Decisions(t) == 0 {
				return false
			}
		}
		return true
	})
}

func TestCallsAreSpreadOverTheNodes(t *testing.T) {
	t.Parallel()
	nodes, addresses := start(t, 3)
	client := connectAll(t, addresses)
	askUntilAllAreCalled(t, client, nodes)
	var before []float64
	for _, node := range nodes {
		before = append(before, node.Decisions(t))
	}
	for range 30 {
		ask(t, client, "a", "b")
	}
	for at, node := range nodes {
		mustBe(t, node.Decisions(t)-before[at], 10)
	}
}

func TestANameIsResolved(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, open)
	_, port, err := net.SplitHostPort(node.GRPC)
	if err != nil {
		t.Fatal(err)
	}
	// Its other address, if it has one, is a node that does not answer.
	client := connect(t, "localhost:"+port)
	for range 10 {
		mustBe(t, ask(t, client, "a", "b").DecidedBy, tollgate.ByNode)
	}
	client = connect(t, "no-such-host.invalid:1")
	_, err = client.Allow(context.Background(), "a", "b")
	if !errors.Is(err, tollgate.ErrUnreachable) {
		t.Fatal(err)
	}
}

// load calls nodes until it is stopped, and fails if one call is not decided by a node.
type load struct {
	calls   atomic.Int64
	stopped atomic.Bool
	callers sync.WaitGroup
}

func startLoad(t *testing.T, client *tollgate.Client) *load {
	l := &load{}
	for range 20 {
		l.callers.Go(func() {
			for !l.stopped.Load() {
				decision, err := client.Allow(context.Background(), "a", "b")
				if err != nil || decision.DecidedBy != tollgate.ByNode {
					t.Errorf("%+v, %v", decision, err)
					return
				}
				l.calls.Add(1)
			}
		})
	}
	return l
}

func (l *load) stop() {
	l.stopped.Store(true)
	l.callers.Wait()
}

func TestANodeThatIsKilledUnderLoadFailsNoCall(t *testing.T) {
	t.Parallel()
	nodes, addresses := start(t, 3)
	client := connectAll(t, addresses)
	askUntilAllAreCalled(t, client, nodes)
	load := startLoad(t, client)
	defer load.stop()
	waitForCalls := func() {
		survivors := func() float64 { return nodes[1].Decisions(t) + nodes[2].Decisions(t) }
		before := survivors()
		testkit.Eventually(t, "calls are answered", func() bool { return survivors() > before+2000 })
	}
	waitForCalls()
	nodes[0].Kill()
	waitForCalls()
}

func TestANodeThatDrainsFailsNoCall(t *testing.T) {
	t.Parallel()
	nodes := []*testkit.Node{testkit.StartNode(t, open), testkit.StartNode(t, open)}
	client := connectAll(t, []string{nodes[0].GRPC, nodes[1].GRPC})
	askUntilAllAreCalled(t, client, nodes)
	load := startLoad(t, client)
	defer load.stop()
	nodes[0].Signal(syscall.SIGTERM)
	select {
	case <-nodes[0].Ended():
	case <-time.After(testkit.Limit):
		t.Fatal("the node does not drain")
	}
	before := nodes[1].Decisions(t)
	testkit.Eventually(t, "calls are answered", func() bool { return nodes[1].Decisions(t) > before+1000 })
}

func TestANodeThatStartsLaterOrAgainIsCalled(t *testing.T) {
	t.Parallel()
	port := testkit.FreePort(t)
	address := (&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port}).String()
	client := connect(t, address, tollgate.WithFallback(tollgate.FallbackAllow))
	askUntilDecidedBy(t, client, tollgate.ByFallback)
	node := testkit.StartNodeAt(t, port, open)
	askUntilDecidedBy(t, client, tollgate.ByNode)
	node.Kill()
	askUntilDecidedBy(t, client, tollgate.ByFallback)
	testkit.StartNodeAt(t, port, open)
	askUntilDecidedBy(t, client, tollgate.ByNode)
}

func TestWithoutANodeTheFallbackDecidesAtOnce(t *testing.T) {
	t.Parallel()
	client := connect(t, testkit.DeadAddress,
		tollgate.WithNamespaceFallback("open", tollgate.FallbackAllow),
		tollgate.WithBucketFallback("open", "closed", tollgate.FallbackDeny))
	// Not after the deadline, which is far.
	start := time.Now()
	granted(t, client, "open", "any")
	mustBe(t, refused(t, client, "open", "closed").Reason, tollgate.ReasonUnavailable)
	_, err := client.Allow(context.Background(), "other", "any")
	mustBe(t, err.Error(), "no decision: no node can be reached")
	mustTake(t, start, 0, patient/2)
}
