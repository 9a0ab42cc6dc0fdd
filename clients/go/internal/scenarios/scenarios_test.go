// Package scenarios tests the library by the scenarios of clients/README.md, against real nodes and a
// proxy that makes faults.
package scenarios

import (
	"context"
	"errors"
	"testing"
	"time"

	tollgate "github.com/tollgate/tollgate/clients/go"
	"github.com/tollgate/tollgate/clients/go/internal/testkit"
)

// patient is a deadline that no answer of a busy machine reaches.
const patient = 20 * time.Second

// open are limits that refuse nothing.
const open = "global_default_bucket: { size: 1000000, fill_rate: 1000000 }"

// connect makes a patient client.
func connect(t testing.TB, address string, options ...tollgate.Option) *tollgate.Client {
	t.Helper()
	return connectAll(t, []string{address}, options...)
}

func connectAll(t testing.TB, addresses []string, options ...tollgate.Option) *tollgate.Client {
	t.Helper()
	client, err := tollgate.New(addresses, append([]tollgate.Option{tollgate.WithDeadline(patient)}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return client
}

// ask asks for tokens, and fails without a decision.
func ask(t testing.TB, client *tollgate.Client, namespace, bucket string, options ...tollgate.RequestOption) tollgate.Decision {
	t.Helper()
	decision, err := client.Allow(context.Background(), namespace, bucket, options...)
	if err != nil {
		t.Fatal(err)
	}
	return decision
}

// granted asks for tokens that are granted.
func granted(t testing.TB, client *tollgate.Client, namespace, bucket string, options ...tollgate.RequestOption) tollgate.Decision {
	t.Helper()
	decision := ask(t, client, namespace, bucket, options...)
	if !decision.Granted || decision.Reason != tollgate.NotRefused {
		t.Fatalf("refused: %+v", decision)
	}
	return decision
}

// refused asks for tokens that are refused.
func refused(t testing.TB, client *tollgate.Client, namespace, bucket string, options ...tollgate.RequestOption) tollgate.Decision {
	t.Helper()
	decision := ask(t, client, namespace, bucket, options...)
	if decision.Granted || decision.Reason == tollgate.NotRefused {
		t.Fatalf("granted: %+v", decision)
	}
	return decision
}

// askUntil asks for tokens until the decision is such.
func askUntil(t testing.TB, client *tollgate.Client, namespace, bucket, what string, is func(tollgate.Decision) bool) {
	t.Helper()
	testkit.Eventually(t, what, func() bool {
		decision, err := client.Allow(context.Background(), namespace, bucket)
		var none *tollgate.NoDecisionError
		if err != nil && !errors.As(err, &none) {
			t.Fatal(err)
		}
		return err == nil && is(decision)
	})
}

// askUntilDecidedBy asks for tokens of a:b until they are decided on by this one.
func askUntilDecidedBy(t testing.TB, client *tollgate.Client, who tollgate.DecidedBy) {
	t.Helper()
	askUntil(t, client, "a", "b", "decided by "+string(who), func(decision tollgate.Decision) bool {
		return decision.DecidedBy == who
	})
}

func mustBe[T comparable](t testing.TB, found, expected T) {
	t.Helper()
	if found != expected {
		t.Fatalf("%v instead of %v", found, expected)
	}
}

// mustTake fails if something has not taken so long at least, or has taken too long.
func mustTake(t testing.TB, start time.Time, least, most time.Duration) {
	t.Helper()
	if took := time.Since(start); took < least || took > most {
		t.Fatalf("took %v, not %v to %v", took, least, most)
	}
}

// forever is longer than anything takes.
const forever = time.Hour
