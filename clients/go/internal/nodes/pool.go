// Package nodes calls the nodes: their names are resolved again and again, each has one connection,
// and calls are spread over those that are well.
package nodes

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/connect"
	"github.com/tollgate/tollgate/clients/go/internal/fault"
)

// lookInterval is how often a call that waits for the first connection of a node looks whether another
// one, which was overloaded or on trial, can be called.
const lookInterval = 50 * time.Millisecond

// Metrics are told of calls and nodes.
type Metrics interface {
	// CallFailed tells that a call to a node has failed.
	CallFailed(reason string)
	// AddNodes tells that more nodes are known, and more of them called; or fewer.
	AddNodes(known, called int)
}

// Settings are those of a pool.
type Settings struct {
	Logger  *slog.Logger
	Metrics Metrics
}

// Pool has the nodes, and the goroutines that keep them.
type Pool struct {
	settings Settings
	view     atomic.Pointer[view]
	// Where the search for a node begins.
	next atomic.Uint64
	// Told when a node may have become one that is called.
	changed bell
	masters masters

	mu sync.Mutex
	// The nodes of each target; nil before its name was resolved, or could not be.
	byTarget [][]*node

	stop     context.CancelFunc
	keepers  sync.WaitGroup
	isClosed atomic.Bool
}

// Connect begins to connect to the nodes of these targets, each of which may be a name of several.
func Connect(targets []connect.Target, settings Settings) *Pool {
	ctx, stop := context.WithCancel(context.Background())
	p := &Pool{settings: settings, byTarget: make([][]*node, len(targets)), stop: stop}
	p.changed.init()
	p.view.Store(&view{})
	p.next.Store(rand.Uint64N(1024))
	p.masters.target = targets[0]
	for place, target := range targets {
		p.keepers.Go(func() { p.keep(ctx, target, place) })
	}
	return p
}

// Close closes the connections, each after the calls that are under way, and ends the goroutines.
func (p *Pool) Close() {
	p.isClosed.Store(true)
	p.stop()
	p.changed.tell()
	p.keepers.Wait()
	p.masters.close()
}

// Call calls one node after the other until one answers, or the context ends. An error is a *fault.Error or
// one of its kinds.
func (p *Pool) Call(ctx context.Context, call Call) error {
	err := p.callOneAfterTheOther(ctx, call)
	if err != nil && p.isClosed.Load() {
		return fault.ErrClosed
	}
	return err
}

func (p *Pool) callOneAfterTheOther(ctx context.Context, call Call) error {
	var tried []*node
	// Of a request that may have arrived.
	var arrived error
	for {
		node, pass, err := p.attempt(ctx, tried)
		if err != nil {
			return cmp.Or(arrived, err)
		}
		result := node.call(ctx, pass, call)
		if result.err == nil {
			return nil
		}
		if errors.Is(result.err, fault.ErrInvalid) {
			return result.err
		}
		p.settings.Metrics.CallFailed(fault.ReasonOf(result.err))
		if !result.retry {
			return cmp.Or(arrived, result.err)
		}
		tried = append(tried, node)
		if result.sent {
			arrived = result.err
		}
		if len(tried) >= max(len(p.view.Load().nodes), 2) {
			return cmp.Or(arrived, result.err)
		}
	}
}

// attempt returns the permission to call a node; one that was not tried, if possible. While the
// first connections are made, it waits for them.
func (p *Pool) attempt(ctx context.Context, tried []*node) (*node, pass, error) {
	for {
		// Asked for before the look, so that no change is missed.
		changed := p.changed.wait()
		if p.isClosed.Load() {
			return nil, pass{}, fault.ErrClosed
		}
		node, pass, err := p.view.Load().find(p.next.Add(1), tried)
		if node != nil || err != nil {
			return node, pass, err
		}
		select {
		case <-changed:
		case <-time.After(lookInterval):
		case <-ctx.Done():
			return nil, pass, fault.ErrTimeout
		}
	}
}

// view is what is known of all nodes.
type view struct {
	nodes []*node
	// Whether each name was resolved once, or could not be.
	isResolved bool
}

// find looks for a node that can be called, from the first one on; for one that was tried only if
// there is no other. Otherwise it returns why there is none: nil if there may be one soon.
func (v *view) find(first uint64, tried []*node) (*node, pass, error) {
	why, mayConnect := fault.ErrUnreachable, !v.isResolved
	for _, again := range []bool{false, true} {
		for at := range v.nodes {
			node := v.nodes[(first+uint64(at))%uint64(len(v.nodes))]
			if slices.Contains(tried, node) != again {
				continue
			}
			pass, err, ok := node.pass(time.Now())
			switch {
			case ok:
				return node, pass, nil
			case err == nil:
				mayConnect = true
			case err == fault.ErrOverloaded:
				why = err
			}
		}
	}
	if mayConnect {
		why = nil
	}
	return nil, pass{}, why
}

// publish takes the nodes of one target.
func (p *Pool) publish(place int, nodes []*node) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.byTarget[place] != nil && slices.Equal(p.byTarget[place], nodes) {
		return
	}
	p.byTarget[place] = nodes
	isNew := func(nodes []*node) bool { return nodes == nil }
	p.view.Store(&view{slices.Concat(p.byTarget...), !slices.ContainsFunc(p.byTarget, isNew)})
	p.changed.tell()
}

// bell tells many of a change.
type bell struct {
	mu   sync.Mutex
	rung chan struct{}
}

func (b *bell) init() { b.rung = make(chan struct{}) }

// wait returns a channel that is closed at the next change.
func (b *bell) wait() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rung
}

func (b *bell) tell() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.rung)
	b.rung = make(chan struct{})
}
