// Acquire reads from a database, as fast as the limit allows. In the root of the repository:
//
//	cargo run --release --bin tollgate -- serve --limits config/limits.yaml
//	go run -C clients/go ./examples/acquire
//
// The first command goes on running: type the other in a second terminal.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
)

func main() {
	address := cmp.Or(os.Getenv("TOLLGATE_ADDRESS"), "127.0.0.1:10990")
	client, err := tollgate.New([]string{address}, tollgate.WithFallback(tollgate.FallbackRate(10, 20)))
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	start := time.Now()
	for read := 1; read <= 20; read++ {
		decision, err := client.Acquire(context.Background(), "Pinky_TheBrain", "UserService_getUser",
			tollgate.Tokens(20), tollgate.MaxWait(2*time.Second))
		at := time.Since(start).Round(time.Millisecond)
		var refused *tollgate.RefusedError
		switch {
		case err == nil:
			fmt.Printf("%8v  read %d: %s\n", at, read, decision.DecidedBy)
		case errors.As(err, &refused):
			fmt.Printf("%8v  no read %d: %v\n", at, read, err)
		default:
			log.Fatal(err)
		}
	}
}
