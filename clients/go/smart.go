package tollgate

import (
	"context"
	"math"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/smart"
)

// defaultAhead is how much use is taken ahead at most, if the application does not say otherwise.
const defaultAhead = time.Second

// SmartOption is a setting of a [SmartBucket].
type SmartOption func(*smartSettings)

type smartSettings struct {
	ahead         time.Duration
	isNotCritical bool
}

// Ahead sets how much use is taken ahead at most: so many tokens as are used in this time; by default
// one second.
func Ahead(ahead time.Duration) SmartOption {
	return func(s *smartSettings) { s.ahead = max(ahead, 0) }
}

// SmartNotCritical leaves what the bucket keeps in reserve for critical requests.
func SmartNotCritical() SmartOption {
	return func(s *smartSettings) { s.isNotCritical = true }
}

// SmartBucket has tokens of a bucket that are taken ahead of need, in the background, so that their use
// costs no call to a node. It may be used by many goroutines at once; share one in a process. Made by
// [Client.SmartBucket].
//
// As many are taken as are used in a second (see [Ahead]), and half of them are left when more are
// asked for. So the first call after a pause waits for a node, and up to a second's use is lost when
// it ends: what was taken is not given back. All clients together never use more than the nodes, or
// the client's fallback, have granted. [OnRefused] is not told of the requests to nodes.
type SmartBucket struct {
	// Without a bucket, its name is invalid.
	bucket *smart.Bucket
}

// SmartBucket takes tokens of a bucket ahead of need. It begins with the first use, and ends with
// [SmartBucket.Close] or [Client.Close].
func (c *Client) SmartBucket(namespace, bucket string, options ...SmartOption) *SmartBucket {
	settings := smartSettings{ahead: defaultAhead}
	for _, option := range options {
		option(&settings)
	}
	request := newRequest(namespace, bucket, nil)
	if request.check() != nil {
		return &SmartBucket{}
	}
	request.isNotCritical = settings.isNotCritical
	return &SmartBucket{c.smart.Bucket(smartAsker{c, request}, settings.ahead)}
}

// TryAcquire uses tokens if they are there, and nobody waits for them. It costs no call to a node. 0
// tokens are one; a negative number, or more than 4,294,967,295, is never there.
func (b *SmartBucket) TryAcquire(tokens int64) bool {
	return b.isValid(tokens) && b.bucket.TryAcquire(max(tokens, 1))
}

// Acquire uses tokens, and waits for them up to maxWait if they are not there. Those who came first are
// served first. 0 tokens are one.
//
// The error is a *[RefusedError] if the tokens would come later than that, a *[NoDecisionError] if no
// node has decided, and no fallback is set, or the smart bucket is closed; and [ErrInvalid] if the
// bucket's name or the number is invalid: negative, or more than 4,294,967,295. If the context ends
// first, its error is returned, and no tokens are used.
func (b *SmartBucket) Acquire(ctx context.Context, tokens int64, maxWait time.Duration) error {
	if !b.isValid(tokens) {
		return invalid("a name is malformed, or the number of tokens is out of range")
	}
	err := b.bucket.Acquire(ctx, max(tokens, 1), maxWait)
	switch {
	case err == smart.ErrLate:
		return &RefusedError{Decision{Reason: ReasonLimit, DecidedBy: ByNode}}
	case err == fault.ErrClosed:
		return &NoDecisionError{ErrClosed}
	}
	return err
}

// Close throws the tokens away, and ends the wait of those who wait for more.
func (b *SmartBucket) Close() {
	if b.bucket != nil {
		b.bucket.Close()
	}
}

func (b *SmartBucket) isValid(tokens int64) bool {
	return b.bucket != nil && tokens >= 0 && tokens <= math.MaxUint32
}

// smartAsker asks for the tokens of a smart bucket.
type smartAsker struct {
	client  *Client
	request Request
}

func (a smartAsker) Ask(ctx context.Context, tokens int64, maxWait time.Duration) smart.Answer {
	request := a.request
	request.Tokens, request.maxWait = tokens, maxWait
	decision, err := a.client.decide(ctx, &request)
	if err == nil && decision.Granted && decision.Tokens < 1 {
		err = &NoDecisionError{&fault.Error{Kind: ErrFailed, Message: "no tokens were granted"}}
	}
	return smartAnswer(decision, err)
}

// smartAnswer is a decision as a smart bucket understands it.
func smartAnswer(decision Decision, err error) smart.Answer {
	if err != nil {
		return smart.Answer{Kind: smart.Failed, Err: func(time.Duration) error { return err }}
	}
	answer := smart.Answer{
		Tokens: decision.Tokens, Wait: decision.Wait, RetryAfter: decision.RetryAfter,
		Debt: decision.debt(), Level: decision.level,
		Err: func(retryAfter time.Duration) error {
			refusal := decision
			refusal.RetryAfter = retryAfter
			return &RefusedError{refusal}
		},
	}
	hasRetryTime := decision.RetryAfter > 0
	switch reason := decision.Reason; {
	case decision.Granted:
		answer.Kind = smart.Granted
	case hasRetryTime && (reason == ReasonLimit || reason == ReasonBanned):
		answer.Kind = smart.Later
	case !hasRetryTime && (reason == ReasonLimit || reason == ReasonTooManyTokens):
		answer.Kind = smart.TooMany
	}
	return answer
}
