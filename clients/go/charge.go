package tollgate

import (
	"context"
	"errors"

	"github.com/tollgate/tollgate/clients/go/internal/charge"
)

// Charge charges a bucket with what a request has cost beyond its tokens, once that is known. What is
// charged is put together, and taken from the bucket in the background; nobody waits for it. While the
// bucket refuses it, it is tried again. It is never given back.
//
// It is dropped, which is logged, if the bucket gives nothing for a minute, can never give it, is
// beyond the first 10,000 that are charged at a time, or its name is invalid, or if the client is
// closed. If an answer is lost, what it was about is not charged again. A number below 1 charges
// nothing.
//
//	_, err := client.Acquire(ctx, "db", "rows")
//	…
//	rows := read()
//	// One was paid for.
//	client.Charge("db", "rows", rows-1)
func (c *Client) Charge(namespace, bucket string, tokens int64) {
	c.charges.Add(charge.Bucket{Namespace: namespace, Name: bucket}, tokens)
}

// chargeBy has a backend take what is charged.
func chargeBy(backend backend) charge.Asker {
	return func(ctx context.Context, bucket charge.Bucket, tokens int64) charge.Outcome {
		request := newRequest(bucket.Namespace, bucket.Name, []RequestOption{Tokens(tokens)})
		if err := request.check(); err != nil {
			return charge.Outcome{Kind: charge.Never, Why: err.Error()}
		}
		var decision Decision
		response, err := backend.allow(ctx, request.message())
		if err == nil {
			decision, err = fromResponse(response)
		}
		return chargeOutcome(decision, err, tokens)
	}
}

// chargeOutcome is what an answer to a charge of so many tokens means.
func chargeOutcome(decision Decision, err error, tokens int64) charge.Outcome {
	isOneOf := func(kinds ...error) bool {
		for _, kind := range kinds {
			if errors.Is(err, kind) {
				return true
			}
		}
		return false
	}
	there := decision.level.There()
	hasRetryTime := decision.RetryAfter > 0
	switch reason := decision.Reason; {
	case isOneOf(ErrTimeout, ErrFailed):
		return charge.Outcome{Kind: charge.Lost}
	case isOneOf(ErrUnreachable, ErrOverloaded):
		return charge.Outcome{Kind: charge.Later, Pause: charge.LongPause}
	case err != nil:
		return charge.Outcome{Kind: charge.Never, Why: err.Error()}
	case decision.Granted && decision.Tokens < 1:
		return charge.Outcome{Kind: charge.Lost}
	case decision.Granted:
		// Who is charged does not wait.
		return charge.Outcome{Kind: charge.Taken, Tokens: decision.Tokens}
	case reason == ReasonLimit && there > 0 && tokens > 1:
		// A bucket that lends nothing. Half, as some may be kept in reserve.
		return charge.Outcome{Kind: charge.Part, Tokens: min(there, tokens/2)}
	case hasRetryTime:
		return charge.Outcome{Kind: charge.Later, Pause: decision.RetryAfter}
	case reason == ReasonUnavailable || reason == ReasonTooManyBuckets:
		return charge.Outcome{Kind: charge.Later, Pause: charge.LongPause}
	case (reason == ReasonLimit || reason == ReasonTooManyTokens) && tokens > 1:
		return charge.Outcome{Kind: charge.TooMany}
	default:
		return charge.Outcome{Kind: charge.Never, Why: reason.String()}
	}
}
