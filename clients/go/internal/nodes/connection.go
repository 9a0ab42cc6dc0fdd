package nodes

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/tollgate/tollgate/clients/go/internal/connect"
)

// Call makes one call over a connection.
type Call func(ctx context.Context, conn *grpc.ClientConn, options ...grpc.CallOption) error

// errEnded is the error of a call whose connection has ended. The request was not sent.
var errEnded = errors.New("the connection has ended")

// connection can be replaced while calls are under way: the old one is closed after the last of
// them.
type connection struct {
	target  connect.Target
	address string
	present atomic.Pointer[used]
}

type used struct {
	conn *grpc.ClientConn
	// Calls hold it for reading.
	calls sync.RWMutex
}

// open opens a connection to an address of the target.
func open(target connect.Target, address string) (*connection, error) {
	c := &connection{target: target, address: address}
	return c, c.renew()
}

// renew replaces the connection.
func (c *connection) renew() error {
	conn, err := c.target.Open(c.address)
	if err == nil {
		c.close(c.present.Swap(&used{conn: conn}))
	}
	return err
}

// end closes the connection after the calls that are under way. There must be no further ones.
func (c *connection) end() { c.close(c.present.Load()) }

func (c *connection) close(old *used) {
	if old == nil {
		return
	}
	if old.calls.TryLock() {
		old.conn.Close()
		return
	}
	go func() {
		old.calls.Lock()
		old.conn.Close()
	}()
}

// call makes a call. Without a stream, the request was not sent.
func (c *connection) call(ctx context.Context, call Call) (hadStream bool, err error) {
	for {
		present := c.present.Load()
		if !present.calls.TryRLock() {
			if c.present.Load() != present {
				continue
			}
			return false, errEnded
		}
		defer present.calls.RUnlock()
		// It is set when there is a stream.
		var peer peer.Peer
		// What the application sends with its own calls is not for the nodes.
		err = call(metadata.NewOutgoingContext(ctx, metadata.MD{}), present.conn, grpc.Peer(&peer))
		return peer.Addr != nil, err
	}
}
