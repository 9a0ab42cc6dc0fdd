// Http_logins is a server that limits how often each address may try to log in. In the root of the
// repository:
//
//	cargo run --release --bin tollgate -- serve --limits config/limits.yaml
//	go run -C clients/go ./examples/http_logins
//	for i in 1 2 3 4 5 6 7; do curl -i -X POST http://127.0.0.1:8080/login; done
//
// The first two commands go on running: each needs a terminal.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/tollgatehttp"
)

// loginsOfCaller is the bucket of the caller's address. Behind a load balancer that is the balancer's
// address: take the caller's from a header that the balancer sets, and that callers can't.
//
// Each address makes a bucket, of the namespace's dynamic_bucket_template. Where callers choose the
// names of buckets, the limits need max_dynamic_buckets: else they make as many as they like.
func loginsOfCaller(r *http.Request) (tollgate.Bucket, bool) {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	return tollgate.Bucket{Namespace: "TheBrain_userLogins", Name: host}, err == nil
}

func main() {
	address := cmp.Or(os.Getenv("TOLLGATE_ADDRESS"), "127.0.0.1:10990")
	// Without a node, all addresses share this rate.
	client, err := tollgate.New([]string{address}, tollgate.WithFallback(tollgate.FallbackRate(10, 20)))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	logins := tollgatehttp.Middleware(client, loginsOfCaller)
	http.Handle("POST /login", logins(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, "welcome")
	})))
	// Without the middleware: it takes no tokens.
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, "log in with a POST to /login")
	})
	server := &http.Server{Addr: "127.0.0.1:8080"}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	context.AfterFunc(ctx, func() { server.Shutdown(context.Background()) })
	fmt.Println("http://127.0.0.1:8080/login")
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		fmt.Fprintln(os.Stderr, err)
	}
}
