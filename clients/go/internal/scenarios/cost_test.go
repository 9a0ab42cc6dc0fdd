package scenarios

import (
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/tollgate/tollgate/clients/go/internal/pb/quotaservice"
	"github.com/tollgate/tollgate/clients/go/internal/testkit"
)

// The cost of a call, to be compared with that of the stub alone:
//
//	go test -run '^$' -bench . -count 5 ./internal/scenarios
func BenchmarkAllow(b *testing.B) {
	client := connect(b, testkit.StartNode(b, open).GRPC)
	granted(b, client, "a", "b")
	b.ReportAllocs()
	start := cpu(b)
	for b.Loop() {
		granted(b, client, "a", "b")
	}
	b.ReportMetric(float64((cpu(b)-start).Microseconds())/float64(b.N), "cpu-us/op")
}

// cpu is the processor time of this process so far.
func cpu(b *testing.B) time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

func BenchmarkStub(b *testing.B) {
	node := testkit.StartNode(b, open)
	conn, err := grpc.NewClient(node.GRPC, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	b.ReportAllocs()
	start := cpu(b)
	for b.Loop() {
		ctx := b.Context()
		request := &quotaservice.AllowRequest{Namespace: "a", BucketName: "b", TokensRequested: 1}
		response := &quotaservice.AllowResponse{}
		if err := conn.Invoke(ctx, "/quotaservice.QuotaService/Allow", request, response); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64((cpu(b)-start).Microseconds())/float64(b.N), "cpu-us/op")
}
