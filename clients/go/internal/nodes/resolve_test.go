package nodes

import (
	"log/slog"
	"net/netip"
	"slices"
	"testing"

	"github.com/tollgate/tollgate/clients/go/internal/connect"
)

type noMetrics struct{}

func (noMetrics) CallFailed(string) {}
func (noMetrics) AddNodes(int, int) {}

// Nodes that a name has no more are called until one that it has can be.
func TestNodesThatLeaveAName(t *testing.T) {
	logger := slog.New(slog.DiscardHandler)
	credentials, err := connect.Load(connect.Files{}, logger)
	if err != nil {
		t.Fatal(err)
	}
	targets, err := connect.Targets([]string{"node.example:1"}, credentials, logger)
	if err != nil {
		t.Fatal(err)
	}
	pool := &Pool{settings: Settings{logger, noMetrics{}}}
	pool.changed.init()
	old, new := netip.MustParseAddrPort("127.0.0.1:1"), netip.MustParseAddrPort("127.0.0.2:1")
	all, stopped := map[netip.AddrPort]kept{}, []string{}
	add := func(address netip.AddrPort) *node {
		node, err := newNode(pool, targets[0], address.String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(node.end)
		all[address] = kept{node, func() { stopped = append(stopped, node.address) }}
		return node
	}
	mustBe := func(nodes []*node, expected ...*node) {
		t.Helper()
		if !slices.Equal(nodes, expected) {
			t.Fatalf("%v instead of %v; stopped %v", nodes, expected, stopped)
		}
	}
	first := add(old)
	mustBe(present([]netip.AddrPort{old}, all), first)
	first.circuit.checked(true)
	second := add(new)
	mustBe(present([]netip.AddrPort{new}, all), first, second)
	second.circuit.checked(true)
	mustBe(present([]netip.AddrPort{new}, all), second)
	if !slices.Equal(stopped, []string{"127.0.0.1:1"}) || len(all) != 1 {
		t.Fatal(stopped, all)
	}
	// A call that still sees it waits for the nodes that come instead.
	first.ended = true
	late := &view{[]*node{first}, true}
	if found, _, err := late.find(0, nil); found != nil || err != nil {
		t.Fatal(found, err)
	}
	// One that left while it was not called is not kept, either.
	third := add(old)
	third.circuit.checked(false)
	mustBe(present([]netip.AddrPort{new}, all), second)
}
