// Package tollgategrpc takes a token before each call that a gRPC client makes, or a gRPC server
// handles.
//
// A call that is refused fails with RESOURCE_EXHAUSTED and a google.rpc.RetryInfo, if somebody knows
// when to try again; one that no node decides on, and no fallback, with UNAVAILABLE; and one whose
// bucket has an invalid name with INVALID_ARGUMENT. A call waits no longer than its context lasts.
// Without the option [tollgate.MaxWait], one that would have to wait is refused. A stream counts as
// one call.
package tollgategrpc

import (
	"context"
	"errors"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	tollgate "github.com/tollgate/tollgate/clients/go"
)

// BucketOf says which bucket a call of a method, "/package.Service/Method", takes a token of; false if
// it takes none.
type BucketOf func(ctx context.Context, method string) (tollgate.Bucket, bool)

// Quota makes interceptors.
type Quota struct {
	client   *tollgate.Client
	bucketOf BucketOf
	options  []tollgate.RequestOption
}

// New makes interceptors that ask a client for tokens.
//
//	quota := tollgategrpc.New(client, func(_ context.Context, method string) (tollgate.Bucket, bool) {
//		return tollgate.Bucket{Namespace: "db", Name: method}, true
//	}, tollgate.MaxWait(time.Second))
//	conn, err := grpc.NewClient("db.internal:443", grpc.WithUnaryInterceptor(quota.UnaryClient()), …)
func New(client *tollgate.Client, bucketOf BucketOf, options ...tollgate.RequestOption) *Quota {
	options = append([]tollgate.RequestOption{tollgate.MaxWait(0)}, options...)
	return &Quota{client, bucketOf, options}
}

// UnaryClient takes a token before each call that a client makes.
func (q *Quota) UnaryClient() grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		if err := q.take(ctx, method); err != nil {
			return err
		}
		return invoke(ctx, method, request, reply, conn, options...)
	}
}

// StreamClient takes a token before each stream that a client opens.
func (q *Quota) StreamClient() grpc.StreamClientInterceptor {
	return func(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer, options ...grpc.CallOption) (grpc.ClientStream, error) {
		if err := q.take(ctx, method); err != nil {
			return nil, err
		}
		return open(ctx, desc, conn, method, options...)
	}
}

// UnaryServer takes a token before each call that a server handles.
func (q *Quota) UnaryServer() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		if err := q.admit(ctx, info.FullMethod); err != nil {
			return nil, err
		}
		return handle(ctx, request)
	}
}

// StreamServer takes a token before each stream that a server handles.
func (q *Quota) StreamServer() grpc.StreamServerInterceptor {
	return func(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
		if err := q.admit(stream.Context(), info.FullMethod); err != nil {
			return err
		}
		return handle(server, stream)
	}
}

// admit takes a token for a call of somebody else.
func (q *Quota) admit(ctx context.Context, method string) error {
	err := q.take(ctx, method)
	if status.Code(err) == codes.Unavailable {
		// Why there is no decision is not for everybody.
		return status.Error(codes.Unavailable, "no decision")
	}
	return err
}

// take takes a token for a call, or returns its status.
func (q *Quota) take(ctx context.Context, method string) error {
	bucket, ok := q.bucketOf(ctx, method)
	if !ok {
		return nil
	}
	_, err := q.client.Acquire(ctx, bucket.Namespace, bucket.Name, q.options...)
	var refused *tollgate.RefusedError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &refused):
		return refusal(refused)
	case errors.Is(err, tollgate.ErrInvalid):
		return status.Error(codes.InvalidArgument, err.Error())
	case ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	default:
		return status.Error(codes.Unavailable, err.Error())
	}
}

func refusal(refused *tollgate.RefusedError) error {
	answer := status.New(codes.ResourceExhausted, refused.Error())
	if retryAfter := refused.Decision.RetryAfter; retryAfter > 0 {
		info := &errdetails.RetryInfo{RetryDelay: durationpb.New(retryAfter)}
		if detailed, err := answer.WithDetails(info); err == nil {
			answer = detailed
		}
	}
	return answer.Err()
}
