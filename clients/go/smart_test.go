package tollgate

import (
	"errors"
	"testing"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/charge"
	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/smart"
)

func TestWhatADecisionMeansToASmartBucket(t *testing.T) {
	refusal := func(reason Reason, retryAfter time.Duration) Decision {
		return Decision{Reason: reason, RetryAfter: retryAfter, DecidedBy: ByNode}
	}
	for _, one := range []struct {
		decision Decision
		kind     smart.Kind
	}{
		{Decision{Granted: true, Tokens: 1}, smart.Granted},
		{refusal(ReasonLimit, time.Second), smart.Later},
		{refusal(ReasonBanned, time.Second), smart.Later},
		{refusal(ReasonLimit, 0), smart.TooMany},
		{refusal(ReasonTooManyTokens, 0), smart.TooMany},
		{refusal(ReasonTooManyTokens, time.Second), smart.Failed},
		{refusal(ReasonBanned, 0), smart.Failed},
		{refusal(ReasonNoBucket, 0), smart.Failed},
		{refusal(ReasonTooManyBuckets, time.Second), smart.Failed},
		{refusal(ReasonUnavailable, 0), smart.Failed},
	} {
		answer := smartAnswer(one.decision, nil)
		if answer.Kind != one.kind {
			t.Errorf("%+v: %v", one.decision, answer.Kind)
		}
		var refused *RefusedError
		if err := answer.Err(time.Minute); !errors.As(err, &refused) || refused.Decision.RetryAfter != time.Minute ||
			refused.Decision.Reason != one.decision.Reason {
			t.Errorf("%+v: %v", one.decision, err)
		}
	}
	failure := &NoDecisionError{ErrTimeout}
	if answer := smartAnswer(Decision{}, failure); answer.Kind != smart.Failed || answer.Err(0) != failure {
		t.Errorf("%+v", answer)
	}
}

func TestWhatADecisionMeansToACharge(t *testing.T) {
	refusal := func(reason Reason, retryAfter time.Duration, available float64) Decision {
		level := smart.NewLevel(available, 1, 1000)
		return Decision{Reason: reason, RetryAfter: retryAfter, DecidedBy: ByNode, level: level}
	}
	fault := func(kind error) error { return &fault.Error{Kind: kind, Message: "why"} }
	for _, one := range []struct {
		decision Decision
		err      error
		tokens   int64
		outcome  charge.Outcome
	}{
		{Decision{Granted: true, Tokens: 7}, nil, 7, charge.Outcome{Kind: charge.Taken, Tokens: 7}},
		{Decision{Granted: true}, nil, 7, charge.Outcome{Kind: charge.Lost}},
		{Decision{}, ErrTimeout, 7, charge.Outcome{Kind: charge.Lost}},
		{Decision{}, fault(ErrFailed), 7, charge.Outcome{Kind: charge.Lost}},
		{Decision{}, ErrUnreachable, 7, charge.Outcome{Kind: charge.Later, Pause: 10 * time.Second}},
		{Decision{}, ErrOverloaded, 7, charge.Outcome{Kind: charge.Later, Pause: 10 * time.Second}},
		{Decision{}, fault(ErrInvalid), 7, charge.Outcome{Kind: charge.Never, Why: "why"}},
		{Decision{}, fault(ErrForbidden), 7, charge.Outcome{Kind: charge.Never, Why: "why"}},
		{Decision{}, ErrClosed, 7, charge.Outcome{Kind: charge.Never, Why: "closed"}},
		{refusal(ReasonLimit, time.Second, 0), nil, 7, charge.Outcome{Kind: charge.Later, Pause: time.Second}},
		{refusal(ReasonLimit, time.Second, -5), nil, 7, charge.Outcome{Kind: charge.Later, Pause: time.Second}},
		{refusal(ReasonLimit, time.Second, 2.9), nil, 7, charge.Outcome{Kind: charge.Part, Tokens: 2}},
		{refusal(ReasonLimit, time.Second, 6), nil, 7, charge.Outcome{Kind: charge.Part, Tokens: 3}},
		{refusal(ReasonLimit, time.Second, 1e300), nil, 7, charge.Outcome{Kind: charge.Part, Tokens: 3}},
		{refusal(ReasonLimit, time.Second, 6), nil, 1, charge.Outcome{Kind: charge.Later, Pause: time.Second}},
		{refusal(ReasonLimit, 0, 0), nil, 7, charge.Outcome{Kind: charge.TooMany}},
		{refusal(ReasonTooManyTokens, 0, 0), nil, 7, charge.Outcome{Kind: charge.TooMany}},
		{refusal(ReasonTooManyTokens, 0, 0), nil, 1, charge.Outcome{Kind: charge.Never, Why: ReasonTooManyTokens.String()}},
		{refusal(ReasonBanned, time.Hour, 0), nil, 7, charge.Outcome{Kind: charge.Later, Pause: time.Hour}},
		{refusal(ReasonUnavailable, 0, 0), nil, 7, charge.Outcome{Kind: charge.Later, Pause: 10 * time.Second}},
		{refusal(ReasonTooManyBuckets, 0, 0), nil, 7, charge.Outcome{Kind: charge.Later, Pause: 10 * time.Second}},
		{refusal(ReasonNoBucket, 0, 0), nil, 7, charge.Outcome{Kind: charge.Never, Why: ReasonNoBucket.String()}},
	} {
		if found := chargeOutcome(one.decision, one.err, one.tokens); found != one.outcome {
			t.Errorf("%+v, %v: %+v instead of %+v", one.decision, one.err, found, one.outcome)
		}
	}
}
