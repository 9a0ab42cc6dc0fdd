// Does what it is told with grpc-go; the protocol is that of ../../driver.rs.
package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"
)

type order struct {
	Do          string
	Channel     string
	Addresses   []string
	Authority   *string
	KeepaliveMs int `json:"keepalive_ms"`
	Compression string
	RoundRobin  bool `json:"round_robin"`

	ID         string
	Path       string
	Request    string
	Messages   int
	Callers    int
	Calls      int
	DeadlineMs int `json:"deadline_ms"`
	CancelMs   int `json:"cancel_ms"`
	Metadata   int
	Again      bool

	Requests []string
	Answers  int
	HoldMs   int `json:"hold_ms"`
}

// asIs sends and receives bytes as they are.
type asIs struct{}

func (asIs) Marshal(v any) ([]byte, error)      { return *v.(*[]byte), nil }
func (asIs) Unmarshal(data []byte, v any) error { *v.(*[]byte) = append([]byte{}, data...); return nil }
func (asIs) Name() string                       { return "proto" }

func name(code codes.Code) string {
	names := []string{"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
		"ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
		"OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"}
	return names[code]
}

func decoded(text string) []byte {
	data, err := hex.DecodeString(text)
	if err != nil {
		panic(err)
	}
	return data
}

func opened(o order) *grpc.ClientConn {
	state := resolver.State{}
	for _, address := range o.Addresses {
		state.Addresses = append(state.Addresses, resolver.Address{Addr: address})
	}
	addresses := manual.NewBuilderWithScheme("nodes")
	addresses.InitialState(state)
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithResolvers(addresses),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(asIs{})),
	}
	if o.Authority != nil {
		options = append(options, grpc.WithAuthority(*o.Authority))
	}
	if o.KeepaliveMs > 0 {
		options = append(options, grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: time.Duration(o.KeepaliveMs) * time.Millisecond, Timeout: 5 * time.Second, PermitWithoutStream: true,
		}))
	}
	if o.Compression != "" {
		options = append(options, grpc.WithDefaultCallOptions(grpc.UseCompressor(o.Compression)))
	}
	if o.RoundRobin {
		options = append(options, grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"round_robin":{}}]}`))
	}
	conn, err := grpc.NewClient("nodes:///"+strings.Join(o.Addresses, ","), options...)
	if err != nil {
		panic(err)
	}
	return conn
}

// group is callers that do the same, and the count of what came of it.
type group struct {
	sync.Mutex
	sync.WaitGroup
	stopped  atomic.Bool
	Statuses map[string]int    `json:"statuses"`
	Texts    map[string]string `json:"texts"`
}

func started(conn *grpc.ClientConn, o order) *group {
	g := &group{Statuses: map[string]int{}, Texts: map[string]string{}}
	for caller := 0; caller < o.Callers; caller++ {
		g.Add(1)
		go func() {
			defer g.Done()
			g.run(conn, o)
		}()
	}
	return g
}

func (g *group) run(conn *grpc.ClientConn, o order) {
	for calls := 0; !g.stopped.Load() && (o.Calls == 0 || calls < o.Calls); {
		err := one(conn, o)
		said := status.Convert(err)
		if said.Code() == codes.ResourceExhausted && o.Again {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		calls++
		g.Lock()
		g.Statuses[name(said.Code())]++
		g.Texts[name(said.Code())] = said.Message()
		g.Unlock()
	}
}

func one(conn *grpc.ClientConn, o order) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(o.DeadlineMs)*time.Millisecond)
	defer cancel()
	if o.Metadata > 0 {
		ctx = metadata.AppendToOutgoingContext(ctx, "x-more", strings.Repeat("x", o.Metadata))
	}
	if o.CancelMs > 0 {
		defer time.AfterFunc(time.Duration(o.CancelMs)*time.Millisecond, cancel).Stop()
	}
	request, answer := decoded(o.Request), []byte{}
	if o.Messages == 1 {
		return conn.Invoke(ctx, o.Path, &request, &answer)
	}
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true}, o.Path)
	if err != nil {
		return err
	}
	for sent := 0; sent < o.Messages; sent++ {
		// An error here only says that the stream has ended; its status comes with the answer.
		if stream.SendMsg(&request) != nil {
			break
		}
	}
	_ = stream.CloseSend()
	return stream.RecvMsg(&answer)
}

type streamed struct {
	Answers []string `json:"answers"`
	Status  *string  `json:"status"`
}

// stream sends requests, keeps the stream open, reads answers, and tells whether it then ends.
func stream(conn *grpc.ClientConn, o order) streamed {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	call, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, o.Path)
	said := streamed{Answers: []string{}}
	if err != nil {
		code := name(status.Code(err))
		said.Status = &code
		return said
	}
	for _, text := range o.Requests {
		request := decoded(text)
		_ = call.SendMsg(&request)
	}
	answers, ended := make(chan string), make(chan string, 1)
	go func() {
		for {
			var answer []byte
			if err := call.RecvMsg(&answer); err != nil {
				code := name(status.Code(err))
				if err.Error() == "EOF" {
					code = "OK"
				}
				ended <- code
				return
			}
			select {
			case answers <- hex.EncodeToString(answer):
			case <-ctx.Done():
				return
			}
		}
	}()
	limit := time.After(20 * time.Second)
	for {
		select {
		case answer := <-answers:
			said.Answers = append(said.Answers, answer)
			if len(said.Answers) == o.Answers {
				limit = time.After(time.Duration(o.HoldMs) * time.Millisecond)
			}
		case code := <-ended:
			said.Status = &code
			return said
		case <-limit:
			return said
		}
	}
}

func main() {
	conns, groups := map[string]*grpc.ClientConn{}, map[string]*group{}
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var o order
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			panic(err)
		}
		var answer any = struct{}{}
		switch o.Do {
		case "open":
			conns[o.Channel] = opened(o)
		case "start":
			groups[o.ID] = started(conns[o.Channel], o)
		case "stop":
			groups[o.ID].stopped.Store(true)
		case "wait":
			g := groups[o.ID]
			g.Wait()
			answer = g
		case "stream":
			answer = stream(conns[o.Channel], o)
		}
		text, err := json.Marshal(answer)
		if err != nil {
			panic(err)
		}
		fmt.Println(string(text))
	}
}
