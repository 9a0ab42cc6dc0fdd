// Worker is one of the processes of clients/conformance.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
)

func main() {
	client, err := tollgate.FromEnv(tollgate.WithDeadline(20 * time.Second))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("ready")
	var seconds float64
	if _, err := fmt.Scanln(&seconds); err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(seconds*float64(time.Second)))
	defer cancel()

	var granted int64
	for range 40 {
		decision, err := client.Allow(context.Background(), "shared", "books")
		if err != nil || (decision.Granted && decision.DecidedBy != tollgate.ByNode) {
			log.Fatal(decision, err)
		}
		granted += decision.Tokens
	}

	rate, err := client.RateLimiter("shared")
	if err != nil {
		log.Fatal(err)
	}
	used := 0
	for err = rate.Wait(ctx, 1); err == nil; err = rate.Wait(ctx, 1) {
		used++
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		log.Fatal(err)
	}
	fmt.Println(granted, used)
	client.Close()
}
