package tollgate

import (
	"context"

	"google.golang.org/grpc"

	"github.com/tollgate/tollgate/clients/go/internal/hold"
	"github.com/tollgate/tollgate/clients/go/internal/lease"
	"github.com/tollgate/tollgate/clients/go/internal/nodes"
	"github.com/tollgate/tollgate/clients/go/internal/pb/quotaservice"
	"github.com/tollgate/tollgate/clients/go/internal/pb/throttle"
)

// backend answers: nodes, or a fake. Contexts have the time for an answer.
type backend interface {
	lease.Caller
	hold.Caller
	Hits(ctx context.Context, request *throttle.ThrottleRequest) (*throttle.ThrottleResponse, error)
	allow(ctx context.Context, request *quotaservice.AllowRequest) (*quotaservice.AllowResponse, error)
	// remembersRefusals says whether the client does. With a fake, each request is asked.
	remembersRefusals() bool
	close()
}

// pool has nodes answer.
type pool struct{ *nodes.Pool }

func (p pool) allow(ctx context.Context, request *quotaservice.AllowRequest) (*quotaservice.AllowResponse, error) {
	response := &quotaservice.AllowResponse{}
	err := p.Call(ctx, func(ctx context.Context, conn *grpc.ClientConn, options ...grpc.CallOption) error {
		return conn.Invoke(ctx, "/quotaservice.QuotaService/Allow", request, response, options...)
	})
	return response, err
}

func (p pool) remembersRefusals() bool { return true }

func (p pool) close() { p.Close() }
