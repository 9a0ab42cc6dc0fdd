package tollgate

import (
	"testing"
	"time"
)

func TestALocalRateRefillsUpToItsBurst(t *testing.T) {
	start := time.Now()
	ten, never, slow := newRate(10, 3), newRate(0, 1), newRate(1e-300, 1)
	for at, one := range []struct {
		rate    *rate
		tokens  int64
		ms      int
		retryMS int
		ok      bool
	}{
		{ten, 1, 0, 0, true}, {ten, 1, 0, 0, true}, {ten, 1, 0, 0, true},
		{ten, 1, 0, 100, false}, {ten, 2, 50, 150, false}, {ten, 1, 100, 0, true},
		// Full.
		{ten, 3, 60_000, 0, true}, {ten, 1, 60_000, 100, false},
		// An earlier time than that of another caller gives nothing.
		{ten, 1, 0, 100, false}, {ten, 1, 60_100, 0, true}, {ten, 1, 60_200, 0, true},
		{ten, 0, 60_100, 0, true}, {ten, 1, 60_200, 100, false},
		// More than it ever holds.
		{ten, 4, 120_000, 0, false},
		{never, 1, 0, 0, true}, {never, 1, 0, 0, false},
		{slow, 1, 0, 0, true}, {slow, 1, 0, 0, false},
	} {
		retryAfter, ok := one.rate.take(one.tokens, start.Add(time.Duration(one.ms)*time.Millisecond))
		if ok != one.ok || retryAfter.Round(time.Microsecond) != time.Duration(one.retryMS)*time.Millisecond {
			t.Errorf("%d: %+v: %v, %v", at, one, retryAfter, ok)
		}
	}
}

func TestTheMostSpecificFallbackCounts(t *testing.T) {
	settings := newSettings([]Option{})
	get := func(namespace, bucket string) Fallback { return settings.fallbacks.get(namespace, bucket) }
	if get("a", "b") != nil {
		t.Fatal("a fallback that nobody has set")
	}
	WithFallback(FallbackAllow)(&settings)
	rate := FallbackRate(1, 1)
	WithBucketFallback("a", "b", rate)(&settings)
	if get("a", "b") != rate || get("a", "c") != FallbackAllow {
		t.Fatal("of the bucket")
	}
	WithNamespaceFallback("a", FallbackDeny)(&settings)
	if get("a", "b") != rate || get("a", "c") != FallbackDeny || get("b", "b") != FallbackAllow {
		t.Fatal("of the namespace")
	}
}
