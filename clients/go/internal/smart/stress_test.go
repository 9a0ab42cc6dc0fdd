package smart_test

import (
	"context"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/smart"
)

// giver grants all, and counts it.
type giver struct{ granted atomic.Int64 }

func (g *giver) Ask(_ context.Context, tokens int64, _ time.Duration) smart.Answer {
	time.Sleep(time.Duration(rand.IntN(500)) * time.Microsecond)
	switch rand.IntN(4) {
	case 0:
		return smart.Answer{Kind: smart.Later, RetryAfter: time.Millisecond, Err: func(time.Duration) error { return smart.ErrLate }}
	case 1:
		return smart.Answer{Kind: smart.TooMany, Err: func(time.Duration) error { return smart.ErrLate }}
	}
	g.granted.Add(tokens)
	return smart.Answer{Kind: smart.Granted, Tokens: tokens, Wait: time.Duration(rand.IntN(500)) * time.Microsecond}
}

type counted struct{ used, refused atomic.Int64 }

func (c *counted) SmartTokens(used, refused int64) {
	c.used.Add(used)
	c.refused.Add(refused)
}

// TestStress uses smart buckets from many goroutines at once, in real time, for
// the race detector.
func TestStress(t *testing.T) {
	before := runtime.NumGoroutine()
	var given giver
	var told counted
	buckets := smart.New(&told)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	var used atomic.Int64
	var users sync.WaitGroup
	for range 3 {
		bucket := buckets.Bucket(&given, 100*time.Millisecond)
		for seed := range uint64(8) {
			users.Go(func() {
				random := rand.New(rand.NewPCG(seed, 0))
				for ctx.Err() == nil {
					used.Add(stress(ctx, bucket, random))
				}
				if seed == 0 {
					bucket.Close()
				}
			})
		}
	}
	users.Wait()
	buckets.Close()
	buckets.Close()
	if used.Load() > given.granted.Load() || used.Load() == 0 {
		t.Errorf("%d of %d used", used.Load(), given.granted.Load())
	}
	isOver := func() bool { return runtime.NumGoroutine() <= before && told.used.Load() == used.Load() }
	for deadline := time.Now().Add(10 * time.Second); !isOver(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines more than before; %d used, told of %d",
				runtime.NumGoroutine()-before, used.Load(), told.used.Load())
		}
	}
}

// stress returns how many tokens were used.
func stress(ctx context.Context, bucket *smart.Bucket, random *rand.Rand) int64 {
	tokens := 1 + random.Int64N(5)
	shortly := func() time.Duration { return time.Duration(random.IntN(2000)) * time.Microsecond }
	isUsed := false
	switch random.IntN(3) {
	case 0:
		ctx, cancel := context.WithTimeout(ctx, shortly())
		defer cancel()
		isUsed = bucket.Acquire(ctx, tokens, time.Minute) == nil
	case 1:
		isUsed = bucket.Acquire(ctx, tokens, shortly()) == nil
	default:
		isUsed = bucket.TryAcquire(tokens)
	}
	if !isUsed {
		return 0
	}
	return tokens
}
