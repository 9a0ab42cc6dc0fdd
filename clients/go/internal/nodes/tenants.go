package nodes

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/tollgate/tollgate/clients/go/internal/pb/holds"
	"github.com/tollgate/tollgate/clients/go/internal/pb/throttle"
)

// Hits asks for hits.
func (p *Pool) Hits(ctx context.Context, request *throttle.ThrottleRequest) (*throttle.ThrottleResponse, error) {
	response := &throttle.ThrottleResponse{}
	err := p.Call(ctx, func(ctx context.Context, conn *grpc.ClientConn, options ...grpc.CallOption) error {
		return known(conn.Invoke(ctx, "/tollgate.v1.Throttle/Request", request, response, options...))
	})
	return response, err
}

// Reserve asks for copies.
func (p *Pool) Reserve(ctx context.Context, request *holds.ReserveRequest) (*holds.ReserveResponse, error) {
	response := &holds.ReserveResponse{}
	err := p.Call(ctx, func(ctx context.Context, conn *grpc.ClientConn, options ...grpc.CallOption) error {
		return known(conn.Invoke(ctx, "/tollgate.v1.Holds/Reserve", request, response, options...))
	})
	return response, err
}

// KeepAlive renews sessions.
func (p *Pool) KeepAlive(ctx context.Context, request *holds.KeepAliveRequest) (*holds.KeepAliveResponse, error) {
	response := &holds.KeepAliveResponse{}
	err := p.Call(ctx, func(ctx context.Context, conn *grpc.ClientConn, options ...grpc.CallOption) error {
		return known(conn.Invoke(ctx, "/tollgate.v1.Holds/KeepAlive", request, response, options...))
	})
	return response, err
}

// EndSession ends a session. It returns false if the node is well, but its store does not answer.
func (p *Pool) EndSession(ctx context.Context, request *holds.EndSessionRequest) (ended bool, err error) {
	response := &holds.EndSessionResponse{}
	err = p.Call(ctx, func(ctx context.Context, conn *grpc.ClientConn, options ...grpc.CallOption) error {
		var trailer metadata.MD
		options = append(options, grpc.Trailer(&trailer))
		err := conn.Invoke(ctx, "/tollgate.v1.Holds/EndSession", request, response, options...)
		// Only an answer has a trailer; a connection that breaks has none.
		if status.Code(err) == codes.Unavailable && len(trailer) > 0 {
			ended = false
			return nil
		}
		ended = err == nil
		return known(err)
	})
	return ended && err == nil, err
}

// known makes Aborted of Unimplemented. A node of an older version, without these calls, is well;
// another one may know them. No node answers with Aborted.
func known(err error) error {
	if status.Code(err) == codes.Unimplemented {
		return status.Error(codes.Aborted, "the node does not know hits and holds")
	}
	return err
}
