// Package tollgate is the client of tollgate, the quota service.
//
// A service asks tollgate for tokens before it calls what it shares with others: a database, an
// API. [Client.Acquire] waits for them, [Client.Allow] only asks. With the library in the way, an
// application never waits longer than it said, and goes on when the quota service does not answer: a
// [Fallback] decides then.
//
//	client, err := tollgate.New([]string{"tollgate.internal:10990"},
//		tollgate.WithFallback(tollgate.FallbackRate(10, 20)))
//	…
//	_, err = client.Acquire(ctx, "db", "reads", tollgate.MaxWait(time.Second))
//	// Without an error, call the database.
//
// A client that makes many calls leases a share of a resource's capacity instead, and limits itself
// to it, without a call for each use: see [Client.RateLimiter], [Client.Gauge] and [Client.Capacity]. Or
// it takes tokens of a bucket ahead of need: see [Client.SmartBucket]. What a call has cost beyond its
// tokens is charged afterwards: see [Client.Charge].
//
// What each user or tenant may use of a resource is asked for with [Client.Hits], or held for a while:
// see [Client.Hold].
//
// The packages below take tokens before each call of a gRPC client (tollgategrpc), before each
// request that an HTTP client makes or an HTTP server handles (tollgatehttp), and show the metrics
// to Prometheus (tollgateprom).
//
// # When nodes fail
//
// A call that fails at one node is made to another one, as long as the deadline lasts. A node that
// can't be reached, or has failed three times in a row, is not called any more until it answers a
// health check: first after 0.1 s, then after ever longer pauses of up to 10 s. Then it gets one
// call at a time until it answers one. A node that says that it is overloaded is left alone for as
// long as it says, for 10 s at most. When there is no answer within the deadline, or no node to
// call, the fallback decides, without a wait in the latter case. A node that hangs takes up the
// deadline of the first calls, and counts as failing if they had 50 ms or more. Requests that a
// node has decided but not answered cost their tokens.
package tollgate
