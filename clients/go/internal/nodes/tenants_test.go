package nodes

import (
	"errors"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tollgate/tollgate/clients/go/internal/connect"
	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/pb/holds"
	"github.com/tollgate/tollgate/clients/go/internal/pb/throttle"
)

// poolOf is a pool of one node that answers all calls with this status.
func poolOf(t *testing.T, code *atomic.Uint32) *Pool {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	answer := func(any, grpc.ServerStream) error { return status.Error(codes.Code(code.Load()), "as the test says") }
	server := grpc.NewServer(grpc.UnknownServiceHandler(answer))
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	logger := slog.New(slog.DiscardHandler)
	credentials, err := connect.Load(connect.Files{}, logger)
	if err != nil {
		t.Fatal(err)
	}
	targets, err := connect.Targets([]string{listener.Addr().String()}, credentials, logger)
	if err != nil {
		t.Fatal(err)
	}
	pool := Connect(targets, Settings{logger, noMetrics{}})
	t.Cleanup(pool.Close)
	return pool
}

func TestANodeWithoutHitsAndHoldsIsWell(t *testing.T) {
	var code atomic.Uint32
	// The health check is unknown, too, and the node is well.
	code.Store(uint32(codes.Unimplemented))
	pool, ctx := poolOf(t, &code), t.Context()
	for range 2 * mostFailures {
		_, forHits := pool.Hits(ctx, &throttle.ThrottleRequest{})
		_, forCopies := pool.Reserve(ctx, &holds.ReserveRequest{})
		_, forRenewal := pool.KeepAlive(ctx, &holds.KeepAliveRequest{})
		ended, forEnd := pool.EndSession(ctx, &holds.EndSessionRequest{})
		for _, err := range []error{forHits, forCopies, forRenewal, forEnd} {
			if !errors.Is(err, fault.ErrNotConfigured) || ended {
				t.Fatal(err)
			}
		}
	}
}

func TestANodeWhoseStoreDoesNotEndASessionIsWell(t *testing.T) {
	var code atomic.Uint32
	code.Store(uint32(codes.Unimplemented))
	pool, ctx := poolOf(t, &code), t.Context()
	_, _ = pool.KeepAlive(ctx, &holds.KeepAliveRequest{})
	code.Store(uint32(codes.Unavailable))
	for range 2 * mostFailures {
		if ended, err := pool.EndSession(ctx, &holds.EndSessionRequest{}); ended || err != nil {
			t.Fatal(ended, err)
		}
	}
	// Of other calls, it is a failure.
	if _, err := pool.KeepAlive(ctx, &holds.KeepAliveRequest{}); !errors.Is(err, fault.ErrFailed) {
		t.Fatal(err)
	}
}
