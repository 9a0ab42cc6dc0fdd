package tollgate

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/pb/quotaservice"
)

func TestOnlyWhatIsKnownIsGranted(t *testing.T) {
	from := func(status int32) (Decision, error) {
		return fromResponse(&quotaservice.AllowResponse{Status: quotaservice.AllowResponse_Status(status)})
	}
	if decision, err := from(0); err != nil || !decision.Granted {
		t.Fatal(decision, err)
	}
	for _, status := range []int32{1, 2, 3, 4, 6} {
		if decision, err := from(status); err != nil || decision.Granted || decision.Reason == NotRefused {
			t.Fatal(status, decision, err)
		}
	}
	if _, err := from(5); !errors.Is(err, ErrInvalid) {
		t.Fatal(err)
	}
	for _, status := range []int32{7, -1, math.MaxInt32} {
		if decision, err := from(status); !errors.Is(err, ErrFailed) || decision.Granted {
			t.Fatal(status, decision, err)
		}
	}
}

func TestTheDebtOfARefusal(t *testing.T) {
	debt := func(tokens, rate float64) time.Duration {
		decision, err := fromResponse(&quotaservice.AllowResponse{
			Status: quotaservice.AllowResponse_REJECTED_TIMEOUT, TokensAvailable: tokens, FillRate: rate,
		})
		if err != nil {
			t.Fatal(err)
		}
		return decision.debt()
	}
	for _, one := range []struct {
		tokens, rate float64
		debt         time.Duration
	}{
		{-5, 2, 2500 * time.Millisecond}, {5, 2, 0}, {0, 0, 0}, {-1, 0, 0}, {-1, -1, 0},
		{math.NaN(), 1, 0}, {-1, math.NaN(), 0}, {math.Inf(-1), 1, 0}, {-1, 1e-300, longest},
	} {
		if found := debt(one.tokens, one.rate); found != one.debt {
			t.Errorf("%+v: %v", one, found)
		}
	}
}

func TestNumbersOfANodeAreBounded(t *testing.T) {
	decision, err := fromResponse(&quotaservice.AllowResponse{TokensGranted: -1, WaitMillis: math.MaxInt64})
	if err != nil || decision.Tokens != 0 || decision.Wait < longest-time.Second {
		t.Fatal(decision, err)
	}
	decision, err = fromResponse(&quotaservice.AllowResponse{WaitMillis: math.MinInt64})
	if err != nil || decision.Wait != 0 {
		t.Fatal(decision, err)
	}
}
