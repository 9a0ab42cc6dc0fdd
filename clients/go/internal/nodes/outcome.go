package nodes

import (
	"context"
	"errors"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tollgate/tollgate/clients/go/internal/fault"
)

const (
	// The time within which a node should answer: a call that has less says nothing about the node
	// if it gets no answer.
	fairTime = 50 * time.Millisecond
	// How long an overloaded node is left alone that does not say how long.
	overloadPause = 200 * time.Millisecond
)

// outcome is how a call has ended.
type outcome struct {
	report report
	// For how long an overloaded node wants to be left alone.
	pause time.Duration
	// Why there is no answer; nil if there is one.
	err error
	// Another node may answer.
	retry bool
	// The request may have arrived.
	sent bool
}

// outcomeOf tells what an error of a call means that had this time. Without a stream, no node got
// the request.
func outcomeOf(ctx context.Context, err error, hadStream bool, had time.Duration) outcome {
	if err == nil {
		return outcome{report: answered}
	}
	if err == errEnded {
		return outcome{report: cancelled, err: fault.ErrUnreachable, retry: true}
	}
	answer := status.Convert(err)
	if ctx.Err() != nil {
		if errors.Is(ctx.Err(), context.Canceled) || had < fairTime {
			return outcome{report: cancelled, err: fault.ErrTimeout}
		}
		return outcome{report: failed, err: fault.ErrTimeout}
	}
	of := func(kind error) error { return &fault.Error{Kind: kind, Message: answer.Message()} }
	text := &fault.Error{Kind: fault.ErrFailed, Message: answer.Code().String() + ": " + answer.Message()}
	switch answer.Code() {
	// A resource that has the other kind of limits is a failed precondition. A message that is too
	// long is out of range.
	case codes.InvalidArgument, codes.FailedPrecondition, codes.OutOfRange:
		return outcome{report: answered, err: &fault.Error{Kind: fault.ErrInvalid, Message: "invalid request: " + answer.Message()}}
	case codes.NotFound:
		return outcome{report: answered, err: of(fault.ErrNotConfigured)}
	// See known.
	case codes.Aborted:
		return outcome{report: answered, err: of(fault.ErrNotConfigured), retry: true}
	// About the caller, not about the node.
	case codes.PermissionDenied:
		return outcome{report: answered, err: of(fault.ErrForbidden)}
	case codes.Unauthenticated:
		return outcome{report: answered, err: text}
	case codes.ResourceExhausted:
		return outcome{report: overloaded, pause: pauseOf(answer), err: fault.ErrOverloaded, retry: true}
	case codes.Unavailable:
		if !hadStream {
			return outcome{report: unreachable, err: fault.ErrUnreachable, retry: true}
		}
	case codes.DeadlineExceeded:
		// The node, which knows the deadline, has given up a moment before this client.
		if had < fairTime {
			return outcome{report: cancelled, err: fault.ErrTimeout, retry: true, sent: true}
		}
		return outcome{report: failed, err: fault.ErrTimeout, retry: true, sent: true}
	}
	// A connection that broke, a node that stops, or no node at all. If the request was decided, its
	// tokens are lost.
	return outcome{report: failed, err: text, retry: true, sent: true}
}

func pauseOf(answer *status.Status) time.Duration {
	for _, detail := range answer.Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok && info.RetryDelay != nil {
			return info.RetryDelay.AsDuration()
		}
	}
	return overloadPause
}
