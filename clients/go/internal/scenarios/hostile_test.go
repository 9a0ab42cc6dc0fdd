package scenarios

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/internal/pb/quotaservice"
	"github.com/tollgate/tollgate/clients/go/internal/testkit"
)

// What users may put into a name, or an application into a context, harms nobody else.
func TestMistakesOfOneCallHarmNoOther(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, open)
	client := connect(t, node.GRPC, tollgate.WithFallback(tollgate.FallbackAllow))
	granted(t, client, "a", "b")
	for range 10 {
		for _, name := range []string{"\xff", strings.Repeat("x", 5<<20), "b\n", ""} {
			for _, names := range [][2]string{{"a", name}, {name, "b"}} {
				_, err := client.Allow(t.Context(), names[0], names[1])
				if !errors.Is(err, tollgate.ErrInvalid) {
					t.Fatalf("%.10q: %v", names, err)
				}
			}
		}
		for _, tokens := range []int64{-1, -1 << 63} {
			if _, err := client.Allow(t.Context(), "a", "b", tollgate.Tokens(tokens)); !errors.Is(err, tollgate.ErrInvalid) {
				t.Fatal(err)
			}
		}
		ctx := metadata.AppendToOutgoingContext(t.Context(), "name", "\x00", "authorization", "Bearer secret",
			"big", strings.Repeat("x", 1<<20))
		decision, err := client.Allow(ctx, "a", "b")
		if err != nil || decision.DecidedBy != tollgate.ByNode {
			t.Fatal(decision, err)
		}
		mustBe(t, ask(t, client, "a", "b").DecidedBy, tollgate.ByNode)
	}
}

func TestWhatAnApplicationSendsElsewhereIsNotForTheNodes(t *testing.T) {
	t.Parallel()
	seen := make(chan metadata.MD, 1)
	address := testkit.StartQuotaService(t, func(ctx context.Context, request *quotaservice.AllowRequest) (*quotaservice.AllowResponse, error) {
		found, _ := metadata.FromIncomingContext(ctx)
		seen <- found
		return &quotaservice.AllowResponse{TokensGranted: 1}, nil
	})
	ctx := metadata.AppendToOutgoingContext(t.Context(), "cookie", "session", "authorization", "Bearer secret")
	if _, err := connect(t, address).Allow(ctx, "a", "b"); err != nil {
		t.Fatal(err)
	}
	found := <-seen
	if len(found["cookie"]) != 0 || len(found["authorization"]) != 0 {
		t.Fatal(found)
	}
	if agent := found["user-agent"][0]; !strings.HasPrefix(agent, "tollgate-client-go/") {
		t.Fatal(agent)
	}
}

// A node that knows the deadline may give up just before the client does.
func TestANodeThatGivesUpAtTheDeadlineIsATimeout(t *testing.T) {
	t.Parallel()
	address := testkit.StartQuotaService(t, func(ctx context.Context, _ *quotaservice.AllowRequest) (*quotaservice.AllowResponse, error) {
		end, ok := ctx.Deadline()
		if !ok {
			t.Error("the node is not told the deadline")
		}
		time.Sleep(time.Until(end) - 20*time.Millisecond)
		return nil, status.Error(codes.DeadlineExceeded, "late")
	})
	client := connect(t, address)
	_, err := client.Allow(t.Context(), "a", "b", tollgate.Deadline(100*time.Millisecond))
	if !errors.Is(err, tollgate.ErrTimeout) {
		t.Fatal(err)
	}
}

// The fallback has time to decide before the context ends.
func TestAShortContextIsLeftTimeForTheFallback(t *testing.T) {
	t.Parallel()
	_, proxy := proxied(t)
	client := connect(t, proxy.Address, tollgate.WithFallback(tollgate.FallbackAllow))
	askUntilDecidedBy(t, client, tollgate.ByNode)
	proxy.Set(t, testkit.NoReplies)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Second)
	defer cancel()
	decision, err := client.Acquire(ctx, "a", "b")
	if err != nil || decision.DecidedBy != tollgate.ByFallback {
		t.Fatal(decision, err)
	}
}

// A client that has just been made waits for its first connection, whatever the order of events.
func TestTheFirstCallIsAnswered(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, open)
	for range 300 {
		client, err := tollgate.New([]string{node.GRPC}, tollgate.WithDeadline(patient))
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		// A node that does not answer the first check for so long is not there.
		if _, err := client.Allow(t.Context(), "a", "b"); err != nil && time.Since(start) < time.Second {
			t.Fatal(err)
		}
		client.Close()
	}
}

// Calls that meet the end of the client are told of it, or answered.
func TestCallsDuringTheEndOfTheClient(t *testing.T) {
	t.Parallel()
	node := testkit.StartNode(t, open)
	for range 30 {
		client := connect(t, node.GRPC)
		granted(t, client, "a", "b")
		var callers sync.WaitGroup
		for range 10 {
			callers.Go(func() {
				for {
					_, err := client.Allow(context.Background(), "a", "b")
					if errors.Is(err, tollgate.ErrClosed) {
						return
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		time.Sleep(time.Millisecond)
		client.Close()
		callers.Wait()
	}
}

func TestNilIsTheDefault(t *testing.T) {
	t.Parallel()
	client := connect(t, testkit.DeadAddress, tollgate.WithLogger(nil), tollgate.WithMetrics(nil),
		tollgate.WithFallback(nil), tollgate.OnRefused(nil), tollgate.OnSoftLimited(nil), tollgate.WithDeadline(0))
	if _, err := client.Allow(t.Context(), "a", "b", tollgate.Deadline(0)); !errors.Is(err, tollgate.ErrUnreachable) {
		t.Fatal(err)
	}
}
