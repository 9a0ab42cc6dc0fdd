package tollgate_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
)

func TestAFakeAnswersAsItIsTold(t *testing.T) {
	fake := tollgate.NewFake(tollgate.FakeGrant())
	fake.Answer("db", "reads", tollgate.FakeRefuse(2*time.Second))
	client := fake.Client()
	defer client.Close()
	ctx := context.Background()
	if _, err := client.Acquire(ctx, "db", "writes"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		_, err := client.Acquire(ctx, "db", "reads", tollgate.Tokens(3))
		var refused *tollgate.RefusedError
		if !errors.As(err, &refused) || refused.Decision.RetryAfter != 2*time.Second {
			t.Fatal(err)
		}
		if err.Error() != "refused: the limit is reached" {
			t.Fatal(err)
		}
	}
	if asked := fake.Asked("db", "reads"); !slices.Equal(asked, []int64{3, 3}) {
		t.Fatal("there is no memory of refusals", asked)
	}
	fake.Answer("db", "reads", tollgate.FakeInvalid())
	if _, err := client.Allow(ctx, "db", "reads"); !errors.Is(err, tollgate.ErrInvalid) {
		t.Fatal(err)
	}
	fake.Answer("db", "reads", tollgate.FakeNoBucket())
	if decision, err := client.Allow(ctx, "db", "reads"); err != nil || decision.Reason != tollgate.ReasonNoBucket {
		t.Fatal(decision, err)
	}
	fake.Answer("db", "reads", tollgate.FakeNoNode())
	_, err := client.Allow(ctx, "db", "reads")
	var none *tollgate.NoDecisionError
	if !errors.As(err, &none) || !errors.Is(err, tollgate.ErrUnreachable) {
		t.Fatal(err)
	}
	decision, err := fake.Client(tollgate.WithFallback(tollgate.FallbackAllow)).Allow(ctx, "db", "reads")
	if err != nil || decision.DecidedBy != tollgate.ByFallback || !decision.Granted {
		t.Fatal(decision, err)
	}
}

func TestAcquireAsksAgainUntilItsWaitIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := tollgate.NewFake(tollgate.FakeRate(2, 1))
		client := fake.Client()
		defer client.Close()
		ctx, start := context.Background(), time.Now()
		for range 3 {
			if _, err := client.Acquire(ctx, "a", "b", tollgate.MaxWait(time.Second)); err != nil {
				t.Fatal(err)
			}
		}
		// The second and the third come at two a second, and a tenth later at most.
		if took := time.Since(start); took < time.Second || took > 1150*time.Millisecond {
			t.Fatal(took)
		}
		start = time.Now()
		if _, err := client.Acquire(ctx, "a", "b", tollgate.MaxWait(300*time.Millisecond)); err == nil {
			t.Fatal("granted too early")
		}
		if took := time.Since(start); took != 0 {
			t.Fatalf("waited %v for what comes too late", took)
		}
	})
}

func TestAcquireWaitsForTokensThatAreGranted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := tollgate.NewFake(tollgate.FakeGrantAfter(1500 * time.Microsecond))
		client := fake.Client()
		defer client.Close()
		start := time.Now()
		if _, err := client.Acquire(t.Context(), "a", "b"); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took != 2*time.Millisecond {
			t.Fatalf("%v, not rounded up to a millisecond", took)
		}
		_, err := client.Acquire(t.Context(), "a", "b", tollgate.MaxWait(time.Millisecond))
		var refused *tollgate.RefusedError
		// Asked twice: at first, and when its wait was over.
		if !errors.As(err, &refused) || refused.Decision.RetryAfter != 2*time.Millisecond {
			t.Fatal(err)
		}
	})
}

func TestAContextBoundsTheWaitAndTheAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := tollgate.NewFake(tollgate.FakeGrantAfter(900 * time.Millisecond))
		client := fake.Client()
		defer client.Close()
		acquire := func(timeout time.Duration, options ...tollgate.RequestOption) (time.Duration, error) {
			ctx, cancel := context.WithTimeout(context.Background(), timeout)
			defer cancel()
			start := time.Now()
			_, err := client.Acquire(ctx, "a", "b", options...)
			return time.Since(start), err
		}
		var refused *tollgate.RefusedError
		// The last 200 ms are for the answer.
		if took, err := acquire(1100 * time.Millisecond); err != nil || took != 900*time.Millisecond {
			t.Fatal(err, took)
		}
		if took, err := acquire(1099 * time.Millisecond); !errors.As(err, &refused) || took != 0 {
			t.Fatal(err, took)
		}
		// It asks again when it may be granted, and ends in time all the same.
		if took, err := acquire(time.Second, tollgate.MaxWait(time.Hour)); !errors.As(err, &refused) || took > time.Second {
			t.Fatal(err, took)
		}
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(time.Millisecond, cancel)
		if _, err := client.Acquire(ctx, "a", "b"); err != context.Canceled {
			t.Fatal(err)
		}
		asked := len(fake.Asked("a", "b"))
		if _, err := client.Allow(ctx, "a", "b"); err != context.Canceled || len(fake.Asked("a", "b")) != asked {
			t.Fatal("asked for nobody", err)
		}
	})
}
