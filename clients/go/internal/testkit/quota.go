package testkit

import (
	"context"
	"net"
	"testing"

	"google.golang.org/grpc"

	"github.com/tollgate/tollgate/clients/go/internal/pb/quotaservice"
)

// StartQuotaService starts a server that answers requests for tokens as the test says, and returns
// its address.
func StartQuotaService(t testing.TB, allow func(context.Context, *quotaservice.AllowRequest) (*quotaservice.AllowResponse, error)) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "quotaservice.QuotaService",
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{
			MethodName: "Allow",
			Handler: func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
				request := &quotaservice.AllowRequest{}
				if err := decode(request); err != nil {
					return nil, err
				}
				return allow(ctx, request)
			},
		}},
	}, nil)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return listener.Addr().String()
}
