package scenarios

import (
	"testing"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/internal/testkit"
)

func TestChargesAreTakenFromTheBucket(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, `namespaces:
  a:
    buckets:
      rows: { size: 10000, fill_rate: 1/h, max_tokens_per_request: 1000 }
`)
	clients := []*tollgate.Client{connect(t, node.GRPC), connect(t, node.GRPC)}
	for range 500 {
		for _, client := range clients {
			client.Charge("a", "rows", 7)
		}
	}
	taken := func() float64 {
		return node.Metric(t, "tollgate_tokens_granted_total", `namespace="a"`, `bucket="rows"`)
	}
	testkit.Eventually(t, "all is charged", func() bool { return taken() >= 7000 })
	// What is open in the end is charged then.
	clients[0].Charge("a", "rows", 11)
	for _, client := range clients {
		client.Close()
	}
	mustBe(t, taken(), 7011)
}
