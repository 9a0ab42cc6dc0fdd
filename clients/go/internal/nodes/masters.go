package nodes

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc"

	"github.com/tollgate/tollgate/clients/go/internal/connect"
	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/pb/doorman"
)

// mostHops is how often a server may name another one as the master before the client gives up for
// now.
const mostHops = 3

// masters knows the server that keeps the leases, if another one has named it.
type masters struct {
	// Whose credentials the master gets.
	target connect.Target

	mu       sync.Mutex
	known    *connection
	isClosed bool
}

// follow makes the server the master that another one names.
func (m *masters) follow(mastership *doorman.Mastership) (*connection, error) {
	address := mastership.GetMasterAddress()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.isClosed {
		return nil, fault.ErrClosed
	}
	if m.known != nil && m.known.address == address {
		return m.known, nil
	}
	m.end()
	if address == "" {
		return nil, noMaster("the servers have no master at present")
	}
	target, err := m.target.With(address)
	if err != nil {
		return nil, noMaster(err.Error())
	}
	master, err := open(target, target.Address.String())
	if err != nil {
		return nil, noMaster(err.Error())
	}
	m.known = master
	return master, nil
}

func noMaster(message string) error { return &fault.Error{Kind: fault.ErrFailed, Message: message} }

func (m *masters) get() *connection {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.known
}

// forget forgets a master that does not answer.
func (m *masters) forget(master *connection) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.known == master {
		m.end()
	}
}

// close forgets the master, whoever it is, for ever.
func (m *masters) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.isClosed = true
	m.end()
}

func (m *masters) end() {
	if m.known != nil {
		m.known.end()
		m.known = nil
	}
}

// GetCapacity asks the server that keeps the leases, until the context ends.
func (p *Pool) GetCapacity(ctx context.Context, request *doorman.GetCapacityRequest) (*doorman.GetCapacityResponse, error) {
	response := &doorman.GetCapacityResponse{}
	named := func() *doorman.Mastership { return response.Mastership }
	return response, p.callMaster(ctx, named, func(ctx context.Context, conn *grpc.ClientConn, options ...grpc.CallOption) error {
		return conn.Invoke(ctx, "/doorman.Capacity/GetCapacity", request, response, options...)
	})
}

// ReleaseCapacity releases leases.
func (p *Pool) ReleaseCapacity(ctx context.Context, request *doorman.ReleaseCapacityRequest) (*doorman.ReleaseCapacityResponse, error) {
	response := &doorman.ReleaseCapacityResponse{}
	named := func() *doorman.Mastership { return response.Mastership }
	return response, p.callMaster(ctx, named, func(ctx context.Context, conn *grpc.ClientConn, options ...grpc.CallOption) error {
		return conn.Invoke(ctx, "/doorman.Capacity/ReleaseCapacity", request, response, options...)
	})
}

// callMaster calls the server that keeps the leases: the master, if one of the nodes names it, else
// one of them. A master that does not answer is forgotten.
func (p *Pool) callMaster(ctx context.Context, named func() *doorman.Mastership, call Call) error {
	retry, err := true, error(nil)
	if master := p.masters.get(); master != nil {
		var sent bool
		if retry, sent, err = p.callOnce(ctx, master, call); !sent && retry {
			err = nil
		}
	}
	if retry {
		arrived := err
		if err = p.Call(ctx, call); errors.Is(err, fault.ErrUnreachable) && arrived != nil {
			// The master may have got it.
			err = arrived
		}
	}
	for range mostHops {
		if err != nil || named() == nil {
			return err
		}
		master, followed := p.masters.follow(named())
		if followed != nil {
			return followed
		}
		_, _, err = p.callOnce(ctx, master, call)
	}
	if err == nil && named() != nil {
		err = noMaster("the servers name each other as the master")
	}
	return err
}

// callOnce calls a master. Returns whether a node should be asked instead, and whether the master may
// have got the request.
func (p *Pool) callOnce(ctx context.Context, master *connection, call Call) (retry, sent bool, err error) {
	result := master.call(ctx, call)
	if result.err == nil {
		return false, true, nil
	}
	p.settings.Metrics.CallFailed(fault.ReasonOf(result.err))
	if result.report == failed || result.report == unreachable {
		p.masters.forget(master)
	}
	return result.retry, result.sent, result.err
}
