package smart_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
)

const ms = time.Millisecond

// scenario runs a test in a bubble, with a smart bucket of a fake.
func scenario(t *testing.T, answer tollgate.FakeAnswer, test func(t *testing.T, fake *tollgate.Fake, bucket *tollgate.SmartBucket)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		fake := tollgate.NewFake(answer)
		client := fake.Client()
		defer client.Close()
		test(t, fake, client.SmartBucket("db", "reads"))
	})
}

// granted is what was asked for, of a fake that grants everything.
func granted(fake *tollgate.Fake) (sum int64) {
	for _, tokens := range fake.Asked("db", "reads") {
		sum += tokens
	}
	return sum
}

func acquire(t *testing.T, bucket *tollgate.SmartBucket, tokens int64, maxWait time.Duration) {
	t.Helper()
	if err := bucket.Acquire(t.Context(), tokens, maxWait); err != nil {
		t.Fatal(err)
	}
}

func TestFewCallsServeManyUses(t *testing.T) {
	scenario(t, tollgate.FakeGrant(), func(t *testing.T, fake *tollgate.Fake, bucket *tollgate.SmartBucket) {
		start := time.Now()
		for use := range 60_000 {
			acquire(t, bucket, 1, time.Second)
			time.Sleep(time.Until(start.Add(time.Duration(use+1) * ms)))
		}
		// The first ones are asked for as they come, and then half a second of use at a time.
		if calls := len(fake.Asked("db", "reads")); calls > 60*4 {
			t.Errorf("%d calls", calls)
		}
		// At most a second of use is left.
		if granted(fake) > 60_000+1100 {
			t.Errorf("%d were granted", granted(fake))
		}
		// None of it stays when nobody uses it.
		time.Sleep(5 * time.Second)
		if bucket.TryAcquire(1) {
			t.Error("some are left")
		}
	})
}

func TestAUseAheadOfNeedWaitsForNobody(t *testing.T) {
	scenario(t, tollgate.FakeGrant(), func(t *testing.T, fake *tollgate.Fake, bucket *tollgate.SmartBucket) {
		refused := 0
		for use := range 10_000 {
			if !bucket.TryAcquire(1) {
				refused++
			}
			// After ten seconds, ten times as much.
			if use < 1000 {
				time.Sleep(10 * ms)
			} else {
				time.Sleep(ms)
			}
		}
		// Until the first ones are there, and while the use grows.
		if refused > 200 {
			t.Errorf("%d of 10000 refused", refused)
		}
	})
}

// TestNeverMoreIsUsedThanWasGranted drives random histories: however the demand
// changes, no more is used than was granted.
func TestNeverMoreIsUsedThanWasGranted(t *testing.T) {
	for seed := range uint64(30) {
		scenario(t, tollgate.FakeGrant(), func(t *testing.T, fake *tollgate.Fake, bucket *tollgate.SmartBucket) {
			random := rand.New(rand.NewPCG(seed, 0))
			var used atomic.Int64
			var users sync.WaitGroup
			for range 20 {
				random := rand.New(rand.NewPCG(random.Uint64(), 0))
				users.Go(func() {
					for range 300 {
						used.Add(useAtRandom(bucket, random))
						if random.IntN(20) == 0 {
							time.Sleep(time.Duration(random.IntN(5000)) * ms)
						}
					}
				})
			}
			for range 100 {
				fake.Answer("db", "reads", answerAtRandom(random))
				time.Sleep(time.Duration(random.IntN(1000)) * ms)
				if used := used.Load(); used > granted(fake) {
					t.Fatalf("seed %d: %d of %d are used", seed, used, granted(fake))
				}
			}
			users.Wait()
			if used := used.Load(); used > granted(fake) {
				t.Fatalf("seed %d: %d of %d are used", seed, used, granted(fake))
			}
		})
	}
}

// useAtRandom returns how many tokens were used.
func useAtRandom(bucket *tollgate.SmartBucket, random *rand.Rand) int64 {
	tokens := 1 + random.Int64N(9)
	maxWait := time.Duration(random.IntN(50)) * ms
	isUsed := false
	switch random.IntN(4) {
	case 0:
		isUsed = bucket.TryAcquire(tokens)
	case 1:
		// Some give up before they are answered.
		ctx, cancel := context.WithTimeout(context.Background(), maxWait)
		isUsed = bucket.Acquire(ctx, tokens, time.Second) == nil
		cancel()
	default:
		isUsed = bucket.Acquire(context.Background(), tokens, maxWait) == nil
	}
	if !isUsed {
		return 0
	}
	return tokens
}

func answerAtRandom(random *rand.Rand) tollgate.FakeAnswer {
	switch random.IntN(5) {
	case 0:
		return tollgate.FakeRefuse(time.Duration(1+random.IntN(299)) * ms)
	case 1:
		return tollgate.FakeGrantAfter(time.Duration(random.IntN(100)) * ms)
	case 2:
		return tollgate.FakeNoNode()
	default:
		return tollgate.FakeGrant()
	}
}

func TestDemandBeyondTheRateUsesAllOfIt(t *testing.T) {
	// Of any size: a bucket that holds a tenth of a second, and one that holds a
	// minute.
	for _, one := range []struct {
		rate  float64
		burst int64
	}{{1000, 100}, {1000, 60_000}, {20, 2}, {100_000, 10_000}} {
		scenario(t, tollgate.FakeRate(one.rate, one.burst), func(t *testing.T, _ *tollgate.Fake, bucket *tollgate.SmartBucket) {
			var used atomic.Int64
			var users sync.WaitGroup
			for range 50 {
				users.Go(func() {
					for bucket.Acquire(context.Background(), 1, 10*time.Second) == nil {
						used.Add(1)
						if one.rate < 1000 {
							time.Sleep(ms)
						}
					}
				})
			}
			// What the bucket held at first is used by then.
			time.Sleep(5 * time.Second)
			before := used.Load()
			time.Sleep(20 * time.Second)
			part := float64(used.Load()-before) / (20 * one.rate)
			if part < 0.98 || part > 1.02 {
				t.Errorf("%v %v: %v", one.rate, one.burst, part)
			}
			bucket.Close()
			users.Wait()
		})
	}
}

func TestWhoWaitsIsToldWhyThereAreNoTokens(t *testing.T) {
	scenario(t, tollgate.FakeNoNode(), func(t *testing.T, fake *tollgate.Fake, bucket *tollgate.SmartBucket) {
		start := time.Now()
		err := bucket.Acquire(t.Context(), 1, time.Minute)
		var none *tollgate.NoDecisionError
		if !errors.As(err, &none) || !errors.Is(err, tollgate.ErrUnreachable) {
			t.Fatal(err)
		}
		// As soon as that is known.
		if took := time.Since(start); took >= time.Second {
			t.Fatal(took)
		}
		fake.Answer("db", "reads", tollgate.FakeInvalid())
		if err := bucket.Acquire(t.Context(), 1, time.Minute); !errors.Is(err, tollgate.ErrInvalid) {
			t.Fatal(err)
		}
		fake.Answer("db", "reads", tollgate.FakeNoBucket())
		if refusal := refused(t, bucket, 1, time.Minute); refusal.Reason != tollgate.ReasonNoBucket {
			t.Fatal(refusal)
		}
		fake.Answer("db", "reads", tollgate.FakeRefuse(100*time.Second))
		refusal := refused(t, bucket, 1, 5*time.Second)
		if refusal.Reason != tollgate.ReasonLimit || refusal.RetryAfter <= 90*time.Second || refusal.RetryAfter > 100*time.Second {
			t.Fatal(refusal)
		}
		fake.Answer("db", "reads", tollgate.FakeGrant())
		acquire(t, bucket, 1, 5*time.Second)
		// The fallback has a rate for all.
		client := tollgate.NewFake(tollgate.FakeNoNode()).Client(tollgate.WithFallback(tollgate.FallbackRate(1, 5)))
		defer client.Close()
		bucket = client.SmartBucket("db", "reads")
		acquire(t, bucket, 5, 2*time.Second)
		refused(t, bucket, 5, 2*time.Second)
	})
}

// refused expects a refusal.
func refused(t *testing.T, bucket *tollgate.SmartBucket, tokens int64, maxWait time.Duration) tollgate.Decision {
	t.Helper()
	var refused *tollgate.RefusedError
	if err := bucket.Acquire(t.Context(), tokens, maxWait); !errors.As(err, &refused) {
		t.Fatal(err)
	}
	return refused.Decision
}

func TestWhoCameFirstIsServedFirst(t *testing.T) {
	scenario(t, tollgate.FakeRate(10, 100), func(t *testing.T, _ *tollgate.Fake, bucket *tollgate.SmartBucket) {
		acquire(t, bucket, 100, time.Second)
		var served []int
		var mu sync.Mutex
		var users sync.WaitGroup
		// The first one needs many, the others few.
		for place, tokens := range []int64{30, 1, 1, 5, 1} {
			users.Go(func() {
				if err := bucket.Acquire(context.Background(), tokens, time.Minute); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				served = append(served, place)
			})
			synctest.Wait()
			if bucket.TryAcquire(1) {
				t.Error("before those who wait")
			}
			time.Sleep(200 * ms)
		}
		users.Wait()
		if len(served) != 5 || served[0] != 0 {
			t.Error(served)
		}
	})
}

func TestWhoGivesUpLeavesTheTokensToTheNext(t *testing.T) {
	scenario(t, tollgate.FakeRate(10, 100), func(t *testing.T, fake *tollgate.Fake, bucket *tollgate.SmartBucket) {
		acquire(t, bucket, 100, time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		var users sync.WaitGroup
		users.Go(func() {
			if err := bucket.Acquire(ctx, 90, time.Minute); err != context.Canceled {
				t.Error(err)
			}
		})
		synctest.Wait()
		users.Go(func() { acquire(t, bucket, 10, time.Minute) })
		time.Sleep(3 * time.Second)
		start := time.Now()
		cancel()
		users.Wait()
		if took := time.Since(start); took != 0 {
			t.Errorf("waits for %v more", took)
		}
		if err := bucket.Acquire(ctx, 1, time.Minute); err != context.Canceled {
			t.Error(err)
		}
	})
}

func TestASmartBucketThatIsClosedServesNobody(t *testing.T) {
	for _, closeClient := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			fake := tollgate.NewFake(tollgate.FakeGrant())
			client := fake.Client()
			bucket := client.SmartBucket("db", "reads")
			for range 20 {
				acquire(t, bucket, 100, time.Second)
				time.Sleep(50 * ms)
			}
			fake.Answer("db", "reads", tollgate.FakeRefuse(time.Hour))
			isClosed := func(err error) {
				t.Helper()
				var none *tollgate.NoDecisionError
				if !errors.As(err, &none) || !errors.Is(err, tollgate.ErrClosed) {
					t.Error(err)
				}
			}
			var users sync.WaitGroup
			users.Go(func() { isClosed(bucket.Acquire(context.Background(), 1_000_000, time.Hour)) })
			synctest.Wait()
			if closeClient {
				client.Close()
			} else {
				bucket.Close()
				bucket.Close()
			}
			users.Wait()
			asked := len(fake.Asked("db", "reads"))
			if bucket.TryAcquire(1) {
				t.Error("a token is left")
			}
			isClosed(bucket.Acquire(context.Background(), 1, time.Hour))
			client.Close()
			client.Close()
			bucket.Close()
			isClosed(client.SmartBucket("db", "reads").Acquire(context.Background(), 1, time.Hour))
			time.Sleep(time.Hour)
			if more := len(fake.Asked("db", "reads")) - asked; more != 0 {
				t.Errorf("asked %d times more", more)
			}
		})
	}
}

func TestMistakesOfTheCallerAskNobody(t *testing.T) {
	scenario(t, tollgate.FakeGrant(), func(t *testing.T, fake *tollgate.Fake, bucket *tollgate.SmartBucket) {
		client := fake.Client()
		defer client.Close()
		for _, names := range [][2]string{{"db\xff", "reads"}, {"db", "\xff"}} {
			invalid := client.SmartBucket(names[0], names[1])
			if err := invalid.Acquire(t.Context(), 1, time.Second); !errors.Is(err, tollgate.ErrInvalid) || invalid.TryAcquire(1) {
				t.Error(err)
			}
			invalid.Close()
			if len(fake.Asked(names[0], names[1])) > 0 {
				t.Error("asked")
			}
		}
		for _, tokens := range []int64{-1, 1 << 32} {
			if err := bucket.Acquire(t.Context(), tokens, time.Second); !errors.Is(err, tollgate.ErrInvalid) || bucket.TryAcquire(tokens) {
				t.Error(err)
			}
		}
		time.Sleep(time.Second)
		if granted(fake) != 0 {
			t.Error("asked")
		}
		acquire(t, bucket, 0, 0+time.Second)
		if granted(fake) != 1 {
			t.Error("no tokens are one")
		}
	})
}

// A keeper that has nothing to keep ends, so that a bucket that nobody closes
// costs nothing.
func TestAForgottenSmartBucketHasNoGoroutine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		before := runtime.NumGoroutine()
		client := tollgate.NewFake(tollgate.FakeGrant()).Client()
		for range 3 {
			bucket := client.SmartBucket("db", "reads")
			for range 10 {
				acquire(t, bucket, 100, time.Second)
				time.Sleep(50 * ms)
			}
			time.Sleep(3 * time.Second)
			if more := runtime.NumGoroutine() - before; more > 0 {
				t.Fatalf("%d goroutines", more)
			}
			// It begins again.
			acquire(t, bucket, 100, time.Second)
		}
		time.Sleep(3 * time.Second)
	})
}

// counting counts what the metrics are told.
type counting struct {
	tollgate.NoMetrics
	used, refused atomic.Int64
}

func (c *counting) SmartTokens(used, refused int64) {
	c.used.Add(used)
	c.refused.Add(refused)
}

func TestTheMetricsAreToldOfAllTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var metrics counting
		fake := tollgate.NewFake(tollgate.FakeRate(100, 100))
		client := fake.Client(tollgate.WithMetrics(&metrics))
		bucket := client.SmartBucket("db", "reads")
		var used, refused int64
		random := rand.New(rand.NewPCG(1, 0))
		for range 1000 {
			tokens := 1 + random.Int64N(5)
			if bucket.TryAcquire(tokens) {
				used += tokens
			} else {
				refused += tokens
			}
			time.Sleep(time.Duration(random.IntN(50)) * ms)
		}
		client.Close()
		synctest.Wait()
		if metrics.used.Load() != used || metrics.refused.Load() != refused || used == 0 || refused == 0 {
			t.Errorf("%d and %d, not %d and %d", metrics.used.Load(), metrics.refused.Load(), used, refused)
		}
	})
}

func TestAUseCostsNoAllocation(t *testing.T) {
	scenario(t, tollgate.FakeGrant(), func(t *testing.T, fake *tollgate.Fake, bucket *tollgate.SmartBucket) {
		fill(t, bucket)
		isThere := true
		allocations := testing.AllocsPerRun(10_000, func() { isThere = isThere && bucket.TryAcquire(1) })
		if allocations != 0 || !isThere {
			t.Errorf("%v allocations, there: %v", allocations, isThere)
		}
	})
}

// fill has the bucket take many tokens ahead.
func fill(t testing.TB, bucket *tollgate.SmartBucket) {
	for range 15 {
		if err := bucket.Acquire(t.Context(), 1_000_000, time.Minute); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * ms)
	}
}

// The cost of a use, which is 200 ns at most:
//
//	go test -run '^$' -bench . ./internal/smart
func BenchmarkTryAcquire(b *testing.B) {
	client := tollgate.NewFake(tollgate.FakeGrant()).Client()
	defer client.Close()
	bucket := client.SmartBucket("db", "reads")
	fill(b, bucket)
	b.ReportAllocs()
	refused := 0
	for b.Loop() {
		if !bucket.TryAcquire(1) {
			refused++
		}
	}
	b.ReportMetric(float64(refused)/float64(b.N), "refused/op")
}

// The same by many goroutines at once.
func BenchmarkTryAcquireParallel(b *testing.B) {
	client := tollgate.NewFake(tollgate.FakeGrant()).Client()
	defer client.Close()
	bucket := client.SmartBucket("db", "reads")
	fill(b, bucket)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			bucket.TryAcquire(1)
		}
	})
}
