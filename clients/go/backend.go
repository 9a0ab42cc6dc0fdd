package tollgate

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc"

	"github.com/tollgate/tollgate/clients/go/internal/lease"
	"github.com/tollgate/tollgate/clients/go/internal/nodes"
	"github.com/tollgate/tollgate/clients/go/internal/pb/doorman"
	"github.com/tollgate/tollgate/clients/go/internal/pb/quotaservice"
)

// backend answers: nodes, or a fake. Contexts have the time for an answer.
type backend interface {
	allow(ctx context.Context, request *quotaservice.AllowRequest) (*quotaservice.AllowResponse, error)
	getCapacity(ctx context.Context, request *doorman.GetCapacityRequest) (*doorman.GetCapacityResponse, error)
	releaseCapacity(ctx context.Context, request *doorman.ReleaseCapacityRequest) (*doorman.ReleaseCapacityResponse, error)
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

func (p pool) getCapacity(ctx context.Context, request *doorman.GetCapacityRequest) (*doorman.GetCapacityResponse, error) {
	return p.GetCapacity(ctx, request)
}

func (p pool) releaseCapacity(ctx context.Context, request *doorman.ReleaseCapacityRequest) (*doorman.ReleaseCapacityResponse, error) {
	return p.ReleaseCapacity(ctx, request)
}

func (p pool) remembersRefusals() bool { return true }

func (p pool) close() { p.Close() }

// caller makes the calls about leases.
type caller struct{ backend }

func (c caller) GetCapacity(ctx context.Context, request *doorman.GetCapacityRequest) (*doorman.GetCapacityResponse, error) {
	response, err := c.getCapacity(ctx, request)
	return response, leaseError(err)
}

func (c caller) ReleaseCapacity(ctx context.Context, request *doorman.ReleaseCapacityRequest) (*doorman.ReleaseCapacityResponse, error) {
	response, err := c.releaseCapacity(ctx, request)
	return response, leaseError(err)
}

// leaseError adds what the leases have to tell apart.
func leaseError(err error) error {
	switch {
	case errors.Is(err, ErrInvalid), errors.Is(err, ErrForbidden):
		return fmt.Errorf("%w: %w", lease.ErrRefused, err)
	case errors.Is(err, ErrUnreachable):
		return fmt.Errorf("%w: %w", lease.ErrUnreachable, err)
	}
	return err
}
