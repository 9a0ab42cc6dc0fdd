package tollgate

import (
	"fmt"
	"time"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
	"github.com/tollgate/tollgate/clients/go/internal/pb/quotaservice"
	"github.com/tollgate/tollgate/clients/go/internal/smart"
)

// Decision is the answer to a request.
type Decision struct {
	// Whether the tokens may be used, after Wait. If not, none were taken.
	Granted bool
	// How many were granted.
	Tokens int64
	// How long to wait before they are used. [Client.Acquire] has waited so long.
	Wait time.Duration
	// Why the request was refused.
	Reason Reason
	// After how long the refused request could be granted, if nobody else asked meanwhile. 0 if it
	// never could, or if nobody knows.
	RetryAfter time.Duration
	// Whether the bucket is past its soft limit: a warning that refusals may follow.
	SoftLimited bool
	// Whether the tokens were granted only because the limit is not enforced yet.
	Shadow bool
	// Who has decided.
	DecidedBy DecidedBy

	// Where the bucket stands after the answer.
	level smart.Level
}

// debt is how long the bucket takes to pay its debt, which a request waits for at least.
func (d *Decision) debt() time.Duration {
	if !d.level.IsKnown() {
		return 0
	}
	return seconds(-d.level.Available / d.level.Rate)
}

// Reason says why a request was refused.
type Reason int

const (
	// It was not: it was granted, or there is no decision.
	NotRefused Reason = iota
	// The bucket, or the fallback's rate, has not enough tokens within the accepted wait.
	ReasonLimit
	// More was asked for than the bucket's ban allows.
	ReasonBanned
	// More tokens than the bucket gives to one request.
	ReasonTooManyTokens
	// The namespace holds as many dynamic buckets as it may.
	ReasonTooManyBuckets
	// The limits have no bucket of this name, and there is no fallback.
	ReasonNoBucket
	// The nodes can't decide, and refuse by their policy for that case; or [FallbackDeny] does.
	ReasonUnavailable
)

func (r Reason) String() string {
	switch r {
	case NotRefused:
		return "not refused"
	case ReasonLimit:
		return "the limit is reached"
	case ReasonBanned:
		return "banned"
	case ReasonTooManyTokens:
		return "more tokens than the bucket gives to one request"
	case ReasonTooManyBuckets:
		return "the namespace has too many buckets"
	case ReasonNoBucket:
		return "there is no such bucket"
	case ReasonUnavailable:
		return "the quota service can't decide"
	}
	return fmt.Sprintf("Reason(%d)", int(r))
}

// DecidedBy says who has decided. Its text is the label of the metrics.
type DecidedBy string

const (
	// A node, by the shared state.
	ByNode DecidedBy = "node"
	// A node that can't reach the shared state, by the namespace's failure policy.
	ByDegradedNode DecidedBy = "degraded_node"
	// The client, without a call: a node has refused as much a moment ago.
	ByMemory DecidedBy = "remembered"
	// The client's fallback, as no node has decided.
	ByFallback DecidedBy = "fallback"
)

// RefusedError is the error of [Client.Acquire] for a request that was refused, or whose tokens would
// come later than the caller wants to wait; and that of [Client.Hits] and [Client.Hold].
type RefusedError struct{ Decision Decision }

func (e *RefusedError) Error() string { return "refused: " + e.Decision.Reason.String() }

// NoDecisionError says that no node has decided, and that no fallback is set. By errors.Is, it is
// [ErrTimeout], [ErrUnreachable], [ErrOverloaded], [ErrForbidden], [ErrNotConfigured], [ErrClosed] or
// [ErrFailed].
type NoDecisionError struct{ cause error }

func (e *NoDecisionError) Error() string { return "no decision: " + e.cause.Error() }

func (e *NoDecisionError) Unwrap() error { return e.cause }

// Errors, to be found with errors.Is.
var (
	// A mistake of the caller, such as a malformed name. No fallback is used.
	ErrInvalid = fault.ErrInvalid
	// The deadline has passed.
	ErrTimeout = fault.ErrTimeout
	// No node can be reached: they failed a moment ago, and are not called until they are found well.
	ErrUnreachable = fault.ErrUnreachable
	// The nodes are overloaded.
	ErrOverloaded = fault.ErrOverloaded
	// The limits do not have what is asked for.
	ErrNotConfigured = fault.ErrNotConfigured
	// The nodes do not allow this client to ask, by their access file.
	ErrForbidden = fault.ErrForbidden
	// The client was closed.
	ErrClosed = fault.ErrClosed
	// A node has answered with another error: its gRPC status code and message.
	ErrFailed = fault.ErrFailed
)

// invalid is a mistake of the caller.
func invalid(message string) error {
	return &fault.Error{Kind: ErrInvalid, Message: "invalid request: " + message}
}

// fromResponse is the answer of a node, as a decision.
func fromResponse(response *quotaservice.AllowResponse) (Decision, error) {
	decision := Decision{DecidedBy: ByNode, level: levelOf(response)}
	if response.Degraded {
		decision.DecidedBy = ByDegradedNode
	}
	reasons := map[quotaservice.AllowResponse_Status]Reason{
		quotaservice.AllowResponse_REJECTED_TIMEOUT:                   ReasonLimit,
		quotaservice.AllowResponse_REJECTED_NO_BUCKET:                 ReasonNoBucket,
		quotaservice.AllowResponse_REJECTED_TOO_MANY_BUCKETS:          ReasonTooManyBuckets,
		quotaservice.AllowResponse_REJECTED_TOO_MANY_TOKENS_REQUESTED: ReasonTooManyTokens,
		quotaservice.AllowResponse_REJECTED_SERVER_ERROR:              ReasonUnavailable,
	}
	switch response.Status {
	case quotaservice.AllowResponse_OK:
		decision.Granted = true
		decision.Tokens = max(response.TokensGranted, 0)
		decision.Wait = millis(response.WaitMillis)
		decision.SoftLimited, decision.Shadow = response.SoftLimited, response.Shadow
		return decision, nil
	case quotaservice.AllowResponse_REJECTED_INVALID_REQUEST:
		return Decision{}, invalid("a name is malformed, or the number of tokens or the wait is out of range")
	}
	reason, ok := reasons[response.Status]
	if !ok {
		text := fmt.Sprintf("the status %d is unknown to this version", response.Status)
		return Decision{}, &fault.Error{Kind: ErrFailed, Message: text}
	}
	if response.Banned && reason == ReasonLimit {
		reason = ReasonBanned
	}
	decision.Reason, decision.RetryAfter = reason, millis(response.RetryAfterMillis)
	return decision, nil
}

// levelOf says where a bucket stands. Of a share, or without a limit that counts, nothing is known.
func levelOf(response *quotaservice.AllowResponse) smart.Level {
	if response.Degraded || response.Shadow || response.Banned {
		return smart.Level{}
	}
	return smart.NewLevel(response.TokensAvailable, response.FillRate, float64(response.Size))
}

// millis is a number of milliseconds, 0 at least.
func millis(number int64) time.Duration {
	const most = int64(longest / time.Millisecond)
	return time.Duration(min(max(number, 0), most)) * time.Millisecond
}

// longest is the longest duration there is.
const longest = time.Duration(1<<63 - 1)

// seconds is a number of seconds; 0 if it is negative or none, and the longest duration at most.
func seconds(number float64) time.Duration {
	if !(number > 0) {
		return 0
	}
	if nanos := number * 1e9; nanos < float64(longest) {
		return time.Duration(nanos)
	}
	return longest
}
