package nodes

import (
	"context"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/connect"
)

const (
	// How often names are resolved again.
	resolveInterval = 30 * time.Second
	// The same while no node is called.
	resolveIntervalInNeed = 2 * time.Second
	// How long the resolver may take.
	resolveTimeout = 5 * time.Second
)

// kept is a node with the goroutine that checks it.
type kept struct {
	*node
	stop context.CancelFunc
}

// keep keeps the nodes of one target until the context ends: resolves its name again and again.
func (p *Pool) keep(ctx context.Context, target connect.Target, place int) {
	all := map[netip.AddrPort]kept{}
	defer func() {
		for _, one := range all {
			one.stop()
		}
	}()
	var addresses []netip.AddrPort
	var resolved time.Time
	// Not all clients resolve at the same time.
	early := 0.75 + rand.Float64()/4
	for {
		changed := p.changed.wait()
		interval := time.Duration(early * float64(intervalOf(all)))
		if time.Since(resolved) >= interval {
			// While the name can't be resolved, its last addresses stay.
			if found := p.resolve(ctx, target); found != nil {
				addresses = found
			}
			resolved = time.Now()
		}
		if ctx.Err() != nil {
			return
		}
		p.start(ctx, target, addresses, all)
		p.publish(place, present(addresses, all))
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-time.After(interval - time.Since(resolved)):
		}
	}
}

func intervalOf(all map[netip.AddrPort]kept) time.Duration {
	for _, one := range all {
		if one.isCalled() {
			return resolveInterval
		}
	}
	return resolveIntervalInNeed
}

// start begins to keep the nodes at these addresses.
func (p *Pool) start(ctx context.Context, target connect.Target, addresses []netip.AddrPort, all map[netip.AddrPort]kept) {
	for _, address := range addresses {
		if _, ok := all[address]; ok {
			continue
		}
		node, err := newNode(p, target, address.String())
		if err != nil {
			p.settings.Logger.Error("a tollgate node can't be called", "address", address, "error", err)
			continue
		}
		ctx, stop := context.WithCancel(ctx)
		all[address] = kept{node, stop}
		p.keepers.Go(func() { node.keepChecked(ctx) })
	}
}

// present returns the nodes at these addresses. Those that the name has no more are called until one
// that it has can be, and end then.
func present(addresses []netip.AddrPort, all map[netip.AddrPort]kept) []*node {
	hasNew := slices.ContainsFunc(addresses, func(address netip.AddrPort) bool {
		one, ok := all[address]
		return ok && one.isCalled()
	})
	nodes := make([]*node, 0, len(all))
	for address, one := range all {
		if slices.Contains(addresses, address) || (!hasNew && one.isCalled()) {
			nodes = append(nodes, one.node)
		} else {
			one.stop()
			delete(all, address)
		}
	}
	slices.SortFunc(nodes, func(a, b *node) int { return strings.Compare(a.address, b.address) })
	return nodes
}

// resolve returns the addresses of a target; nil if they can't be found out.
func (p *Pool) resolve(ctx context.Context, target connect.Target) []netip.AddrPort {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	found, err := target.Resolve(ctx)
	if err != nil || len(found) == 0 {
		if ctx.Err() != context.Canceled {
			p.settings.Logger.Warn("the name of a tollgate node can't be resolved",
				"address", target.Address.String(), "error", err)
		}
		return nil
	}
	slices.SortFunc(found, netip.AddrPort.Compare)
	return slices.Compact(found)
}
