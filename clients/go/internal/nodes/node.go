package nodes

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/tollgate/tollgate/clients/go/internal/connect"
	"github.com/tollgate/tollgate/clients/go/internal/fault"
)

// checkTimeout limits a check, including the connection.
const checkTimeout = 2 * time.Second

// node is one node: its connection, its circuit breaker, and the goroutine that checks it.
type node struct {
	pool *Pool
	// For log messages.
	name string
	*connection
	// The circuit was opened.
	opened chan struct{}

	mu      sync.Mutex
	circuit circuit
	// Whether it is counted as called.
	counted bool
	// It is not checked any more, nor called.
	ended bool
}

func newNode(pool *Pool, target connect.Target, address string) (*node, error) {
	connection, err := open(target, address)
	if err != nil {
		return nil, err
	}
	name := target.Address.String()
	if address != name {
		name += " (" + address + ")"
	}
	pool.settings.Metrics.AddNodes(1, 0)
	return &node{pool: pool, name: name, connection: connection, opened: make(chan struct{}, 1)}, nil
}

// pass returns the permission to call the node now, or why there is none: nil if it may be called
// soon.
func (n *node) pass(now time.Time) (pass, error, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ended {
		// Seen in an old view: the one of the nodes that the name has now comes at once.
		return pass{}, nil, false
	}
	if pass, ok := n.circuit.pass(now); ok {
		return pass, nil, true
	}
	switch {
	case n.circuit.state == connecting:
		return pass{}, nil, false
	case n.circuit.isQuiet(now):
		return pass{}, fault.ErrOverloaded, false
	}
	return pass{}, fault.ErrUnreachable, false
}

func (n *node) isCalled() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.circuit.isCalled()
}

// call makes a call that has a permission, and reports the result.
func (n *node) call(ctx context.Context, pass pass, call Call) (result outcome) {
	// Also if the call panics.
	defer func() { n.report(pass, result) }()
	return n.connection.call(ctx, call)
}

func (n *node) report(pass pass, result outcome) {
	n.mu.Lock()
	opened := n.circuit.report(pass, result.report, result.pause, time.Now())
	n.mu.Unlock()
	if opened {
		n.logOpened("calls have failed")
		n.stateHasChanged()
		select {
		case n.opened <- struct{}{}:
		default:
		}
	}
}

// stateHasChanged counts whether the node is called, and tells who waits for that.
func (n *node) stateHasChanged() {
	n.mu.Lock()
	called := n.circuit.isCalled() && !n.ended
	more := 0
	if called != n.counted {
		n.counted, more = called, 1
		if !called {
			more = -1
		}
	}
	n.mu.Unlock()
	if more != 0 {
		n.pool.settings.Metrics.AddNodes(0, more)
	}
	n.pool.changed.tell()
}

// keepChecked checks the node until the context ends: see circuit.pause.
func (n *node) keepChecked(ctx context.Context) {
	for n.pause(ctx) {
		n.mu.Lock()
		before, skip := n.circuit.state, n.circuit.needsNoCheck()
		n.mu.Unlock()
		if skip {
			continue
		}
		var err error
		if before == down {
			// The old connection may be one whose server has vanished without closing it.
			err = n.renew()
		}
		if err == nil {
			err = n.check(ctx)
		}
		if ctx.Err() != nil {
			break
		}
		n.take(before, err)
	}
	n.mu.Lock()
	n.ended = true
	n.mu.Unlock()
	n.stateHasChanged()
	n.end()
	n.pool.settings.Metrics.AddNodes(-1, 0)
}

// take takes the result of a check.
func (n *node) take(before state, err error) {
	n.mu.Lock()
	n.circuit.checked(err == nil)
	after := n.circuit.state
	n.mu.Unlock()
	if before != down && after == down {
		n.logOpened(err.Error())
	} else if before == down && after != down {
		n.pool.settings.Logger.Info("the tollgate node answers again", "node", n.name)
	}
	n.stateHasChanged()
}

// pause waits until the next check is due. Returns false when the context ends.
func (n *node) pause(ctx context.Context) bool {
	for {
		n.mu.Lock()
		pause := n.circuit.pause(rand.Float64())
		n.mu.Unlock()
		select {
		case <-ctx.Done():
			return false
		case <-n.opened:
			// The pause begins anew.
		case <-time.After(pause):
			return true
		}
	}
}

func (n *node) logOpened(reason string) {
	n.pool.settings.Logger.Warn("the tollgate node is not called until it answers a check",
		"node", n.name, "reason", reason)
}

// check says why the node does not answer, or that it is about to stop.
func (n *node) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	var answer *grpc_health_v1.HealthCheckResponse
	_, err := n.connection.make(ctx, func(ctx context.Context, conn *grpc.ClientConn, options ...grpc.CallOption) (err error) {
		client := grpc_health_v1.NewHealthClient(conn)
		answer, err = client.Check(ctx, &grpc_health_v1.HealthCheckRequest{}, options...)
		return err
	})
	switch {
	case err == nil && answer.Status == grpc_health_v1.HealthCheckResponse_SERVING:
		return nil
	case err == nil:
		return errors.New(answer.Status.String())
	case ctx.Err() != nil:
		return fmt.Errorf("no answer within %v", checkTimeout)
	}
	switch status.Code(err) {
	// A load balancer, or an older server, without that service. The others are of callers without
	// the right to ask, or too many.
	case codes.Unimplemented, codes.Unauthenticated, codes.PermissionDenied, codes.ResourceExhausted:
		return nil
	}
	return err
}
