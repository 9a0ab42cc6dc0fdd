package charge_test

import (
	"bytes"
	"context"
	"log/slog"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/internal/charge"
)

// scenario runs a test in a bubble, with a client of a fake.
func scenario(t *testing.T, answer tollgate.FakeAnswer, test func(t *testing.T, fake *tollgate.Fake, client *tollgate.Client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		fake := tollgate.NewFake(answer)
		client := fake.Client()
		defer client.Close()
		test(t, fake, client)
	})
}

func wantAsked(t *testing.T, fake *tollgate.Fake, bucket string, expected ...int64) {
	t.Helper()
	if asked := fake.Asked("db", bucket); !slices.Equal(asked, expected) {
		t.Fatalf("%s was asked for %v, not %v", bucket, asked, expected)
	}
}

func TestChargesArePutTogether(t *testing.T) {
	scenario(t, tollgate.FakeGrant(), func(t *testing.T, fake *tollgate.Fake, client *tollgate.Client) {
		for range 1000 {
			client.Charge("db", "rows", 3)
			client.Charge("db", "bytes", 0)
			client.Charge("db", "bytes", -1)
		}
		time.Sleep(time.Second)
		wantAsked(t, fake, "rows", 3000)
		wantAsked(t, fake, "bytes")
		client.Charge("db", "rows", 7)
		time.Sleep(time.Second)
		wantAsked(t, fake, "rows", 3000, 7)
	})
}

func TestWhatIsRefusedIsChargedLaterAndWhatIsTooMuchInParts(t *testing.T) {
	scenario(t, tollgate.FakeGrant(), func(t *testing.T, fake *tollgate.Fake, client *tollgate.Client) {
		// More than eight are never granted at once.
		fake.Answer("db", "rows", tollgate.FakeRate(10, 8))
		client.Charge("db", "rows", 100)
		time.Sleep(20 * time.Second)
		if asked := fake.Asked("db", "rows"); !slices.Equal(asked[:5], []int64{100, 50, 25, 12, 6}) {
			t.Fatal(asked)
		}
		// Without an answer, later, too.
		fake.Answer("db", "rows", tollgate.FakeNoNode())
		client.Charge("db", "rows", 5)
		time.Sleep(5 * time.Second)
		before := len(fake.Asked("db", "rows"))
		fake.Answer("db", "rows", tollgate.FakeGrant())
		time.Sleep(10 * time.Second)
		if asked := fake.Asked("db", "rows")[before:]; !slices.Equal(asked, []int64{5}) {
			t.Fatal(asked)
		}
		// What can never be charged is dropped.
		fake.Answer("db", "rows", tollgate.FakeNoBucket())
		client.Charge("db", "rows", 5)
		time.Sleep(5 * time.Second)
		fake.Answer("db", "rows", tollgate.FakeGrant())
		before = len(fake.Asked("db", "rows"))
		time.Sleep(5 * time.Second)
		if asked := fake.Asked("db", "rows")[before:]; len(asked) > 0 {
			t.Fatal(asked)
		}
	})
}

func TestWhatNobodyTakesForAMinuteIsDropped(t *testing.T) {
	scenario(t, tollgate.FakeRefuse(100*time.Second), func(t *testing.T, fake *tollgate.Fake, client *tollgate.Client) {
		for range 100 {
			client.Charge("db", "rows", 5)
			time.Sleep(time.Second)
		}
		// What was charged in the first minute is gone.
		fake.Answer("db", "rows", tollgate.FakeGrant())
		time.Sleep(20 * time.Second)
		asked := fake.Asked("db", "rows")
		if len(asked) == 0 || asked[len(asked)-1] >= 300 {
			t.Error(asked)
		}
		// Each refused request was made after a longer pause than the one before.
		if len(asked) >= 40 {
			t.Error(asked)
		}
	})
}

func TestWhatIsOpenIsChargedWhenTheClientEnds(t *testing.T) {
	scenario(t, tollgate.FakeGrant(), func(t *testing.T, fake *tollgate.Fake, client *tollgate.Client) {
		client.Charge("db", "rows", 5)
		start := time.Now()
		client.Close()
		client.Close()
		if took := time.Since(start); took != 0 {
			t.Error(took)
		}
		wantAsked(t, fake, "rows", 5)
		// Later charges are ignored.
		client.Charge("db", "rows", 6)
		time.Sleep(time.Minute)
		wantAsked(t, fake, "rows", 5)
	})
	// Also what was refused, and is not due.
	scenario(t, tollgate.FakeRefuse(time.Hour), func(t *testing.T, fake *tollgate.Fake, client *tollgate.Client) {
		client.Charge("db", "rows", 5)
		time.Sleep(200 * time.Millisecond)
		wantAsked(t, fake, "rows", 5)
		fake.Answer("db", "rows", tollgate.FakeGrant())
		client.Close()
		wantAsked(t, fake, "rows", 5, 5)
	})
}

func TestNamesThatAreNotUTF8AreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := tollgate.NewFake(tollgate.FakeGrant())
		var log bytes.Buffer
		client := fake.Client(tollgate.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		client.Charge("db", "\xff", 5)
		client.Charge("\xff", "rows", 5)
		client.Charge("db", "rows", 5)
		time.Sleep(time.Second)
		client.Close()
		wantAsked(t, fake, "rows", 5)
		wantAsked(t, fake, "\xff")
		if !strings.Contains(log.String(), "a name is not UTF-8") {
			t.Error(log.String())
		}
	})
}

// slow takes charges, each after a time, unless it is cancelled.
type slow struct {
	delay             time.Duration
	taken, now, atMax atomic.Int64
}

func (s *slow) ask(ctx context.Context, _ charge.Bucket, tokens int64) charge.Outcome {
	now := s.now.Add(1)
	defer s.now.Add(-1)
	for most := s.atMax.Load(); now > most && !s.atMax.CompareAndSwap(most, now); most = s.atMax.Load() {
	}
	select {
	case <-time.After(s.delay):
	case <-ctx.Done():
		return charge.Outcome{Kind: charge.Lost}
	}
	s.taken.Add(tokens)
	return charge.Outcome{Kind: charge.Taken, Tokens: tokens}
}

type metrics struct{ charged atomic.Int64 }

func (m *metrics) Charged(tokens int64) { m.charged.Add(tokens) }

// bucket is one of many.
func bucket(i int) charge.Bucket {
	return charge.Bucket{Namespace: "db", Name: strconv.Itoa(i)}
}

func TestClosingTakesNoLongerThanFiveSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := slow{delay: time.Hour}
		charges := charge.New(s.ask, &metrics{}, slog.New(slog.DiscardHandler))
		for i := range 1000 {
			charges.Add(bucket(i), 1)
		}
		time.Sleep(time.Second)
		start := time.Now()
		charges.Close()
		if took := time.Since(start); took != 5*time.Second {
			t.Error(took)
		}
		synctest.Wait()
		if s.now.Load() != 0 || s.atMax.Load() != 16 {
			t.Errorf("%d calls, and %d at a time", s.now.Load(), s.atMax.Load())
		}
	})
}

func TestTooManyBucketsAreNotCharged(t *testing.T) {
	var m metrics
	gate := make(chan struct{})
	ask := func(_ context.Context, _ charge.Bucket, tokens int64) charge.Outcome {
		<-gate
		return charge.Outcome{Kind: charge.Taken, Tokens: tokens}
	}
	charges := charge.New(ask, &m, slog.New(slog.DiscardHandler))
	for i := range 10_001 {
		charges.Add(bucket(i), 1)
	}
	charges.Add(bucket(0), 1)
	close(gate)
	for deadline := time.Now().Add(30 * time.Second); m.charged.Load() < 10_001; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d charged", m.charged.Load())
		}
	}
	// There is room again.
	charges.Add(bucket(10_001), 1)
	charges.Close()
	if m.charged.Load() != 10_002 {
		t.Errorf("%d charged", m.charged.Load())
	}
}

// TestStress charges few buckets from many goroutines at once, in real time, for
// the race detector. Nothing is lost, and nothing is taken twice.
func TestStress(t *testing.T) {
	before := runtime.NumGoroutine()
	s := slow{delay: 100 * time.Microsecond}
	var m metrics
	charges := charge.New(s.ask, &m, slog.New(slog.DiscardHandler))
	var users sync.WaitGroup
	for range 8 {
		users.Go(func() {
			for i := range 400 {
				charges.Add(bucket(i%5), 1)
				if i%10 == 0 {
					time.Sleep(10 * time.Millisecond)
				}
			}
		})
	}
	users.Wait()
	users.Go(charges.Close)
	charges.Close()
	users.Wait()
	if s.taken.Load() != 3200 || m.charged.Load() != 3200 {
		t.Errorf("%d taken, told of %d", s.taken.Load(), m.charged.Load())
	}
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before; {
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines more than before", runtime.NumGoroutine()-before)
		}
		time.Sleep(time.Millisecond)
	}
}
