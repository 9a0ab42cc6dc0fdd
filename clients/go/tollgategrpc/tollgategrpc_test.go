package tollgategrpc_test

import (
	"context"
	"net"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/tollgategrpc"
)

// service is a gRPC server and a client of it, with interceptors on either side.
func service(t *testing.T, server []grpc.ServerOption, client []grpc.DialOption) grpc_health_v1.HealthClient {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	serving := grpc.NewServer(server...)
	grpc_health_v1.RegisterHealthServer(serving, health.NewServer())
	go serving.Serve(listener)
	t.Cleanup(serving.Stop)
	options := append(client, grpc.WithTransportCredentials(insecure.NewCredentials()))
	conn, err := grpc.NewClient(listener.Addr().String(), options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return grpc_health_v1.NewHealthClient(conn)
}

func byMethod(_ context.Context, method string) (tollgate.Bucket, bool) {
	return tollgate.Bucket{Namespace: "rpc", Name: method}, true
}

func mustFail(t *testing.T, err error, code codes.Code, retryAfter time.Duration) {
	t.Helper()
	answer, found := status.Convert(err), time.Duration(0)
	for _, detail := range answer.Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			found = info.RetryDelay.AsDuration()
		}
	}
	if answer.Code() != code || found != retryAfter {
		t.Fatalf("%v, with %v", answer, found)
	}
}

func TestInterceptors(t *testing.T) {
	const check, watch = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
	for _, side := range []string{"client", "server"} {
		t.Run(side, func(t *testing.T) {
			fake := tollgate.NewFake(tollgate.FakeGrant())
			client := fake.Client()
			defer client.Close()
			quota := tollgategrpc.New(client, byMethod)
			var onServer []grpc.ServerOption
			var onClient []grpc.DialOption
			if side == "client" {
				onClient = []grpc.DialOption{
					grpc.WithUnaryInterceptor(quota.UnaryClient()), grpc.WithStreamInterceptor(quota.StreamClient()),
				}
			} else {
				onServer = []grpc.ServerOption{
					grpc.UnaryInterceptor(quota.UnaryServer()), grpc.StreamInterceptor(quota.StreamServer()),
				}
			}
			health := service(t, onServer, onClient)
			call := func(ctx context.Context) error {
				_, err := health.Check(ctx, &grpc_health_v1.HealthCheckRequest{})
				return err
			}
			stream := func() error {
				stream, err := health.Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{})
				if err == nil {
					_, err = stream.Recv()
				}
				return err
			}
			mustFail(t, call(t.Context()), codes.OK, 0)
			mustFail(t, stream(), codes.OK, 0)
			if len(fake.Asked("rpc", check)) != 1 || len(fake.Asked("rpc", watch)) != 1 {
				t.Fatal("not asked for")
			}
			for _, method := range []string{check, watch} {
				fake.Answer("rpc", method, tollgate.FakeRefuse(1500*time.Millisecond))
			}
			mustFail(t, call(t.Context()), codes.ResourceExhausted, 1500*time.Millisecond)
			mustFail(t, stream(), codes.ResourceExhausted, 1500*time.Millisecond)
			fake.Answer("rpc", check, tollgate.FakeGrantAfter(time.Millisecond))
			mustFail(t, call(t.Context()), codes.ResourceExhausted, time.Millisecond)
			fake.Answer("rpc", check, tollgate.FakeRefuse(0))
			mustFail(t, call(t.Context()), codes.ResourceExhausted, 0)
			fake.Answer("rpc", check, tollgate.FakeInvalid())
			mustFail(t, call(t.Context()), codes.InvalidArgument, 0)
			fake.Answer("rpc", check, tollgate.FakeNoNode())
			mustFail(t, call(t.Context()), codes.Unavailable, 0)
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			mustFail(t, call(ctx), codes.Canceled, 0)
		})
	}
}

func TestACallMayWait(t *testing.T) {
	fake := tollgate.NewFake(tollgate.FakeGrantAfter(20 * time.Millisecond))
	client := fake.Client()
	defer client.Close()
	quota := tollgategrpc.New(client, byMethod, tollgate.MaxWait(time.Hour))
	health := service(t, nil, []grpc.DialOption{grpc.WithUnaryInterceptor(quota.UnaryClient())})
	start := time.Now()
	if _, err := health.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took < 20*time.Millisecond {
		t.Fatal(took)
	}
	// But no longer than its context lasts: it is refused at once.
	fake.Answer("rpc", "/grpc.health.v1.Health/Check", tollgate.FakeGrantAfter(time.Minute))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	_, err := health.Check(ctx, &grpc_health_v1.HealthCheckRequest{})
	if code := status.Code(err); code != codes.ResourceExhausted {
		t.Fatal(err)
	}
}
